"""Pools of real actors: calls are spread, dead ones replaced, all end with the pool."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import aiogpu
from tests.contract.actor_classes import Counter
from tests.support.until import until

pytestmark = pytest.mark.usefixtures("no_leaks")


def has_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


async def pids_of(pool: Any, calls: int) -> set[int]:
    return set(await asyncio.gather(*(pool.pid.remote() for _ in range(calls))))


async def test_calls_are_spread_and_all_end_with_the_block() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        cls = Counter.options(num_gpus=0.5)
        async with aiogpu.ActorPool(cls, 2) as pool:
            pids = await pids_of(pool, 4)
            assert len(pids) == 2
            counts = [count async for count in pool.add.map([1] * 10)]
            assert sorted(counts) == sorted([*range(1, 6), *range(1, 6)])
            assert (await aiogpu.available_resources())["GPU"] == 0
        await until(lambda: all(map(has_gone, pids)))


async def test_one_that_dies_is_replaced() -> None:
    async with aiogpu.init(num_cpus=2), aiogpu.ActorPool(Counter, 2) as pool:
        pids = await pids_of(pool, 2)
        with pytest.raises(aiogpu.ActorDiedError):
            await pool.exit.remote(3)
        async with asyncio.timeout(30):
            while len(now := await pids_of(pool, 2)) < 2 or now == pids:
                await asyncio.sleep(0)
        assert len(now & pids) == 1


@pytest.mark.usefixtures("each_engine")
@pytest.mark.either_loop
@pytest.mark.parametrize("size", [3, 5])
async def test_one_for_which_there_is_never_room_is_refused(size: int) -> None:
    """Each of its actors alone could live, and some of them do."""
    half = Counter.options(num_gpus=0.5)
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        told = rf"pool of {size} Counter, each with .*GPU.*0.5.* room for 2 at once"
        with pytest.raises(aiogpu.InfeasibleError, match=told):
            await aiogpu.ActorPool(half, size)
        with pytest.raises(aiogpu.InfeasibleError, match=told):
            async with aiogpu.ActorPool(half, min_size=size, max_size=9):
                raise AssertionError("the block has begun")
        async with aiogpu.ActorPool(half, 2) as pool:
            counts = [count async for count in pool.add.map([1] * 4)]
            assert sorted(counts) == [1, 1, 2, 2]


@pytest.mark.usefixtures("served")
@pytest.mark.either_loop
@pytest.mark.parametrize("place", ["local", "inline", "node"])
async def test_with_its_node_it_is_closed(place: str) -> None:
    """A node of another process answers while it ends what its program leaves."""
    async with aiogpu.init(address=place, num_cpus=2):
        pool = await aiogpu.ActorPool(Counter, 2)
        assert await pool.add.remote() == 1
    assert "closed, 0 actors, 0 ready" in repr(pool)
    with pytest.raises(aiogpu.errors.MisuseError, match="pool of Counter is closed"):
        await pool


@aiogpu.remote
async def pools(size: int) -> list[int]:
    async with aiogpu.ActorPool(Counter.options(num_gpus=0.5), size) as pool:
        return [count async for count in pool.add.map([1] * 4, ordered=True)]


@pytest.mark.usefixtures("each_engine")
@pytest.mark.either_loop
async def test_in_a_task() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        assert sorted(await pools.remote(2)) == [1, 1, 2, 2]
        with pytest.raises(aiogpu.InfeasibleError, match="room for 2 at once"):
            await pools.remote(3)
        while (await aiogpu.available_resources())["GPU"] < 1:
            await asyncio.sleep(0)
