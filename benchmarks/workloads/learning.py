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
LIMIT: Final = 30
"""Seconds after which nothing will be learnt any more."""
BEFORE: Final = 2
"""Calls that import it themselves: what is not very dear is learnt from two."""


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
        first: the calls that import it themselves.
        until_ready: from their last result until fresh processes have it.
        later: calls after that.
        floor: forks of what has the library.
    """

    first: Block
    until_ready: int
    later: Block
    floor: Block


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Each library by itself, on a new node each time."""
    rows = []
    for library in LIBRARIES:
        name = f"learning: {library.name}, once learnt"
        if reason := not_there(library.name):
            rows.append(missing_row(name, reason))
            continue
        try:
            lessons = await _learn_again(environment, library, scale)
        except TimeoutError:
            rows.append(missing_row(name, f"it was not learnt within {LIMIT} s"))
        else:
            rows.append(_row(name, lessons, scale))
    return rows


async def _learn_again(
    environment: Environment, library: Library, scale: Scale
) -> list[Lesson]:
    """So many lessons, each after a block of forks."""
    with open_forks(environment.image((library.name,))) as image:
        await image.fork(scale.singles)
        return [
            await _learn(environment, library, scale, await image.fork(scale.singles))
            for _ in range(scale.imports)
        ]


async def _learn(
    environment: Environment, library: Library, scale: Scale, floor: Block
) -> Lesson:
    await environment.open(num_cpus=4, num_gpus=1)
    try:
        use = environment.task(in_script(library.use), QUARTER)
        has = environment.task(in_script(library.has), QUARTER)
        await has(0)
        first = await one_at_a_time(use, BEFORE)
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
    firsts = [lesson.first for lesson in lessons]
    waits = [[lesson.until_ready] for lesson in lessons]
    pair = Pair(
        [lesson.floor for lesson in lessons], [lesson.later for lesson in lessons]
    )
    return beside_row(
        name,
        pair,
        None,
        scale,
        f"first calls {percentile(firsts, 50) / MS:,.0f} ms",
        f"learnt {percentile(waits, 50) / MS:,.0f} ms after these",
    )
