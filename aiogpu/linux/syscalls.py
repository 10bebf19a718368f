"""System calls that Python does not wrap, by way of `ctypes`.

For zygotes, keepers and workers. A node's driver needs none of them, and so does not
load `ctypes`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ctypes
import os
import signal
from contextlib import suppress
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
_DEFAULT: Final = int(signal.SIG_DFL)


def set_default_handler(number: int) -> None:
    """Have a signal do what it does by default.

    `signal.signal` does the same by way of enums; in a fork these are 20 pages more
    to copy.
    """
    _signal.signal(int(number), _DEFAULT)


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


def resume_with_parents_end() -> None:
    """Have the kernel send SIGCONT when the thread that forked this process ends.

    So a process that somebody has stopped still notices it (prctl(2)). Where it runs,
    the signal does nothing.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


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


def why_not_forked(error: OSError) -> str:
    """Explain why the kernel refused a fork (fork(2))."""
    return (
        f"no process can be forked: {error.strerror or error}; what bounds them is "
        f"`ulimit -u`, a cgroup's pids.max, or memory"
    )


class OomScore:
    """This process's priority for the kernel's OOM killer (proc(5)).

    Forks inherit it. To raise it for a fork and lower it again takes two writes of
    about 1 µs to a file that stays open; the child's own would take 35 µs.
    """

    def __init__(self) -> None:
        self._file = -1
        self._own = b"0"
        with suppress(OSError):
            self._file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self._own = os.pread(self._file, 16, 0)

    def expose(self) -> None:
        """Be the first to go, before any process that has not done so."""
        self._write(b"1000")

    def restore(self) -> None:
        """Be as gladly ended as at first."""
        self._write(self._own)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, value: bytes) -> None:
        if self._file >= 0:
            # A sandbox may forbid it; then the kernel chooses as it likes.
            with suppress(OSError):
                os.pwrite(self._file, value, 0)


def children() -> list[int]:
    """Process ids of this process's children, zombies included (proc(5))."""
    try:
        # As bytes: a text would have a zygote import a codec after it has been frozen.
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return _children_by_search()


def _children_by_search() -> list[int]:
    """List the children without CONFIG_PROC_CHILDREN, by every process's parent."""
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
