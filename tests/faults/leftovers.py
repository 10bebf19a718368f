"""The processes and files that a dead program leaves, looked up in /proc."""

from __future__ import annotations

import os
import select
import time

from benchmarks.processes import belonging


def processes_of(directory: str) -> list[str]:
    """Describe the processes with this runtime directory, and all below them."""
    return [str(process) for process in belonging(directory)]


def wait_until_gone(seconds: float, directory: str, *, but_files: bool = False) -> None:
    """Wait until no process and no file is left; `but_files` may stay.

    Raises:
        AssertionError: something is left after this time.
    """
    ends = time.monotonic() + seconds
    while (processes := belonging(directory)) or (
        os.listdir(directory) and not but_files
    ):
        assert time.monotonic() < ends, (processes_of(directory), os.listdir(directory))
        if processes:
            _wait_for_exit(processes[0].pid)


def _wait_for_exit(pid: int) -> None:
    """Wait for a tenth of a second at most, without using the CPU."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([process], [], [], 0.1)
    os.close(process)
