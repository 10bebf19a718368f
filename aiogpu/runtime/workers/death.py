"""Determines why a worker has ended, and builds the error.

`find_cause` is a pure rule. The errors for workers that cannot be started now are here
too.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Final, NamedTuple

from aiogpu.core.model.units import size
from aiogpu.errors import (
    ActorDiedError,
    NodeStartError,
    OutOfMemoryError,
    WorkerDiedError,
)
from aiogpu.linux.procfs import Findings

_USED_UP: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


SCARCE: Final = (*_USED_UP, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""Errno values for a resource that may become free again, or for a directory that was
removed just now. The present workers can run the waiting tasks."""


NO_PROCESS: Final = (*_USED_UP, errno.EAGAIN)
"""Errno values of fork(2) for lack of resources."""


class NoCapacityError(OSError):
    """There is no room for another slot now. There may be later."""


class UnavailableError(NodeStartError):
    """There is no zygote for an environment now. There may be later."""


def is_scarcity(error: BaseException | None) -> bool:
    """Return True if a process failed to start for lack of a freeable resource."""
    return isinstance(error, OSError) and error.errno in NO_PROCESS


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
"""No room for the worker now, so its task waits. Users do not see this cause."""


UNAVAILABLE: Final = "unavailable"
"""No zygote for the worker now, so its task waits. Users do not see this cause."""


_CRASHES: Final[dict[int, str]] = {
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGABRT: "abort",
}
"""Signals that end a crashing process, each with the reported cause."""


class Explanation(NamedTuple):
    """What a cause means, and what to do about it."""

    what: str
    advice: str


_NATIVE: Final = (
    "Run the function in this process, or call faulthandler.enable() in it, to see "
    "where."
)


IN_WORDS: Final[dict[str, Explanation]] = {
    "segfault": Explanation("native code accessed invalid memory", _NATIVE),
    "bus error": Explanation(
        "a mapped file has shrunk, or shared memory (/dev/shm) is full",
        "See `df /dev/shm`. " + _NATIVE,
    ),
    "arithmetic error": Explanation("most likely native code divided by zero", _NATIVE),
    "illegal instruction": Explanation(
        "native code was built for another processor",
        "Install a build of the library for this processor.",
    ),
    "abort": Explanation(
        "native code gave up: a failed assertion, a C++ exception", _NATIVE
    ),
    NOT_STARTED: Explanation(
        "the process never started",
        "Check that this machine has free processors and memory.",
    ),
    EXIT: Explanation(
        "probably os._exit(), or exit() in native code",
        "Return or raise an exception to end the task.",
    ),
    OUT_OF_MEMORY: Explanation(
        "the kernel ended it because memory ran out",
        "Give the task memory=... so that fewer run at once, or raise the limit.",
    ),
    KILLED: Explanation(
        "another process sent the signal, or a batch system's limit was reached",
        "Check the log of the batch system or service manager of this machine.",
    ),
    SIGNAL: Explanation(
        "the function sent the signal to its own process, or another process did",
        "Check which programs send signals on this machine.",
    ),
    KEEPER_DIED: Explanation(
        "the keeper process of its slot died",
        "aiogpu-keep-* processes must not be killed.",
    ),
    DISCONNECTED: Explanation(
        "it had closed its connection to the node, so aiogpu ended it",
        "Close only descriptors that the function has opened (no os.closerange).",
    ),
    ENDED: Explanation(
        "aiogpu ended it, together with a task that did not stop when cancelled",
        "Let tasks end on KeyboardInterrupt or CancelledError.",
    ),
    INTERNAL: Explanation(
        "aiogpu ended it after an error of its own",
        "The function is not to blame. Please report it, with the node's log.",
    ),
}


def find_cause(status: int | None, known: str, findings: Findings) -> str:
    """Return the probable cause, as listed for `WorkerDiedError.cause`.

    Args:
        status: the wait status of the worker, None if it never started.
        known: the cause that the driver itself knows, "" for none.
        findings: the kernel's findings, if the kernel was asked.
    """
    if status is None:
        return NOT_STARTED
    if not os.WIFSIGNALED(status):
        # The worker may have exited by itself just before aiogpu ended it.
        return known if known in (KEEPER_DIED, INTERNAL) else EXIT
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        return _CRASHES.get(number, SIGNAL)
    if "Killed process" in findings.log or (findings.group_kills and not known):
        return OUT_OF_MEMORY
    if known:
        return known
    return OUT_OF_MEMORY if findings.machine_kills else KILLED


