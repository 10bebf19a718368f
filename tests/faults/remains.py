"""What a driver that has died leaves: processes and files, looked up in /proc."""

from __future__ import annotations

import os
import select
import time

from benchmarks.processes import belonging


def living(place: str) -> list[str]:
    """Processes that have the place in their environment, in words."""
    return [str(process) for process in belonging(place)]


def gone_within(seconds: float, place: str) -> None:
    """Wait until nothing is left; raises `AssertionError` after so many seconds."""
    ends = time.monotonic() + seconds
    while (left := living(place)) or os.listdir(place):
        assert time.monotonic() < ends, (left, os.listdir(place))
        if left:
            wait_for_an_end(int(left[0].split()[0]))


def wait_for_an_end(pid: int) -> None:
    """Wait a while at most, and take no turn from those who are about to end."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([process], [], [], 0.1)
    os.close(process)
