"""Cancelling what runs: how long until the code has really stopped?

The code holds a connection to who has cancelled it; whatever stops it, by an exception
or by force, ends that connection.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Final

from benchmarks.field.question import (
    Amount,
    Ask,
    Figures,
    Metric,
    Question,
    Stage,
)
from benchmarks.gate import Gate, open_gate
from benchmarks.port import Environment, Need, UnsupportedError
from benchmarks.tasks import spin_in_sight

NAME = "cancel"
PATIENCE: Final = 3.0
"""Seconds after which code counts as not stopped at all."""
MOST: Final = 10
"""Tasks in one block."""
SPINNING: Final = """
from benchmarks.tasks import spin_in_sight
while True:
    try:
        spin_in_sight({})
    except KeyboardInterrupt:
        pass
"""


async def _prepare(environment: Environment, stage: Stage) -> Ask:
    call = environment.task(spin_in_sight, Need())
    gate = stage.stack.enter_context(open_gate())

    async def ask(amount: Amount) -> Figures:
        samples: list[float] = []
        until = perf_counter() + amount.seconds
        while not samples or (len(samples) < MOST and perf_counter() < until):
            handle = call(os.getpid())
            samples.append(await _stopped(gate, handle.cancel))
            await asyncio.wait([handle])
        return {NAME: samples}

    return ask


async def _floor(stage: Stage) -> Ask:
    """A process that spins, and again when it was interrupted."""
    gate = stage.stack.enter_context(open_gate())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SPINNING.format(os.getpid())
    )
    stage.stack.callback(process.kill)

    async def ask(amount: Amount) -> Figures:
        interrupt = lambda: process.send_signal(signal.SIGINT)  # noqa: E731
        return {NAME: [await _stopped(gate, interrupt) for _ in range(MOST)]}

    return ask


async def _stopped(gate: Gate, cancel: Callable[[], object]) -> float:
    """Seconds from there until the code that comes to the gate has stopped."""
    loop = asyncio.get_running_loop()
    with await gate.visitor() as visitor:
        start = perf_counter()
        cancel()
        try:
            await asyncio.wait_for(loop.sock_recv(visitor, 1), PATIENCE)
        except TimeoutError:
            raise UnsupportedError(
                f"what was cancelled ran on, {PATIENCE:g} s later as well"
            ) from None
    return perf_counter() - start


QUESTIONS = (
    Question(
        NAME,
        "processes",
        (Metric(NAME, "a busy loop, from its cancel to its end"),),
        _prepare,
        _floor,
        "SIGINT to a process that waits for nothing else",
        seconds=12,
    ),
)
