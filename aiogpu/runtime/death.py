"""How a worker has ended, and what its task's owner is told of it."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from aiogpu.errors import WorkerDiedError


class Death(NamedTuple):
    """How a worker ended.

    Attributes:
        pid: its process id, 0 if it never started.
        status: its wait status (waitpid(2)), None if it never started.
        last_output: the last lines that it wrote.
        reason: why it never started, or what is known beyond the status.
        begun: number of the task that it had begun last.
    """

    pid: int = 0
    status: int | None = None
    last_output: tuple[str, ...] = ()
    reason: str = ""
    begun: int = 0


def describe_death(task_name: str, death: Death) -> WorkerDiedError:
    """The error of a task whose worker has died, with all that is known."""
    if death.status is None:
        return WorkerDiedError(
            f"no worker could be started for {task_name}: {death.reason}"
        )
    number = os.WTERMSIG(death.status) if os.WIFSIGNALED(death.status) else None
    code = os.WEXITSTATUS(death.status) if os.WIFEXITED(death.status) else None
    if number is not None:
        how = f"was ended by signal {number} ({_signal_name(number)})"
    else:
        how = f"exited with code {code} without answering (os._exit?)"
    because = f"; {death.reason}" if death.reason else ""
    lines = "".join(f"\n  {line}" for line in death.last_output)
    last = f" Its last output:{lines}" if lines else ""
    return WorkerDiedError(
        f"the worker that ran {task_name} (pid {death.pid}) {how}{because}.{last}",
        death.pid,
        code,
        number,
        death.last_output,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
