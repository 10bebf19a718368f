"""Start: imports and the first result, in new interpreters."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Final

import aiogpu
from benchmarks import tasks, timing
from benchmarks.micro import rows
from benchmarks.micro.rows import MS, Goal, Row, Scale

FIRST: Final = Goal(150, "ms")
NONE: Final = Goal(0, "modules")
NAMES: Final = "from aiogpu import init, remote"


async def start(scale: Scale) -> list[Row]:
    """Time that an import adds to a program; time from `init` to the first result.

    Also counts asyncio's modules in a worker that has run plain functions.
    """
    count = scale(25, 1)
    run_python("-c", tasks.FIRST_RESULT)  # fills the disk cache
    first = [[int(run_python("-c", tasks.FIRST_RESULT))] for _ in range(count)]
    async with aiogpu.init(num_cpus=1):
        modules = await aiogpu.remote(tasks.count_asyncio).remote(0)
    return [
        await _added("package", "pass", "import aiogpu", 10, count),
        await _added("names", "import asyncio", NAMES, 20, count),
        rows.plain("start: first result", first, FIRST),
        Row("start: asyncio in worker", "modules", modules, NONE),
    ]


async def _added(what: str, base: str, statement: str, most: float, count: int) -> Row:
    """Measure what a statement adds to the lifetime of a program that runs `base`."""

    async def run(source: str) -> None:
        run_python("-c", source)

    runs = [partial(timing.timed, partial(run, each)) for each in (base, statement)]
    pair = timing.Pair(*await timing.rotate(runs, count))
    floor, p99 = (timing.percentile(pair.floor, each) / MS for each in (50, 99))
    return Row(
        f"start: import {what}",
        "ms added",
        pair.added / MS,
        Goal(most, "ms added"),
        floor=floor,
        floor_p99=p99,
        samples=pair.workload,
        floor_samples=pair.floor,
    )


def run_python(*words: str) -> str:
    """Return the output of a new interpreter. Blocks the loop, which has no work."""
    return subprocess.check_output([sys.executable, *words], text=True)
