"""What the driver keeps of a task."""

from __future__ import annotations

from aiogpu.client.function_spec import new_func_id, new_function_id
from tests.unit.runtime import funcs


def test_ids_are_never_given_twice() -> None:
    assert len({new_func_id() for _ in range(100)}) == 100
    assert len({new_function_id() for _ in range(100)}) == 100


def test_a_call_begins_unanswered() -> None:
    call = funcs.call()
    assert (call.worker, call.answer) == (0, None)
