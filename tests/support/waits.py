"""Waits, where a test cannot place a gate: for turns of the loop, for a condition."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any

import aiogpu

LIMIT = 60.0


async def turns(count: int = 5) -> None:
    """Let all callbacks and tasks run that are ready."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def no_complaints() -> AsyncIterator[None]:
    """Check at the end that asyncio has reported no error."""
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield
    await turns()
    gc.collect()
    await turns()
    assert errors == []


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until the condition holds; `TimeoutError` after 60 s.

    Args:
        condition: a function or a coroutine function.
    """
    async with asyncio.timeout(LIMIT):
        while not (await answer if isawaitable(answer := condition()) else answer):
            await asyncio.sleep(0)


async def until_free(**amounts: float) -> None:
    """Wait until so much of each resource is free; without arguments, until all is."""

    async def is_free() -> bool:
        wanted = amounts or await aiogpu.cluster_resources()
        return wanted.items() <= (await aiogpu.available_resources()).items()

    await until(is_free)


def wait_until_asleep(pid: int) -> None:
    """Wait until each thread of a process sleeps; `AssertionError` after 60 s.

    A thread that was woken counts as awake at once, before it runs.
    """
    ends = time.monotonic() + LIMIT
    threads = [*Path(f"/proc/{pid}/task").iterdir()]
    while any(_state(thread) != "S" for thread in threads):
        assert time.monotonic() < ends, f"process {pid} does not sleep"
        os.sched_yield()


def _state(thread: Path) -> str:
    """The state of a thread (proc(5)): R if it runs, S if it sleeps."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
