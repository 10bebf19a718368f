"""Waiting for what comes by itself, where no gate can be placed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 20.0


async def until(is_so: Callable[[], object]) -> None:
    """Let the loop run until something is so; `TimeoutError` after a long while."""
    async with asyncio.timeout(LIMIT):
        while not is_so():
            await asyncio.sleep(0)


def wait_until_asleep(pid: int) -> None:
    """Wait until each thread of a process waits; `AssertionError` after a long while.

    Who was woken counts as awake at once, before it runs.
    """
    ends = time.monotonic() + LIMIT
    threads = [*Path(f"/proc/{pid}/task").iterdir()]
    while any(_state(thread) != "S" for thread in threads):
        assert time.monotonic() < ends, f"process {pid} does not rest"
        os.sched_yield()


def _state(thread: Path) -> str:
    """What proc(5) says of a thread: R for one that runs, S for one that sleeps."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