def may_be_kernels(status: int | None, known: str) -> bool:
    """Return True if the kernel may have ended a worker, or may know why it ended."""
    if status is None or not os.WIFSIGNALED(status):
        return False
    number = os.WTERMSIG(status)
    return number in _CRASHES or (number == signal.SIGKILL and known != ENDED)


QUOTED: Final = 500
"""Characters of a line that an error quotes; `last_output` has the whole line."""


class Death(NamedTuple):
    """The end of a worker.

    Attributes:
        pid: the process id, 0 if the worker never started.
        status: the wait status (waitpid(2)), None if the worker never started.
        last_output: the last lines of output.
        reason: why the worker never started, or what is known beyond the status.
        begun: the number of the task or call that the worker began last.
        known: the cause, if the driver itself knows it, else "".
        findings: the kernel's findings.
    """

    pid: int = 0
    status: int | None = None
    last_output: tuple[str, ...] = ()
    reason: str = ""
    begun: int = 0
    known: str = ""
    findings: Findings = Findings()


UNKNOWN: Final = Death()
"""A death about which nothing is known yet."""


def start_failure(error: Exception) -> Death:
    """Return the death of a worker that got no slot or no zygote."""
    if isinstance(error, NoCapacityError):
        return Death(reason=str(error), known=CROWDED)
    if isinstance(error, UnavailableError):
        return Death(reason=str(error), known=UNAVAILABLE)
    prefix = "no slot can be made: " if isinstance(error, OSError) else ""
    return Death(reason=f"{prefix}{error}")


def describe_death(task_name: str, death: Death) -> WorkerDiedError:
    """Return the error of a task whose worker has died."""
    cause = find_cause(death.status, death.known, death.findings)
    if death.status is None:
        return WorkerDiedError(
            f"no worker could be started for {task_name}: {death.reason}", cause=cause
        )
    number = os.WTERMSIG(death.status) if os.WIFSIGNALED(death.status) else None
    code = os.WEXITSTATUS(death.status) if os.WIFEXITED(death.status) else None
    if number is not None:
        how = f"was ended by signal {number} ({_signal_name(number)})"
    else:
        how = f"exited with code {code} without answering"
    what, advice = IN_WORDS[cause]
    log = f" (kernel: {death.findings.log})" if death.findings.log else ""
    also = f"; {death.reason}" if death.reason and death.reason != what else ""
    return WorkerDiedError(
        f"the worker that ran {task_name} (pid {death.pid}) {how}: {what}{log}{also}. "
        f"{advice}{_quote(death.last_output)}",
        death.pid,
        code,
        number,
        death.last_output,
        cause,
    )


def describe_out_of_memory(
    task_name: str, death: Death, asked: int, used: int, limit: int
) -> OutOfMemoryError:
    """Return the error of a task that was ended before host memory ran out.

    Args:
        task_name: the name of the task.
        death: the end of its worker.
        asked: bytes that the task requested by `memory=`, 0 for none.
        used: bytes that its process and all descendants used when it was ended.
        limit: bytes that all processes together may use safely.
    """
    wanted = f"it asked for {size(asked)}" if asked else "it asked for none (memory=)"
    return OutOfMemoryError(
        f"{task_name} (pid {death.pid}) was ended while it used {size(used)} of "
        f"memory; {wanted}, and all processes together may use {size(limit)} before "
        f"the kernel starts to kill processes. Give the task "
        f'memory="{size(used)}", so that fewer run at once, or let it use less.'
        f"{_quote(death.last_output)}",
        pid=death.pid,
        last_output=death.last_output,
        asked=asked,
        used=used,
        limit=limit,
    )


def describe_loss(
    name: str, cause: Exception | None, is_restarting: bool
) -> ActorDiedError:
    """Return the error of a call whose actor died during the call.

    Args:
        name: the name of the actor.
        cause: the error that ended the process, None if the actor was killed.
        is_restarting: the actor is being restarted.
    """
    after = (
        " It is being restarted; with max_task_retries=1 or more, such calls are "
        "retried."
        if is_restarting
        else ""
    )
    error = ActorDiedError(
        f"{name} died while it ran this call: {cause or 'it was killed.'}{after}",
        name,
        is_restarting,
    )
    error.__cause__ = cause
    return error


def _quote(lines: tuple[str, ...]) -> str:
    if not lines:
        return ""
    return " Its last output:" + "".join(f"\n  {_short(line)}" for line in lines)


def _short(line: str) -> str:
    if len(line) <= QUOTED:
        return line
    return f"{line[:QUOTED]}... ({len(line)} characters)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
