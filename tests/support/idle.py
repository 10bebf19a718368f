"""Waiting in plain code until a process has nothing more to do."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.until import LIMIT


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
