"""Starting: imports and the first result, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Final

import aiogpu
from benchmarks.micro.rows import MS, Goal, Row, Scale, figure_row, judge, plain_row
from benchmarks.tasks import FIRST_RESULT, count_asyncio
from benchmarks.timing import Block, alternate, percentile, timed

FIRST: Final = Goal(150, "ms")


async def start(scale: Scale) -> list[Row]:
    """What importing adds to an interpreter's life; from `init` to the first result.

    And how many of asyncio's modules a worker has loaded that ran plain functions.
    """
    count = scale(25, 1)
    _run(FIRST_RESULT)  # warms up the disk
    first = [[int(_run(FIRST_RESULT))] for _ in range(count)]
    async with aiogpu.init(num_cpus=1):
        modules = await aiogpu.remote(count_asyncio).remote(0)
    none = Goal(0, "modules")
    return [
        await _added("package", "pass", "import aiogpu", 10, scale),
        await _added(
            "names", "import asyncio", "from aiogpu import init, remote", 20, scale
        ),
        plain_row("start: first result", first, FIRST, scale),
        figure_row("start: asyncio in worker", "modules", modules, none, scale),
    ]


async def _added(
    what: str, base: str, statement: str, most: float, scale: Scale
) -> Row:
    """What a statement adds to the life of an interpreter that runs `base`."""

    async def live(source: str) -> Block:
        async def run() -> None:
            _run(source)

        return await timed(run)

    pair = await alternate(partial(live, base), partial(live, statement), scale(25, 1))
    goal = Goal(most, "ms added")
    return Row(
        f"start: import {what}",
        "ms added",
        judge(pair.added / MS, goal, scale),
        p50=pair.added / MS,
        floor=percentile(pair.floor, 50) / MS,
        floor_p99=percentile(pair.floor, 99) / MS,
        goal=str(goal),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def _run(source: str) -> str:
    """Return what a fresh interpreter prints. Blocks the loop, which has no work."""
    words = [sys.executable, "-c", source]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
