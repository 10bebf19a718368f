"""Very many tasks that wait: when are all taken in, and what do they weigh?"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Final

from benchmarks.census import cpu_time, descendants, weigh
from benchmarks.field.question import (
    Amount,
    Ask,
    Figures,
    Metric,
    Opening,
    Question,
    Stage,
)
from benchmarks.floor import frame
from benchmarks.gate import open_gate
from benchmarks.port import Environment, Need
from benchmarks.tasks import noop, wait_at_gate

TIME, MEMORY = "waiting-time", "waiting-memory"
PORTION: Final = 1_000
"""Calls that are made in one turn of the loop."""
PATIENCE: Final = 14.0
"""Seconds after which no further one is made."""
QUIET: Final = 0.25
"""Of one core: what a system takes at most that has taken in all."""
LOOK: Final = 0.2
LONGEST: Final = 8.0
"""Seconds for which it is waited for that."""


async def _prepare(environment: Environment, stage: Stage) -> Ask:
    call = environment.task(noop, Need())
    gate = stage.stack.enter_context(open_gate())

    async def ask(amount: Amount) -> Figures:
        await call(0)
        first = environment.task(wait_at_gate, Need())(os.getpid())
        # The only CPU is held while this lives, behind which all others wait.
        stage.stack.enter_context(await gate.visitor())
        held = [first]
        stage.stack.callback(held.clear)
        return await _fill(call, amount, stage)

    return ask


async def _floor(stage: Stage) -> Ask:
    """A future each, by its number, and a frame in a queue."""
    loop = asyncio.get_running_loop()
    futures: dict[int, asyncio.Future[None]] = {}
    frames: deque[bytes] = deque()

    def call(number: int) -> asyncio.Future[None]:
        future = futures[number] = loop.create_future()
        frames.append(frame(number, ((number,), {})))
        return future

    return lambda amount: _fill(call, amount, stage)


async def _fill(
    call: Callable[[int], asyncio.Future[None]], amount: Amount, stage: Stage
) -> Figures:
    """Submit so many, or as many as can be in time."""
    handles: list[asyncio.Future[None] | None] = [None] * amount.waiting
    gc.collect()
    before, start, count = _memory(), perf_counter(), 0
    while count < amount.waiting and perf_counter() < start + PATIENCE:
        for _ in range(min(PORTION, amount.waiting - count)):
            handles[count] = call(count)
            count += 1
        await asyncio.sleep(0)
    took = perf_counter() - start + await _until_quiet()
    stage.notes["count"] = f"{count:,} tasks"
    grown = max(0, _memory() - before)
    stage.stack.callback(handles.clear)
    return {TIME: [took / count], MEMORY: [grown / count]}


async def _until_quiet() -> float:
    """Seconds until all processes of the system have next to nothing to do."""
    start = perf_counter()
    while (began := perf_counter()) < start + LONGEST:
        busy = cpu_time(_all())
        await asyncio.sleep(LOOK)
        if cpu_time(_all()) - busy < QUIET * LOOK:
            break
    return began - start


def _all() -> list[int]:
    return [os.getpid(), *descendants()]


def _memory() -> int:
    """Bytes of this process and all below it, what they share counted once."""
    total = 0
    for pid in _all():
        with suppress(OSError, ValueError):  # it has ended meanwhile
            total += weigh([pid]).proportional
    return total


QUESTIONS = (
    Question(
        "waiting",
        "waiting",
        (
            Metric(TIME, "to take in a task that waits, of very many"),
            Metric(MEMORY, "memory of a waiting task, in all processes", "B"),
        ),
        _prepare,
        _floor,
        "a future and a packed frame, kept in a dict and a deque",
        Opening(num_cpus=1, is_fresh=True),
        seconds=100,
    ),
)
