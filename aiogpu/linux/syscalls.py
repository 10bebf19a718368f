"""System calls that Python does not wrap, called with `ctypes`.

For zygotes, keepers and workers. The driver needs none of them and does not load
`ctypes`.
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
"""The number is the same on all architectures (clone(2))."""

CLONE_INTO_CGROUP: Final = 0x200000000
_prctl: Final = ctypes.CDLL(None, use_errno=True).prctl
# PyDLL keeps the GIL: no other thread may run between a fork and Python's hooks.
_syscall: Final = ctypes.PyDLL(None, use_errno=True).syscall
_python: Final = ctypes.pythonapi
_DEFAULT: Final = int(signal.SIG_DFL)


def set_default_handler(number: int) -> None:
    """Reset a signal to its default action.

    `signal.signal` does the same with enums, which makes a fork copy 20 more pages.
    """
    _signal.signal(int(number), _DEFAULT)


def set_process_name(name: str) -> None:
    """Set the name that `ps -o comm` shows, at most 15 bytes (prctl(2))."""
    _prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """Become the new parent of descendants after the end of their parents (prctl(2)).

    Raises:
        OSError: the kernel is older than 3.4.
    """
    if _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (prctl(2)).

    The parent must be single-threaded, since the end of the thread that forked causes
    the signal. Exits at once if the parent has ended already.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def resume_with_parents_end() -> None:
    """Make the kernel send SIGCONT when the thread that forked this process ends.

    So a process that was stopped (SIGSTOP) still notices the end of its parent
    (prctl(2)). The signal has no effect on a running process.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


class _CloneArguments(ctypes.Structure):
    """`struct clone_args` of clone(2)."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    )


def fork_into(group: int) -> int:
    """Fork a child that begins in another cgroup. For a single-threaded process.

    `os.fork` and a move afterwards cost a grace period of the kernel, 6 to 19 ms; this
    costs no more than a fork. The C library's fork hooks do not run, so the child must
    not call into other libraries, except for another fork, which runs the hooks.

    Args:
        group: descriptor of the cgroup's directory.

    Returns:
        The child's process id; 0 in the child.

    Raises:
        OSError: the kernel is older than 5.7, or clone3 is forbidden (seccomp), or
            this user may not enter the group.
    """
    arguments = _CloneArguments(
        flags=CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=group
    )
    _python.PyOS_BeforeFork()
    pid = int(_syscall(SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)))
    if pid == 0:
        _python.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone3: {os.strerror(error)}")
    return pid


def why_not_forked(error: OSError) -> str:
    """Explain why the kernel refused a fork (fork(2))."""
    return (
        f"no process can be forked: {error.strerror or error}; processes are limited "
        f"by `ulimit -u`, a cgroup's pids.max, and memory"
    )


class OomScore:
    """This process's score for the kernel's OOM killer (proc(5)).

    Forks inherit the score. Raising it for a fork and lowering it again takes two
    writes of about 1 µs to a file that stays open; opening the file in the child takes
    35 µs.
    """

    def __init__(self) -> None:
        self._file = -1
        self._own = b"0"
        with suppress(OSError):
            self._file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self._own = os.pread(self._file, 16, 0)

    def expose(self) -> None:
        """Let the kernel kill this process before others."""
        self._write(b"1000")

    def restore(self) -> None:
        """Restore the original score."""
        self._write(self._own)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, value: bytes) -> None:
        if self._file >= 0:
            # A sandbox may forbid the write; then the kernel uses its own order.
            with suppress(OSError):
                os.pwrite(self._file, value, 0)


def children() -> list[int]:
    """Return the pids of this process's children, including zombies (proc(5))."""
    try:
        # As bytes: text mode would import a codec in a zygote that is frozen already.
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return _children_by_search()


def _children_by_search() -> list[int]:
    """Find the children by the parents of all processes (no CONFIG_PROC_CHILDREN)."""
    me = os.getpid()
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="latin-1") as file:
                    # The name in parentheses may contain anything, also spaces.
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == me:
                pids.append(int(name))
    return pids


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Signal a child of this process; no error if it has ended already.

    Returns:
        False if the child now belongs to another user (sudo) and cannot be signalled.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True
