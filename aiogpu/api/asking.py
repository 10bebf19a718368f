"""What is asked of a node about a task of which one has but the number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.api.node import asked
from aiogpu.errors import NoSuchTaskError, OptionError

if TYPE_CHECKING:
    from aiogpu.observe.why import Why


async def why(task_id: int) -> Why:
    """Why a task waits, or what it does instead; `print` tells it in words.

    `handle.why()` says the same where there is a handle. An actor has a number too.

    Args:
        task_id: the task's number, as `aiogpu.status()` and log lines show it.

    Raises:
        OptionError: it is no number.
        NoSuchTaskError: the node has no task of that number, or none any more.
        NodeError: it was asked inside a task.
    """
    if not isinstance(task_id, int) or isinstance(task_id, bool) or task_id < 0:
        raise OptionError(
            f"aiogpu.why({task_id!r}) asks for a task's number, such as 12; "
            f"aiogpu.status() shows the numbers of those that run and wait."
        )
    session = await asked("aiogpu.why()")
    told = await session._ask().why_task(task_id)
    if told is None:
        raise NoSuchTaskError(
            f"this node has no task {task_id} that waits or runs: it has ended, or "
            f"never was. aiogpu.status() shows those that there are."
        )
    return told
