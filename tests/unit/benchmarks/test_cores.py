"""The driver and the floor's worker run where they are told to."""

from __future__ import annotations

import os

import pytest

from benchmarks.census import descendants
from benchmarks.cores import floor_apart, next_core, one_core, running_on


def test_a_thread_is_put_back_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    with running_on(one_core()):
        assert os.sched_getaffinity(0) == {min(before)}
        assert next_core() == one_core()
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError), running_on(next_core()):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


@pytest.mark.either_loop
async def test_the_floors_worker_has_a_core_of_its_own() -> None:
    before = os.sched_getaffinity(0)
    first, second = one_core(), next_core()
    of_others = descendants()
    async with floor_apart() as floor:
        assert await floor.call(1) is None
        (pid,) = descendants().keys() - of_others.keys()
        assert os.sched_getaffinity(pid) == second
        assert os.sched_getaffinity(0) == first
    assert os.sched_getaffinity(0) == before
    assert pid not in descendants()
