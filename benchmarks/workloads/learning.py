"""What does the second isolated call cost, if the first has imported a library?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final, NamedTuple

from benchmarks.forks import open_forks
from benchmarks.method import Block, Pair, Scale, one_at_a_time, percentile
from benchmarks.port import Environment, Need
from benchmarks.rows import MS, Row, beside_row, missing_row
from benchmarks.script import in_script
from benchmarks.tasks import has_numpy, has_torch, use_numpy, use_torch
from benchmarks.workloads.isolated import not_there

QUARTER: Final = Need(num_gpus=0.25, is_isolated=True)
LOOK: Final = 0.02
"""Seconds between two questions whether the library is there from the start."""
LIMIT: Final = 60
"""Seconds after which nothing will be learnt any more."""


class Library(NamedTuple):
    """One that takes long to import, and the tasks that use it and look for it."""

    name: str
    use: Callable[[int], int]
    has: Callable[[int], bool]


LIBRARIES: Final = (
    Library("numpy", use_numpy, has_numpy),
    Library("torch", use_torch, has_torch),
)


class Lesson(NamedTuple):
    """One node's, in nanoseconds.

    Attributes:
        first: the call that imports it.
        until_ready: from its result until a fresh process has the library already.
        later: calls after that.
        floor: forks of what has the library.
    """

    first: int
    until_ready: int
    later: Block
    floor: Block


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Each library by itself, on a new node each time."""
    rows = []
    for library in LIBRARIES:
        name = f"learning: {library.name}, after it was learnt"
        if reason := not_there(library.name):
            rows.append(missing_row(name, reason))
            continue
        with open_forks(environment.image((library.name,))) as image:
            await image.fork(scale.singles)
            lessons = []
            for _ in range(scale.imports):
                floor = await image.fork(scale.singles)
                lessons.append(await _learn(environment, library, scale, floor))
        rows.append(_row(name, lessons, scale))
    return rows


async def _learn(
    environment: Environment, library: Library, scale: Scale, floor: Block
) -> Lesson:
    await environment.open(num_cpus=4, num_gpus=1)
    try:
        use = environment.task(in_script(library.use), QUARTER)
        has = environment.task(in_script(library.has), QUARTER)
        await has(0)
        (first,) = await one_at_a_time(use, 1)
        start = perf_counter_ns()
        async with asyncio.timeout(LIMIT):
            while not await has(0):  # noqa: ASYNC110 - nobody tells when it is
                await asyncio.sleep(LOOK)
        until_ready = perf_counter_ns() - start
        later = await one_at_a_time(use, scale.singles)
    finally:
        await environment.close()
    return Lesson(first, until_ready, later, floor)


def _row(name: str, lessons: list[Lesson], scale: Scale) -> Row:
    firsts = [[lesson.first] for lesson in lessons]
    waits = [[lesson.until_ready] for lesson in lessons]
    pair = Pair(
        [lesson.floor for lesson in lessons], [lesson.later for lesson in lessons]
    )
    return beside_row(
        name,
        pair,
        None,
        scale,
        f"first call {percentile(firsts, 50) / MS:,.0f} ms",
        f"learnt {percentile(waits, 50) / MS:,.0f} ms after it",
    )
