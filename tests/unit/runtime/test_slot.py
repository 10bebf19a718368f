"""A worker as the driver sees it: what it has been told already."""

from __future__ import annotations

import asyncio
from typing import cast

from aiogpu.linux.procfs import Findings
from aiogpu.runtime.workers.death import Death
from aiogpu.runtime.workers.slots import SITES_KEPT, LiveWorker, Slot
from aiogpu.wire.messages import Define, Forget
from tests.unit.runtime import funcs


def worker() -> LiveWorker:
    return LiveWorker(1, cast("Slot", None), cast("asyncio.Handle", None))


def test_a_site_is_introduced_once_and_its_function_too() -> None:
    one = worker()
    function = funcs.function()
    first, second = funcs.func(function), funcs.func(function)
    resources = {"CPU": 1.0}
    assert one.introduce(first) == [
        Define(first.id, function.id, "train", resources, b"pickled")
    ]
    assert one.introduce(first) == []
    assert one.introduce(second) == [
        Define(second.id, function.id, "train", resources, b"")
    ]


def test_too_many_sites_are_forgotten_all_together() -> None:
    one = worker()
    function = funcs.function()
    for _ in range(SITES_KEPT):
        assert [type(m) for m in one.introduce(funcs.func(function))] == [Define]
    straw = funcs.func(function)
    forget, define = one.introduce(straw)
    assert forget == Forget()
    assert isinstance(define, Define)
    assert define.payload == b"pickled", "it has been forgotten as well"
    assert (one.funcs, one.functions) == ({straw.id}, {function.id})


def test_a_death_without_a_life() -> None:
    assert Death(reason="why") == (0, None, (), "why", 0, "", Findings())
