"""What Ray would do otherwise with actors, if it were left to itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.engines.ray_actor_classes import (
    Adder,
    Grouped,
    Keeper,
    ThreadGroups,
    call_narrow,
    pid_of,
    tell_and_cancel,
)
from tests.gate import Gate

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("rayed")]


def node() -> Any:
    return aiogpu.init(address="ray", num_cpus=4, num_gpus=2)


async def gone(pid: int) -> bool:
    """Whether a process ends in a while: Ray takes its time, and is not asked."""
    opened = os.pidfd_open(pid)
    ended = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    loop.add_reader(opened, lambda: ended.done() or ended.set_result(True))
    try:
        async with asyncio.timeout(20):
            return bool(await ended)
    finally:
        loop.remove_reader(opened)
        os.close(opened)


async def test_an_actor_ends_though_a_plain_task_had_a_handle() -> None:
    async with node():
        adder = Adder.remote()
        pid = await pid_of.remote(adder)
        del adder
        assert await gone(pid)


async def test_threads_share_the_handles_of_their_actor() -> None:
    async with node():
        adder = Adder.remote()
        front = Adder.options(max_concurrency=3).remote(adder)
        sums = await asyncio.gather(*(front.pass_on.remote(1) for _ in range(6)))
        assert sorted(sums) == [1, 2, 3, 4, 5, 6]


async def test_groups_of_coroutines_share_a_loop_and_keep_their_limits() -> None:
    async with node():
        grouped = Grouped.remote()
        waiting = grouped.wait.remote()
        assert await asyncio.gather(*(grouped.open.remote() for _ in range(5))) == [
            *(1, 1, 1, 1, 1)
        ]
        await waiting


async def test_close_is_awaited_when_the_last_handle_goes(tmp_path: Path) -> None:
    async with node():
        grouped = Grouped.remote(str(tmp_path / "closed"))
        pid = await grouped.pid.remote()
        del grouped
        assert await gone(pid)
        assert (tmp_path / "closed").exists()


async def test_an_actor_with_gpus_holds_no_cpu() -> None:
    async with node():
        holders = [Adder.options(num_gpus=0.25).remote() for _ in range(5)]
        # On four CPUs, if each held one, the fifth would never be made.
        async with asyncio.timeout(30):
            await asyncio.gather(*holders)


async def test_groups_of_threads_hold_wherever_a_handle_has_come(gate: Gate) -> None:
    async with node():
        actor = await ThreadGroups.options(name="grouped").remote()
        sent = call_narrow.remote(actor, gate.path, "task")
        await gate.entered("task")
        by_name = aiogpu.get_actor("grouped").narrow.remote(gate.path, "name")
        others = [actor.wait.remote(gate.path, name) for name in "ab"]
        # Two more than the group has room for, and both places of the other one.
        await gate.entered("a", "b")
        assert gate.inside == {"task", "a", "b"}
        gate.release("task")
        await gate.entered("name")
        gate.release("name", "a", "b")
        assert await asyncio.gather(sent, by_name, *others) == [
            *("task", "name", "a", "b")
        ]


async def test_a_plain_actor_has_the_main_thread_from_its_constructor_on() -> None:
    async with node():
        assert await Keeper.remote().is_in_its_thread.remote()


async def test_calls_of_plain_code_that_were_cancelled_never_run(gate: Gate) -> None:
    async with node():
        keeper = await Keeper.remote()
        busy = keeper.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        await tell_and_cancel.remote(keeper, 40)
        gate.release("busy")
        await busy
        told = await keeper.all_told.remote()
        assert told == sorted(told)
        assert not [number for number in told if number % 2]


async def test_a_threaded_actor_has_streams() -> None:
    async with node():
        actor = await ThreadGroups.remote()
        assert [number async for number in actor.numbers.remote()] == [1]
