"""Does a task cost more where very many wait? Asked of the scheduler alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Final

from benchmarks.decisions import decide, decisions_row
from benchmarks.method import Block, Scale, alternate
from benchmarks.port import Environment, Need
from benchmarks.rows import Goal, Row

GPUS: Final = 4
QUARTER: Final = Need(num_gpus=0.25)
RUNNING: Final = 4 * GPUS
GOAL: Final = Goal(1.3, "x few")


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Few and very many waiting, in turn.

    A cycle finishes one task and submits another, so that as many wait as before.
    Of a fill all are submitted, then all finished; its time is the whole.
    """
    with collector(is_on=False):
        rows = [await _cycles(environment, scale), await _fills(environment, scale)]
    return [*rows, await _fills(environment, scale, is_collected=True)]


@contextmanager
def collector(*, is_on: bool) -> Iterator[None]:
    """Have the garbage collector so; with all that others left collected."""
    gc.collect()
    if not is_on:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _cycles(environment: Environment, scale: Scale) -> Row:
    few, many = (environment.paper(RUNNING, GPUS) for _ in range(2))
    for paper, waiting in ((few, scale.few), (many, scale.waiting)):
        for _ in range(RUNNING + waiting):
            paper.submit(QUARTER)
    pair = await alternate(
        partial(decide, few, scale.cycles),
        partial(decide, many, scale.cycles),
        scale.blocks,
    )
    return decisions_row(
        "queue: cycle, collector off", pair, (scale.cycles, scale.cycles), GOAL, scale
    )


async def _fills(
    environment: Environment, scale: Scale, *, is_collected: bool = False
) -> Row:
    few, many = scale.few, scale.waiting
    times = max(1, many // few // 5)
    pair = await alternate(
        partial(_fill, environment, few, times, is_collected),
        partial(_fill, environment, many, 1, is_collected),
        scale.fills,
    )
    return decisions_row(
        f"queue: fill, collector {'on' if is_collected else 'off'}",
        pair,
        (few * times, many),
        None if is_collected else GOAL,
        scale,
    )


async def _fill(
    environment: Environment, count: int, times: int, is_collected: bool
) -> Block:
    """With the collector, all the time that passes; without, the scheduler's own."""
    gc.collect()
    paper = environment.paper(RUNNING, GPUS)
    start = perf_counter_ns()
    for _ in range(times):
        for _ in range(count):
            paper.submit(QUARTER)
        while paper.busy:
            paper.finish()
    return [perf_counter_ns() - start if is_collected else paper.spent]
