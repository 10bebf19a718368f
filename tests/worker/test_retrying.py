"""A worker says itself whether a failure is to be tried again."""

from __future__ import annotations

import pytest

from aiogpu.errors import TaskError
from aiogpu.serialization.serializer import RETRY_ALL, Retried, dump_retried
from aiogpu.wire.messages import Define
from aiogpu.worker.invoke import RetryRules

UNLOADABLE = b"cno_such_module\nNoError\n."


def func(retried: bytes) -> Define:
    return Define(1, 1, "train", {}, b"", retried)


def says(wanted: Retried) -> Define:
    return func(dump_retried(wanted))


def test_by_the_error_or_by_what_is_told_of_it() -> None:
    wants = RetryRules().wants
    assert wants(says((OSError,)), ConnectionError())
    assert not wants(says((OSError,)), KeyError())
    assert wants(func(RETRY_ALL), KeyboardInterrupt())
    assert wants(says((TaskError,)), StopIteration(), TaskError)
    assert wants(says((Exception,)), SystemExit(), TaskError)
    assert not wants(says((OSError,)), SystemExit(), TaskError)


class Deceiver(type):
    """A class of exceptions that cannot be asked for its instances."""

    def __instancecheck__(cls, _instance: object) -> bool:
        raise SystemExit("do not ask")


class Odd(Exception, metaclass=Deceiver):
    """One of them."""


@pytest.mark.parametrize(
    ("retried", "why"),
    [
        (UNLOADABLE, "ModuleNotFoundError: No module named"),
        (dump_retried((Odd,)), "SystemExit: do not ask"),
    ],
)
def test_what_cannot_be_asked_is_told_once(
    retried: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    retrying = RetryRules()
    for _ in range(3):
        assert not retrying.wants(func(retried), KeyError())
    told = capsys.readouterr().err
    assert told.count("train is not tried again") == 1
    assert why in told
    retrying.forget()
    assert not retrying.wants(func(retried), KeyError())
    assert "train is not tried again" in capsys.readouterr().err
