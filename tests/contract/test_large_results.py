"""Large results that come at once do not hold the loop until all are unpickled."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import aiogpu
from tests.contract import slow_values
from tests.contract.slow_values import make_slow_value

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

MANY = 20


@pytest.fixture(autouse=True)
async def turns() -> None:
    """Count the turns of the loop."""
    slow_values.turns = 0
    slow_values.unpickled_in.clear()

    async def count() -> None:
        while True:
            slow_values.turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield
    counting.cancel()
    with suppress(asyncio.CancelledError):
        await counting


async def test_gathered_ones_are_unpickled_in_turns_of_their_own() -> None:
    async with aiogpu.init(num_cpus=2):
        handles = [make_slow_value.remote(number) for number in range(MANY)]
        assert await asyncio.gather(*handles) == [*range(MANY)]
    assert len(set(slow_values.unpickled_in)) == MANY


async def test_so_are_those_that_are_awaited() -> None:
    async with aiogpu.init(num_cpus=2):
        handles = [make_slow_value.remote(number) for number in range(MANY)]
        waiting = [asyncio.ensure_future(each.coro()) for each in handles]
        assert await asyncio.gather(*waiting) == [*range(MANY)]
    assert len(set(slow_values.unpickled_in)) == MANY


async def test_what_nobody_waits_for_is_not_unpickled() -> None:
    async with aiogpu.init(num_cpus=1):
        handle = make_slow_value.remote(1)
        while not handle.done():
            await asyncio.sleep(0)
        assert slow_values.unpickled_in == []
        assert await handle == 1
        assert len(slow_values.unpickled_in) == 1


async def test_handles_end_in_the_order_of_their_results() -> None:
    @aiogpu.remote
    def small() -> None:
        return None

    async with aiogpu.init(num_cpus=1):
        ended: list[int] = []
        handles = [make_slow_value.remote(0), small.remote(), make_slow_value.remote(2)]
        for number, handle in enumerate(handles):
            handle.add_done_callback(lambda _, number=number: ended.append(number))
        await asyncio.gather(*handles)
        assert ended == [0, 1, 2]


async def test_one_that_is_cancelled_meanwhile_stays_cancelled() -> None:
    async with aiogpu.init(num_cpus=1):
        handles = [make_slow_value.remote(number) for number in range(3)]
        handles[0].add_done_callback(lambda _: handles[2].cancel())
        results = await asyncio.gather(*handles, return_exceptions=True)
        assert results[:2] == [0, 1]
        assert isinstance(results[2], asyncio.CancelledError)
