"""Explains a system call that the kernel has refused to this process.

Imported only after that has happened.
"""

from __future__ import annotations

import errno
from typing import Final

_REFUSED: Final = (errno.EPERM, errno.EACCES, errno.ENOSYS)

_FILTERED: Final = "Seccomp:\t2"
"""A line of /proc/self/status: a seccomp filter is active (proc(5))."""


def why_refused(call: str, since: str, error: OSError) -> str:
    """Return why a system call failed, who denies it, and what to do.

    Args:
        call: its name.
        since: the first version of Linux that has it.
        error: its error.
    """
    if error.errno not in _REFUSED:
        return f"{call}: {error.strerror}."
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        is_filtered = _FILTERED in file.read().splitlines()
    if is_filtered:
        return (
            f"a seccomp filter of this container or sandbox denies {call} "
            f"({error.strerror}). Use a newer container runtime, whose profile allows "
            f"it, or start the container with a profile that does (Docker: "
            f"--security-opt seccomp=FILE)."
        )
    return (
        f"this system refuses {call} ({error.strerror}). It needs Linux {since} or "
        f"newer, and no sandbox that denies it."
    )
