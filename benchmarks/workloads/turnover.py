"""Does anything grow in what outlives its workers, when very many start and end?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from benchmarks.census import Weight, by_part, descendants, weigh
from benchmarks.method import Scale, all_at_once
from benchmarks.port import Call, Environment, Need
from benchmarks.rows import Goal, Row, judge
from benchmarks.script import in_script
from benchmarks.tasks import noop

QUARTER: Final = Need(num_gpus=0.25, is_isolated=True)
BUNCHES: Final = 20
LOOKS: Final = (2, 10, 20)
"""After so many bunches it is looked: a tenth of the workers, half, all."""
MIB: Final = 1 << 20
SAME: Final = Goal(1, "x the first")
NEARLY: Final = Goal(1.05, "x the first")
REST: Final = 0.1
"""Seconds in which nothing may change before it is looked."""

Census = dict[str, Weight]
"""What was seen of each part of the system."""


class Measure(NamedTuple):
    """What is looked at of each part, and how much of it there may be at the end.

    Attributes:
        goal: of the part that grew most; None to report only.
    """

    name: str
    unit: str
    of: Callable[[Weight], float]
    goal: Goal | None


MEASURES: Final = (
    Measure("memory", "MiB", lambda weight: weight.resident / MIB, NEARLY),
    # Processes come to share less without growing, so this shows no leak.
    Measure("memory, shares", "MiB", lambda weight: weight.proportional / MIB, None),
    Measure("descriptors", "files", lambda weight: weight.descriptors, SAME),
    Measure("threads", "threads", lambda weight: weight.threads, SAME),
    Measure("processes", "processes", lambda weight: weight.processes, SAME),
)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """After a tenth of them, half of them and all."""
    # Without learning: a new generation in the middle is another's memory.
    await environment.open(num_cpus=4, num_gpus=1, preload=())
    try:
        call = environment.task(in_script(noop), QUARTER)
        found = [
            await _look_after(environment, call, bunches, scale.lives // BUNCHES)
            for bunches in _steps()
        ]
    finally:
        await environment.close()
    return rows(found, scale)


def _steps() -> list[int]:
    """The bunches before each look."""
    return [later - earlier for earlier, later in zip((0, *LOOKS), LOOKS, strict=False)]


async def _look_after(
    environment: Environment, call: Call[None], bunches: int, count: int
) -> Census:
    for _ in range(bunches):
        await all_at_once(call, count)
    await _settle(environment)
    parts = by_part(environment.lasting)
    return {part: weigh(pids) for part, pids in parts.items()}


async def _settle(environment: Environment) -> None:
    """Wait until all shares are free and no process comes or goes."""
    before: dict[int, str] | None = None
    while before != (now := descendants()) or await environment.free_gpus() < 1:
        before = now
        await asyncio.sleep(REST)


def rows(found: Sequence[Census], scale: Scale) -> list[Row]:
    """A row for each measure; the part that grew most is judged.

    Args:
        found: what was seen, look by look.
        scale: whether there was enough of it.
    """
    return [_row(measure, found, scale) for measure in MEASURES]


def _row(measure: Measure, found: Sequence[Census], scale: Scale) -> Row:
    series = {part: [measure.of(census[part]) for census in found] for part in found[0]}
    growth = max(each[-1] / each[0] for each in series.values())
    looks = ", ".join(f"{scale.lives * look // BUNCHES:,}" for look in LOOKS)
    note = "; ".join(
        f"{part} {', '.join(f'{value:.4g}' for value in each)}"
        for part, each in series.items()
    )
    return Row(
        f"turnover: {measure.name}",
        measure.unit,
        judge(growth, measure.goal, scale),
        p50=sum(each[-1] for each in series.values()),
        floor=sum(each[0] for each in series.values()),
        ratio=growth,
        note=f"after {looks} workers: {note}",
        goal=str(measure.goal or ""),
    )
