"""Waits for a condition, where a test cannot place a gate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until the condition holds; `TimeoutError` after 20 s."""
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0)


def wait_until_asleep(pid: int) -> None:
    """Wait until each thread of a process sleeps; `AssertionError` after 20 s.

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
