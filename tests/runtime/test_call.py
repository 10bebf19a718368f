"""What the driver keeps of a task."""

from __future__ import annotations

from aiogpu.client.function_spec import new_function_id, new_site_id
from tests.runtime import sites


def test_ids_are_never_given_twice() -> None:
    assert len({new_site_id() for _ in range(100)}) == 100
    assert len({new_function_id() for _ in range(100)}) == 100


def test_a_call_begins_unanswered() -> None:
    call = sites.call()
    assert (call.worker, call.answer) == (0, None)
