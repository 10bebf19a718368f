"""Calls that are made in a row: which may, what ids they have, when they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.runtime.driver import SubmitBatch
from aiogpu.runtime.pending_tasks import Call
from tests.unit.runtime import funcs

SITE = funcs.func()


class Desk:
    """A row on a loop of paper, and a queue that is a number."""

    def __init__(self) -> None:
        self.due: list[Callable[[], object]] = []
        self.told: list[tuple[FunctionSpec, list[Call]]] = []
        self.bucket: Any = SimpleNamespace(size=1)
        loop: Any = SimpleNamespace(call_soon=self.due.append)
        self.row = SubmitBatch(
            loop, lambda func, calls: self.told.append((func, calls))
        )

    def begin(self, func: FunctionSpec = SITE) -> None:
        self.row.begin(func, self.bucket, 40)

    def add(self, name: bytes) -> int:
        receiver: Any = name
        return self.row.add(name, receiver)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_they_are_told_together_in_order_once(desk: Desk) -> None:
    desk.begin()
    assert [desk.add(name) for name in (b"a", b"b", b"c")] == [41, 42, 43]
    assert repr(desk.row) == "<SubmitBatch of 3>"
    assert not desk.told
    (at_the_end,) = desk.due
    desk.row.end()
    ((func, calls),) = desk.told
    assert func is SITE
    assert [(call.payload, call.receiver) for call in calls] == [
        (b"a", b"a"),
        (b"b", b"b"),
        (b"c", b"c"),
    ]
    at_the_end()
    desk.row.end()
    assert len(desk.told) == 1


def test_the_turn_ends_it(desk: Desk) -> None:
    desk.begin()
    desk.add(b"a")
    desk.due.pop()()
    assert len(desk.told) == 1
    assert not desk.add(b"b"), "the next one may start"
    desk.begin()
    assert desk.add(b"b") == 41
    assert len(desk.due) == 1


def test_without_others_that_wait_there_is_none(desk: Desk) -> None:
    assert not desk.add(b"a")
    desk.begin()
    assert desk.add(b"a")
    desk.bucket.size = 0
    assert not desk.add(b"b")
    desk.bucket = None
    desk.row.end()
    desk.begin()
    assert not desk.add(b"c")


@pytest.mark.parametrize(
    "change", [{"timeout": 1.0}, {"is_lease": True}], ids=["timeout", "lease"]
)
def test_what_is_more_than_a_task_is_told_by_itself(
    change: dict[str, Any], desk: Desk
) -> None:
    desk.begin(replace(SITE, spec=replace(SITE.spec, **change)))
    assert desk.row.func is None


def test_an_actor_is_told_by_itself(desk: Desk) -> None:
    terms: Any = SimpleNamespace()
    desk.begin(replace(SITE, actor=terms))
    assert desk.row.func is None
