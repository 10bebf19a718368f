"""Whether a process has ended, as far as those who wait for its memory care."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one that init has yet to wait for has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
