"""Pools of real actors: calls are spread, dead ones replaced, all end with the pool."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import aiogpu
from tests.engines.actor_classes import Counter
from tests.until import until

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
