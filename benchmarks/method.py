"""How is measured: the floor and the workload in turn, block by block.

A machine's speed wanders by half within minutes, so a figure by itself says little.
A block of the workload is divided by the block of the floor just before it; the
median of these ratios is the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from time import perf_counter_ns

Block = list[int]
"""Nanoseconds of each call, or of the whole block where calls overlap."""

Run = Callable[[], Awaitable[Block]]
"""Runs one block."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        calls: in a block of calls awaited one at a time.
        blocks: of these, for the workload and as many for the floor.
        gathered: calls in a block of overlapping ones.
        gathers: blocks of these.
        items: of one stream.
        isolated: calls in a block of overlapping isolated ones.
        isolates: blocks of these.
        singles: calls in a block of isolated ones awaited one at a time.
        cancels: tasks of each kind that are cancelled.
        lives: workers that are started and ended.
        imports: imports of a library that takes long, each in a process of its own.
        starts: fresh interpreters for each question.
        waiting: tasks that wait, where very many do.
        few: tasks that wait, where few do.
        fills: how often so many are submitted and finished by the scheduler alone.
        cycles: decisions in a block of these, for the scheduler alone.
        width: what the root of a tree of tasks starts.
        trees: blocks of trees.
        actors: that live at once, where many do.
        large: bytes of a large value.
        copies: blocks of these on their way.
        uses: tasks that are given one by its handle.
        handles: arguments of one task.
        mapped: items of a map.
        maps: blocks of these.
        is_judged: whether it is enough to hold against a goal.
    """

    calls: int
    blocks: int
    gathered: int
    gathers: int
    items: int
    isolated: int
    isolates: int
    singles: int
    cancels: int
    lives: int
    imports: int
    starts: int
    waiting: int
    few: int
    fills: int
    cycles: int
    width: int
    trees: int
    actors: int
    large: int
    copies: int
    uses: int
    handles: int
    mapped: int
    maps: int
    is_judged: bool


FULL = Scale(
    calls=500,
    blocks=40,
    gathered=20_000,
    gathers=5,
    items=100_000,
    isolated=200,
    isolates=8,
    singles=50,
    cancels=40,
    lives=1_000,
    imports=5,
    starts=25,
    waiting=1_000_000,
    few=1_000,
    fills=3,
    cycles=5_000,
    width=100,
    trees=5,
    actors=1_000,
    large=100_000_000,
    copies=25,
    uses=50,
    handles=10_000,
    mapped=1_000_000,
    maps=3,
    is_judged=True,
)
QUICK = Scale(
    calls=20,
    blocks=2,
    gathered=200,
    gathers=2,
    items=500,
    isolated=8,
    isolates=1,
    singles=4,
    cancels=2,
    lives=20,
    imports=1,
    starts=1,
    waiting=2_000,
    few=100,
    fills=1,
    cycles=50,
    width=4,
    trees=1,
    actors=8,
    large=1_000_000,
    copies=2,
    uses=4,
    handles=50,
    mapped=2_000,
    maps=1,
    is_judged=False,
)


@dataclass(slots=True)
class Pair:
    """Blocks of the workload, each with the block of the floor before it."""

    floor: list[Block] = field(default_factory=list)
    workload: list[Block] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median, over all blocks, of what the p50 is of the floor's p50."""
        return median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """For each block, what its p50 is of the floor's p50."""
        return [
            median(workload) / median(floor)
            for floor, workload in zip(self.floor, self.workload, strict=True)
        ]

    @property
    def added(self) -> float:
        """The median, over all blocks, of what the p50 is more than the floor's."""
        return median(
            median(workload) - median(floor)
            for floor, workload in zip(self.floor, self.workload, strict=True)
        )


async def alternate(floor: Run, workload: Run, blocks: int) -> Pair:
    """Run both in turn; the first block of each warms up and is not counted."""
    return Pair(*await rotate([floor, workload], blocks))


async def rotate(runs: Sequence[Run], blocks: int) -> list[list[Block]]:
    """Run all in turn; gives the blocks of each, without the first of each."""
    found: list[list[Block]] = [[] for _ in runs]
    for run in runs:
        await run()
    for _ in range(blocks):
        for each, run in zip(found, runs, strict=True):
            each.append(await run())
    return found


async def one_at_a_time(call: Callable[[int], Awaitable[object]], count: int) -> Block:
    """Await each call before the next is made."""
    samples: Block = []
    for number in range(count):
        start = perf_counter_ns()
        await call(number)
        samples.append(perf_counter_ns() - start)
    return samples


async def all_at_once(call: Callable[[int], Awaitable[object]], count: int) -> Block:
    """Gather all calls; gives the time of the whole."""
    start = perf_counter_ns()
    await asyncio.gather(*(call(number) for number in range(count)))
    return [perf_counter_ns() - start]


async def shared_out(call: Callable[[int], Awaitable[object]], count: int) -> Block:
    """Gather all calls; gives what each adds to the whole."""
    (whole,) = await all_at_once(call, count)
    return [whole // count]


async def spaced(
    call: Callable[[int], Awaitable[object]], count: int, gap: float
) -> Block:
    """Await each call, and nothing for `gap` seconds before the next is made."""
    samples: Block = []
    for number in range(count):
        await asyncio.sleep(gap)
        start = perf_counter_ns()
        await call(number)
        samples.append(perf_counter_ns() - start)
    return samples


def percentile(blocks: Sequence[Block], percent: int) -> float:
    """Of all calls of all blocks together; the nearest sample."""
    samples = sorted(chain.from_iterable(blocks))
    return samples[min(len(samples) * percent // 100, len(samples) - 1)]
