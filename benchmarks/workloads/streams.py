"""How many items a second does a generator in a worker give to its consumer?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Final

from benchmarks.method import Block, Pair, Scale, alternate
from benchmarks.port import Environment
from benchmarks.rows import Goal, Row, judge, rate_row
from benchmarks.stream_floor import StreamFloor, open_stream_floor
from benchmarks.tasks import numbers, numbers_softly

GOAL: Final = Goal(50_000, "items/s", is_least=True)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Small items with the default window, beside a bare worker that sends them."""
    rows = []
    await environment.open(num_cpus=1)
    try:
        async with open_stream_floor() as floor:
            for name, generator in (
                ("streams: plain", numbers),
                ("streams: coroutine", numbers_softly),
            ):
                start = environment.stream(generator)
                pair = await alternate(
                    partial(_bare, floor, scale.items),
                    partial(_streamed, start, scale.items),
                    scale.gathers,
                )
                rows.append(items_row(name, pair, scale))
    finally:
        await environment.close()
    return rows


def items_row(name: str, pair: Pair, scale: Scale) -> Row:
    """Items per second; the goal is an absolute one, for small items."""
    row = rate_row(name, pair, scale.items, None, scale)
    verdict = judge(row.p50 or 0.0, GOAL, scale)
    return replace(row, unit="items/s", verdict=verdict, goal=str(GOAL))


async def _bare(floor: StreamFloor, count: int) -> Block:
    start = perf_counter_ns()
    await floor.items(count)
    return [perf_counter_ns() - start]


async def _streamed(start_it: Callable[[int], AsyncIterator[int]], count: int) -> Block:
    start, found = perf_counter_ns(), 0
    async for _ in start_it(count):
        found += 1
    block = [perf_counter_ns() - start]
    assert found == count, (found, count)
    return block
