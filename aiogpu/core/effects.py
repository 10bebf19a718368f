"""Effects: what the scheduler asks the driver to do, one small class for each.

Classes with the same fields share a base, because Python compiles the methods of each
dataclass anew when a program starts.
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

    `since` says when it was submitted, `has_begun` whether its worker may have begun
    it, in its last attempt.
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
    """Fork a worker for tasks with these variables."""

    worker: WorkerId
    environment: Environment = ()


@dataclass(slots=True)
class Assign:
    """Send the task to the worker.

    `lease` says which devices it gets. `is_first`: nothing was assigned to this
    worker before, so its environment is to be set. `is_last`: it ends after this.
    """

    task: TaskId
    worker: WorkerId
    lease: Lease
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class Granted:
    """Tell who has asked for a lease or a placement group that it is held.

    `holder` is the id under which it is held.
    """

    task: TaskId
    holder: WorkerId
    lease: Lease


@dataclass(slots=True)
class Reclaim:
    """End this lease at its holder; the answer is `lease_returned`.

    That is when the processes have ended that it was for.
    """

    task: TaskId
    holder: WorkerId


@dataclass(slots=True)
class Ahead:
    """Send these tasks to a worker, to be run in order, after what it has.

    They are of its last task's shape and take over its lease.
    """

    worker: WorkerId
    tasks: list[TaskId]


@dataclass(slots=True)
class Revoke:
    """Take back what the worker has not begun; answer with `revoked`.

    `number` tells one revocation of a worker from the next.
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
    """Let the task know that its program stops; it goes on for now."""

    task: TaskId
    worker: WorkerId


class Retire(AboutWorker):
    """Tell an idle worker to exit."""

    __slots__ = ()


class Kill(AboutWorker):
    """End the worker's process and all that it started, at once."""

    __slots__ = ()


class Settle(AboutEnd):
    """The task has ended; give its owner the answer that its worker sent."""

    __slots__ = ()


class Failure(Enum):
    """The reason why a task has no result."""

    EXPIRED = "expired"
    """Its timeout has passed."""
    OVERRUN = "overrun"
    """Its code has run for its run_timeout."""
    LOST = "lost"
    """Its worker died, and it is not tried again."""
    DEADLOCKED = "deadlocked"
    """It can never run, because those that wait for it hold what it needs."""
    DISOWNED = "disowned"
    """It ends with the task that has started it."""
    ABANDONED = "abandoned"
    """The node closes before it could end."""
    EVICTED = "evicted"
    """Its placement group is none any more; the reason says what became of that."""
    MISFIT = "misfit"
    """It can never run in the bundles of its placement group."""


@dataclass(slots=True)
class Fail:
    """Tell a task's owner that there will be no result; `Forget` follows.

    `reason` says more, for people. `worker` is the one that died with a lost task.
    """

    task: TaskId
    failure: Failure
    reason: str = ""
    worker: WorkerId | None = None


class Warn(AboutTask):
    """Warn the task's program, once, that it waits for resources held without end."""

    __slots__ = ()


class Forget(AboutEnd):
    """The task has ended and has no waiters: drop what is kept for it."""

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
    | Retire
    | Kill
    | Settle
    | Fail
    | Warn
    | Forget
)

NOTHING: Final[Sequence[Effect]] = ()
"""The commonest answer."""
