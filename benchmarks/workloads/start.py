"""How soon does a program get going? Asked of fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from time import perf_counter_ns

from benchmarks.method import Block, Scale, alternate, percentile
from benchmarks.port import Environment, Need
from benchmarks.rows import MS, Goal, Row, judge, time_row
from benchmarks.tasks import count_asyncio


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Two imports, the first result, and what a worker carries."""
    programs = environment.programs
    return [
        await _added("start: import package", "pass", programs.package, 10, scale),
        await _added(
            "start: import names", "import asyncio", programs.names, 20, scale
        ),
        _first_result(programs.first_result, scale),
        await _weight(environment, scale),
    ]


async def _added(name: str, base: str, source: str, goal: float, scale: Scale) -> Row:
    """What a statement adds to the life of an interpreter that does `base`."""
    pair = await alternate(partial(_live, base), partial(_live, source), scale.starts)
    differences = [
        [workload[0] - floor[0]]
        for floor, workload in zip(pair.floor, pair.workload, strict=True)
    ]
    added, most = pair.added / MS, Goal(goal, "ms added")
    return Row(
        name,
        "ms added",
        judge(added, most, scale),
        p50=added,
        p99=percentile(differences, 99) / MS,
        floor=percentile(pair.floor, 50) / MS,
        floor_p99=percentile(pair.floor, 99) / MS,
        goal=str(most),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


async def _live(source: str) -> Block:
    start = perf_counter_ns()
    _run(source)
    return [perf_counter_ns() - start]


def _first_result(source: str, scale: Scale) -> Row:
    _run(source)  # warms up the disk
    blocks = [[int(_run(source))] for _ in range(scale.starts)]
    return time_row("start: first result", blocks, Goal(150, "ms"), scale)


def _run(source: str) -> str:
    """What a fresh interpreter prints. The loop waits; it has nothing else to do."""
    return subprocess.run(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


async def _weight(environment: Environment, scale: Scale) -> Row:
    """The event loop's modules in a worker that has run plain functions only."""
    await environment.open(num_cpus=1)
    try:
        count = await environment.task(count_asyncio, Need())(0)
    finally:
        await environment.close()
    return Row(
        "start: asyncio in worker",
        "modules",
        judge(count, Goal(0, "modules"), scale),
        p50=count,
        goal=str(Goal(0, "modules")),
    )
