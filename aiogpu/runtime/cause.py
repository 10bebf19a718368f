"""Why a worker has died, as far as the evidence goes. Decides, reads nothing."""

from __future__ import annotations

import os
import signal
from typing import Final, NamedTuple

from aiogpu.linux.procfs import Findings

NOT_STARTED: Final = "not started"
EXIT: Final = "exit"
OUT_OF_MEMORY: Final = "out of memory"
KILLED: Final = "killed"
SIGNAL: Final = "signal"
KEEPER_DIED: Final = "keeper died"
DISCONNECTED: Final = "disconnected"
ENDED: Final = "ended"
INTERNAL: Final = "internal"
CROWDED: Final = "crowded"
"""There is no room for it now: its task waits. No user is told this one."""
UNAVAILABLE: Final = "unavailable"
"""There is no zygote for it now: its task waits. No user is told this one."""


class Told(NamedTuple):
    """What is said of a cause: what it probably was, and what to do about it."""

    what: str
    advice: str


_NATIVE: Final = (
    "Run the function in this process, or call faulthandler.enable() in it, to see "
    "where."
)
_CRASHES: Final[dict[int, tuple[str, Told]]] = {
    signal.SIGSEGV: (
        "segfault",
        Told("native code used memory that is not its own", _NATIVE),
    ),
    signal.SIGBUS: (
        "bus error",
        Told(
            "a mapped file has shrunk, or shared memory (/dev/shm) is full",
            "See `df /dev/shm`. " + _NATIVE,
        ),
    ),
    signal.SIGFPE: (
        "arithmetic error",
        Told("native code divided by zero, most often", _NATIVE),
    ),
    signal.SIGILL: (
        "illegal instruction",
        Told(
            "native code was built for another processor",
            "Install a build of the library for this one.",
        ),
    ),
    signal.SIGABRT: (
        "abort",
        Told("native code gave up: a failed assertion, a C++ exception", _NATIVE),
    ),
}
_OTHERS: Final[dict[str, Told]] = {
    NOT_STARTED: Told(
        "it never came up",
        "See whether this machine has processors and memory to spare.",
    ),
    EXIT: Told(
        "probably os._exit(), or exit() in native code",
        "Return, or raise an exception, where the task is to end.",
    ),
    OUT_OF_MEMORY: Told(
        "the kernel ended it because memory ran out",
        "Give the task memory=... so that fewer run at once, or raise the limit.",
    ),
    KILLED: Told(
        "somebody else sent that signal, or a batch system's limit was reached",
        "See the log of what watches over processes on this machine.",
    ),
    SIGNAL: Told(
        "the function sent it to its own process, or somebody else did",
        "See what sends signals on this machine.",
    ),
    KEEPER_DIED: Told(
        "the keeper process of its slot died",
        "aiogpu-keep-* processes must not be killed.",
    ),
    DISCONNECTED: Told(
        "it had closed its connection to the node, so aiogpu ended it",
        "Close only descriptors that the function has opened (no os.closerange).",
    ),
    ENDED: Told(
        "aiogpu ended it, with another task that did not stop when it was to",
        "Have tasks heed KeyboardInterrupt or CancelledError.",
    ),
    INTERNAL: Told(
        "aiogpu ended it after an error of its own",
        "The function is not to blame. Please report it, with the node's log.",
    ),
}


def find_cause(status: int | None, known: str, findings: Findings) -> str:
    """The probable cause; one of those that `WorkerDiedError.cause` lists.

    Args:
        status: wait status of the worker, None if it never started.
        known: what the driver knows of it by itself, "" for nothing.
        findings: what the kernel says, where it was asked.
    """
    if status is None:
        return NOT_STARTED
    if not os.WIFSIGNALED(status):
        # It may have left by itself just before aiogpu would have ended it.
        return known if known in (KEEPER_DIED, INTERNAL) else EXIT
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        return _CRASHES[number][0] if number in _CRASHES else SIGNAL
    if "Killed process" in findings.log or (findings.group_kills and not known):
        return OUT_OF_MEMORY
    if known:
        return known
    return OUT_OF_MEMORY if findings.machine_kills else KILLED


def tell(cause: str) -> Told:
    """What is said of a cause."""
    for name, told in _CRASHES.values():
        if name == cause:
            return told
    return _OTHERS[cause]


def is_kernels(status: int | None, known: str) -> bool:
    """Whether the kernel may have something to say of such an end."""
    if status is None or not os.WIFSIGNALED(status):
        return False
    number = os.WTERMSIG(status)
    return number in _CRASHES or (number == signal.SIGKILL and known != ENDED)
