"""What is left of a fresh process's cost, where one stands ready for each call?"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import Final

from benchmarks.forks import open_forks
from benchmarks.method import (
    Block,
    Pair,
    Scale,
    one_at_a_time,
    percentile,
    rotate,
    spaced,
)
from benchmarks.port import Environment, Need
from benchmarks.rows import MS, Goal, Row, beside_row
from benchmarks.script import in_script
from benchmarks.tasks import noop

ISOLATED: Final = Need(num_gpus=0.25, is_isolated=True)
REUSED: Final = Need(num_gpus=0.25)
FORKS_BETWEEN: Final = 3
"""In the time of so many forks no call is made."""
GOAL: Final = Goal(2, "x reused")


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Spaced isolated calls beside a reused worker's, back to back and as spaced."""
    await environment.open(num_cpus=4, num_gpus=1)
    try:
        with open_forks(environment.image()) as image:
            await image.fork(scale.singles)
            forks = await image.fork(scale.singles)
            gap = _gap(forks)
            reused = environment.task(in_script(noop), REUSED)
            isolated = environment.task(in_script(noop), ISOLATED)
            close, apart, workload = await rotate(
                [
                    partial(one_at_a_time, reused, scale.singles),
                    partial(spaced, reused, scale.singles, gap),
                    partial(spaced, isolated, scale.singles, gap),
                ],
                scale.isolates,
            )
    finally:
        await environment.close()
    note = f"{gap * 1000:.0f} ms between; fork {percentile([forks], 50) / MS:.1f} ms"
    return [
        beside_row(f"spaced: {name}", Pair(floor, workload), GOAL, scale, note)
        for name, floor in (
            ("beside reused, back to back", close),
            ("beside reused, as spaced", apart),
        )
    ]


def _gap(forks: Block) -> float:
    """Seconds; a timer of the loop counts whole milliseconds."""
    return ceil(FORKS_BETWEEN * percentile([forks], 50) / MS) / 1000
