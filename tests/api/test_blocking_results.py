"""What `aiogpu.get` says where results fail; no process is needed for it."""

import pytest

import aiogpu
from aiogpu.api import blocking
from aiogpu.api.blocking import BlockingHandle
from aiogpu.errors import DeserializationError
from aiogpu.wire.failure import RAISED, pack_failure
from aiogpu.wire.payload import dump_result


class Unreadable:
    def __reduce__(self):
        return (int, ("no number",))


def test_a_value_that_cannot_be_read_stays_an_error():
    handle = BlockingHandle("f")
    handle.receive(dump_result(Unreadable()))
    for _ in range(2):
        with pytest.raises(DeserializationError):
            handle.result()


def test_a_failure_is_raised_though_others_before_it_have_not_ended(monkeypatch):
    monkeypatch.setattr(blocking, "_wait", lambda *_: True)
    running, failed = BlockingHandle("slow"), BlockingHandle("bad")
    failed.reject(pack_failure(1, RAISED, ValueError("boom"), ""))
    with pytest.raises(ValueError, match="boom"):
        aiogpu.get([running, failed])
