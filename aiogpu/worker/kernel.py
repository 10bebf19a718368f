"""The few Linux facilities that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

SYS_CLONE3: Final = 435
"""The same on all architectures (clone(2))."""
CLONE_INTO_CGROUP: Final = 0x200000000

_prctl: Final = ctypes.CDLL(None, use_errno=True).prctl
# Keeps the GIL: between a fork and the interpreter's own hooks nothing else may run.
_syscall: Final = ctypes.PyDLL(None, use_errno=True).syscall
_python: Final = ctypes.pythonapi


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


class _CloneArguments(ctypes.Structure):
    """`struct clone_args` of clone(2)."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack"),
            *("stack_size", "tls", "set_tid", "set_tid_size", "cgroup"),
        )
    )


def fork_into(group: int) -> int:
    """Fork; the child begins in another cgroup. For a single-threaded process.

    `os.fork` and a move afterwards cost a grace period of the kernel, 6 to 19 ms;
    this costs what a fork costs. The C library's own hooks do not run, so the child
    must be one that calls into no library but for another fork, which runs them.

    Args:
        group: descriptor of the cgroup's directory.

    Returns:
        The child's process id; 0 in the child.

    Raises:
        OSError: the kernel is older than 5.7, or clone3 is forbidden (seccomp), or
            this user may not.
    """
    wanted = _CloneArguments(
        flags=CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=group
    )
    _python.PyOS_BeforeFork()
    pid = int(_syscall(SYS_CLONE3, ctypes.byref(wanted), ctypes.sizeof(wanted)))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
        return 0
    problem = ctypes.get_errno()
    _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(problem, f"clone3: {os.strerror(problem)}")
    return pid


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


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Signal a child of ours; one that has ended already is left alone.

    Returns:
        False if it has become another user's (sudo) and cannot be signalled.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True
