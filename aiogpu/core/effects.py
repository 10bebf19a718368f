"""Effects: what the scheduler asks the driver to do, one small class for each.

Classes with the same fields share a base, because Python compiles the methods of every
dataclass when a program starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Environment
from aiogpu.core.resources.ledger import Lease


@dataclass(slots=True)
class AboutTask:
    """One task."""

    task: TaskId


@dataclass(slots=True)
class AboutEnd:
    """A task that has ended.

    `since`: when the task was submitted. `has_begun`: its code may have begun in the
    last attempt.
    """

    task: TaskId
    since: float = field(default=0.0, compare=False)
    has_begun: bool = field(default=True, compare=False)


@dataclass(slots=True)
class AboutWorker:
    """One worker."""

    worker: WorkerId


@dataclass(slots=True)
class Spawn:
    """Fork a worker for tasks of an environment.

    `task`: the task that waits for it; None for a spare.
    """

    worker: WorkerId
    environment: Environment = ()
    task: TaskId | None = None


@dataclass(slots=True)
class Assign:
    """Send the task to the worker.

    `lease`: the task's devices. `is_first`: this is the worker's first task, so its
    environment must be set. `is_last`: the worker exits after the task.
    """

    task: TaskId
    worker: WorkerId
    lease: Lease
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class Granted:
    """Tell the owner of a lease or a placement group that it is granted.

    `holder`: the id that stands for the holder of the lease.
    """

    task: TaskId
    holder: WorkerId
    lease: Lease


@dataclass(slots=True)
class Reclaim:
    """Take a lease back from its holder.

    Answered by `lease_returned`, when the processes that use the lease have ended.
    """

    task: TaskId
    holder: WorkerId


@dataclass(slots=True)
class Ahead:
    """Send tasks ahead to a worker, which runs them in order after its current ones.

    They have the shape of its current task and take over its lease.
    """

    worker: WorkerId
    tasks: list[TaskId]


@dataclass(slots=True)
class Revoke:
    """Take back the tasks that a worker has not begun; answered by `revoked`.

    `number` counts the revocations of a worker.
    """

    worker: WorkerId
    number: int


@dataclass(slots=True)
class Interrupt:
    """Ask the worker to stop the task; `attempt` counts from 0."""

    task: TaskId
    worker: WorkerId
    attempt: int


@dataclass(slots=True)
class Announce:
    """Tell a running task that its program stops; the task continues for now."""

    task: TaskId
    worker: WorkerId


class Unclaim(AboutWorker):
    """A worker that is being forked is not for its task any more, but for any."""

    __slots__ = ()


class Retire(AboutWorker):
    """Tell an idle worker to exit."""

    __slots__ = ()


class Kill(AboutWorker):
    """Kill the worker's process and all its descendants at once."""

    __slots__ = ()


class Settle(AboutEnd):
    """The task has ended: give its owner the result that the worker sent."""

    __slots__ = ()


class Failure(Enum):
    """The reason why a task has no result."""

    EXPIRED = "expired"
    """Its timeout has passed."""
    OVERRUN = "overrun"
    """Its code has run for its run_timeout."""
    LOST = "lost"
    """Its worker died, and it is not retried."""
    KILLED = "killed"
    """It is an actor that was killed before it had a process, without restarts left."""
    DEADLOCKED = "deadlocked"
    """It can never run, because tasks that wait for it hold what it needs."""
    DISOWNED = "disowned"
    """Its parent has ended."""
    ABANDONED = "abandoned"
    """The node closes before it could end."""
    EVICTED = "evicted"
    """Its placement group does not exist any more; `Fail.reason` says why."""
    MISFIT = "misfit"
    """It can never run in the bundles of its placement group."""


@dataclass(slots=True)
class Fail:
    """Tell a task's owner that there will be no result; `Forget` follows.

    `reason`: details in words. `worker`: the worker that died, for a lost task.
    """

    task: TaskId
    failure: Failure
    reason: str = ""
    worker: WorkerId | None = None


class Warn(AboutTask):
    """Warn the task's program, once, that it waits for resources held without end."""

    __slots__ = ()


class Evict(AboutTask):
    """Tell an idle actor to leave: its process ends as if the actor did."""

    __slots__ = ()


class Evicted(AboutTask):
    """An actor has left; it is not queued again before `Scheduler.bring_back`."""

    __slots__ = ()


class Forget(AboutEnd):
    """The task has ended and its owner does not wait: drop everything about it."""

    __slots__ = ()


Effect = (
    Spawn
    | Assign
    | Granted
    | Reclaim
    | Ahead
    | Revoke
    | Interrupt
    | Announce
    | Unclaim
    | Retire
    | Kill
    | Settle
    | Fail
    | Warn
    | Evict
    | Evicted
    | Forget
)

NOTHING: Final[Sequence[Effect]] = ()
"""No effects: the most frequent answer."""
