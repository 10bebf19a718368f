"""How a worker has ended, and what its task's owner is told of it."""

from __future__ import annotations

import os
import signal
from typing import Final, NamedTuple

from aiogpu.core.model.units import size
from aiogpu.errors import ActorDiedError, OutOfMemoryError, WorkerDiedError
from aiogpu.linux.procfs import Findings
from aiogpu.runtime.cause import CROWDED, UNAVAILABLE, find_cause, tell
from aiogpu.runtime.crowd import CrowdedError, UnavailableError

QUOTED: Final = 500
"""Characters of a line that an error's text quotes; `last_output` has all of it."""


class Death(NamedTuple):
    """How a worker ended.

    Attributes:
        pid: its process id, 0 if it never started.
        status: its wait status (waitpid(2)), None if it never started.
        last_output: the last lines that it wrote.
        reason: why it never started, or what is known beyond the status.
        begun: number of the task that it had begun last.
        known: the cause, where the driver knows it by itself, else "".
        findings: what the kernel says of it.
    """

    pid: int = 0
    status: int | None = None
    last_output: tuple[str, ...] = ()
    reason: str = ""
    begun: int = 0
    known: str = ""
    findings: Findings = Findings()


def stillbirth(error: Exception) -> Death:
    """The death of a worker for which there is no slot, or no zygote."""
    if isinstance(error, CrowdedError):
        return Death(reason=str(error), known=CROWDED)
    if isinstance(error, UnavailableError):
        return Death(reason=str(error), known=UNAVAILABLE)
    told = "no slot can be made: " if isinstance(error, OSError) else ""
    return Death(reason=f"{told}{error}")


def describe_death(task_name: str, death: Death) -> WorkerDiedError:
    """The error of a task whose worker has died, with all that is known."""
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
    what, advice = tell(cause)
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
    """The error of a task that was ended before the machine's memory ran out.

    Args:
        task_name: the task's.
        death: how its worker ended.
        asked: bytes that the task had asked for by `memory=`, 0 for none.
        used: bytes that its process and all below it had in use when it was ended.
        limit: bytes that all processes together may use safely.
    """
    wanted = f"it asked for {size(asked)}" if asked else "it asked for none (memory=)"
    return OutOfMemoryError(
        f"{task_name} (pid {death.pid}) was ended while it used {size(used)} of "
        f"memory; {wanted}, and all together may use {size(limit)} before the "
        f"kernel ends processes of its own choice. Give the task "
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
    """The error of a call that its actor has not answered before it died.

    Args:
        name: of the actor.
        cause: how its process has ended, None if the actor was killed.
        is_restarting: whether the actor is made anew.
    """
    after = (
        " It is being restarted; give it max_task_retries=1 or more to have such "
        "calls tried again."
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
