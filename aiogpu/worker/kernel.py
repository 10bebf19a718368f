"""The few Linux facilities that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

_prctl: Final = ctypes.CDLL(None, use_errno=True).prctl


def set_process_name(name: str) -> None:
    """Name this process as `ps -o comm` shows it, 15 bytes at most (prctl(2))."""
    _prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (prctl(2)).

    Raises:
        OSError: the kernel is older than 3.4.
    """
    if _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (prctl(2)).

    The parent must be single-threaded, since the signal is tied to the thread that
    forked. Ends this process at once if the parent has ended already.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def children() -> list[int]:
    """Process ids of this process's children, zombies included (proc(5))."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return _children_by_search()


def _children_by_search() -> list[int]:
    """The same without CONFIG_PROC_CHILDREN: ask every process for its parent."""
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="latin-1") as file:
                    # The name in parentheses may hold anything, spaces included.
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == me:
                found.append(int(name))
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a child of ours.

    One that has ended already is left alone; one that has become another user's
    (sudo) cannot be signalled, and is waited for.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
