"""From nothing to the first result: a program of its own, from its very beginning."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from time import perf_counter

from benchmarks.field.question import (
    Amount,
    Ask,
    Figures,
    Metric,
    Opening,
    Question,
    Stage,
)
from benchmarks.port import Environment

NAME = "start"
BARE = "print(0, flush=True)"


def _ask(source: str) -> Ask:
    async def ask(_amount: Amount) -> Figures:
        start = perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", source), stdout=PIPE, stderr=DEVNULL
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        took = perf_counter() - start
        await process.wait()  # its end is not counted, but disturbs nobody
        if not line.strip().isdigit():
            raise RuntimeError("the program ended without a result")
        return {NAME: [took]}

    return ask


async def _prepare(environment: Environment, _stage: Stage) -> Ask:
    return _ask(environment.programs.first_result)


async def _floor(_stage: Stage) -> Ask:
    return _ask(BARE)


QUESTIONS = (
    Question(
        NAME,
        "processes",
        (Metric(NAME, "a new program, from its start to its first result"),),
        _prepare,
        _floor,
        "a bare interpreter that prints a number",
        Opening(is_open=False),
        seconds=50,
    ),
)
