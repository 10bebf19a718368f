"""[B5, B16] Handles are given to others while their node is still opening."""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from tests.contract import value_tasks as v

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


@aiogpu.remote(num_returns=2)
def both(number: int) -> tuple[int, int]:
    return number, number + 1


async def test_a_handle_whose_task_is_not_started() -> None:
    first = v.add.remote(1, 1)
    one, two = both.remote(5)
    waiting = [v.add.remote(first, first), v.add.remote(one, two), first]
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting) == [4, 11, 2]
    await aiogpu.shutdown()


async def test_one_that_is_never_started() -> None:
    never = v.add.options(num_gpus=1000).remote(1, 1)
    cancelled = v.add.remote(1, 1)
    waiting = [v.add.remote(never, 1), v.add.remote(cancelled, 1)]
    cancelled.cancel()
    async with asyncio.timeout(60):
        found = await asyncio.gather(*waiting, never, return_exceptions=True)
    assert list(map(type, found)) == [
        aiogpu.InfeasibleError,
        aiogpu.TaskCancelledError,
        aiogpu.InfeasibleError,
    ]
    await aiogpu.shutdown()
