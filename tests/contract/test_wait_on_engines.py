"""`wait` and `as_completed` end to end: in programs, in coroutines, in plain tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.map_tasks import Plus, sum_of, sum_of_given, sum_of_later
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


async def test_in_a_program(address: str) -> None:
    """[B16] Of tasks that give or fail, calls of actors, and values."""
    async with aiogpu.init(address=address, num_cpus=2), Plus.remote() as actor:
        fails = tasks.fail.remote(KeyError, 2)
        value: Any = await aiogpu.put(5)
        handles: list[Any] = [tasks.add.remote(1), fails, value]
        handles += [actor.add.remote(number) for number in range(5, 15)]
        assert await aiogpu.wait(handles, num_returns=13) == (handles, [])
        found = {
            str(handle.exception()) if handle.exception() else handle.result()
            async for handle in aiogpu.as_completed(handles)
        }
        assert found == {2, "2", 5, *range(6, 16)}
        assert await sum_of_given.remote([value, *handles[3:5]]) == 5 + 6 + 7


@pytest.mark.parametrize("task", [sum_of, sum_of_later])
async def test_in_a_task(address: str, task: Any) -> None:
    """On one CPU, which the task lends while it waits."""
    async with aiogpu.init(address=address, num_cpus=1):
        assert sorted(await task.remote(6)) == [1, 2, 3, 4, 5, 6]
        if address == "local":
            assert sorted(await task.remote(1_000)) == list(range(1, 1_001))


@pytest.mark.needs("at once")
async def test_the_fast_ones_first_and_a_wait_that_is_given_up_leaves_the_work(
    address: str, gate: Gate
) -> None:
    """[B15]"""
    async with aiogpu.init(address=address, num_cpus=3):
        handles = [tasks.gated.remote(gate.path, name) for name in "abc"]
        await gate.entered("a", "b", "c")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aiogpu.wait(handles), 0.001)
        assert await aiogpu.wait(handles, timeout=0) == ([], handles)
        completed = aiogpu.as_completed(handles)
        for name in "bca":
            gate.release(name)
            assert (await anext(completed)).result() == name  # type: ignore[call-overload]
