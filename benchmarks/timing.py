"""Timing of the floor and the workload in turn, block by block.

A machine's speed varies by half within minutes, so an absolute time says little. Each
block of the workload is divided by the block of the floor just before; the median of
these ratios is the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from itertools import chain
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

Block = list[int]
"""Nanoseconds of each call, or of the whole block if calls overlap."""

Run = Callable[[], Awaitable[Block]]
"""Runs one block."""

Call = Callable[[int], Awaitable[object]]


class Pair(NamedTuple):
    """Blocks of the workload, each with the block of the floor before it."""

    floor: Sequence[Block]
    workload: Sequence[Block]

    @property
    def ratios(self) -> list[float]:
        """For each block, its p50 over the floor's p50."""
        pairs = zip(self.floor, self.workload, strict=True)
        return [median(workload) / median(floor) for floor, workload in pairs]

    @property
    def ratio(self) -> float:
        """The median of the ratios of the blocks."""
        return median(self.ratios)

    @property
    def added(self) -> float:
        """The median, over all blocks, of the p50 less the floor's."""
        pairs = zip(self.floor, self.workload, strict=True)
        return median(median(workload) - median(floor) for floor, workload in pairs)


async def alternate(floor: Run, workload: Run, blocks: int) -> Pair:
    """Run both in turn; the first block of each is a warm-up and does not count."""
    return Pair(*await rotate([floor, workload], blocks))


async def rotate(runs: Sequence[Run], blocks: int) -> list[list[Block]]:
    """Run all in turn; return the blocks of each without the first one."""
    turns = [[await run() for run in runs] for _ in range(1 + blocks)]
    return [list(each) for each in zip(*turns[1:], strict=True)]


async def one_at_a_time(call: Call, count: int, gap: float = 0) -> Block:
    """Await each call before the next one; pause `gap` seconds before each."""
    samples: Block = []
    for number in range(count):
        if gap:
            await asyncio.sleep(gap)
        start = perf_counter_ns()
        await call(number)
        samples.append(perf_counter_ns() - start)
    return samples


async def all_at_once(call: Call, count: int) -> Block:
    """Gather all calls; return the total time."""
    return await timed(lambda: asyncio.gather(*map(call, range(count))))


async def mean_of_all(call: Call, count: int) -> Block:
    """Gather all calls; return the mean time of one."""
    (total,) = await all_at_once(call, count)
    return [total // count]


async def consume(start: Callable[[int], AsyncIterable[object]], count: int) -> None:
    """Read a stream of `count` items."""
    read = 0
    async for _ in start(count):
        read += 1
    assert read == count, (read, count)


async def timed(call: Callable[[], Awaitable[object]]) -> Block:
    """Await one call; the result is released after the time was taken."""
    start = perf_counter_ns()
    _result = await call()
    return [perf_counter_ns() - start]


def percentile(blocks: Iterable[Iterable[float]], percent: int) -> float:
    """Return the nearest sample among all calls of all blocks."""
    samples = sorted(chain.from_iterable(blocks))
    return samples[min(len(samples) * percent // 100, len(samples) - 1)]
