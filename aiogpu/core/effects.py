"""What the scheduler wants done: one small class for each effect.

Classes with the same fields share a base, because Python compiles the methods of each
dataclass anew when a program starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Environment
from aiogpu.core.resources.ledger import Lease


@dataclass(slots=True)
class AboutTask:
    """One task."""

    task: TaskId


@dataclass(slots=True)
class AboutReason:
    """One task, and the reason for people."""

    task: TaskId
    reason: str


@dataclass(slots=True)
class AboutHolder:
    """One task that asks for a lease, and under which id that is held."""

    task: TaskId
    holder: WorkerId


@dataclass(slots=True)
class AboutWorker:
    """One worker."""

    worker: WorkerId


@dataclass(slots=True)
class AboutDevice:
    """One device: its kind, and its index among those."""

    kind: str
    index: int


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
    """Tell who has asked for a lease that he has it, and under which holder's id."""

    task: TaskId
    holder: WorkerId
    lease: Lease


class Reserved(AboutHolder):
    """Tell who has asked for a gang that all its bundles are held."""

    __slots__ = ()


@dataclass(slots=True)
class Evict:
    """The gang in which the task was to run, or runs, is none any more; tell its owner.

    `gang` is the name of that, `reason` a clause that says what has become of it.
    """

    task: TaskId
    gang: str
    reason: str


class Misfit(AboutReason):
    """The task can never run in its gang's bundles; tell its owner the reason."""

    __slots__ = ()


class Reclaim(AboutHolder):
    """Nobody may hold this lease any more; answer with `LeaseReturned`.

    That is when the processes have ended that it was for.
    """

    __slots__ = ()


@dataclass(slots=True)
class Ahead:
    """Send these tasks to a worker, to be run in order, after what it has.

    They are of its last task's shape and take over its lease.
    """

    worker: WorkerId
    tasks: list[TaskId]


@dataclass(slots=True)
class Revoke:
    """Take back what the worker has not begun; answer with `Revoked`.

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


class Retire(AboutWorker):
    """Tell an idle worker to exit."""

    __slots__ = ()


class Kill(AboutWorker):
    """End the worker's process and all that it started, at once."""

    __slots__ = ()


class Settle(AboutTask):
    """The task has ended; give its owner the answer that its worker sent."""

    __slots__ = ()


class Expire(AboutTask):
    """The task's timeout has passed; tell its owner."""

    __slots__ = ()


@dataclass(slots=True)
class Lose:
    """The task's worker died and it is not tried again; tell its owner.

    `note` says more about why it is not.
    """

    task: TaskId
    worker: WorkerId
    note: str = ""


class Deadlock(AboutReason):
    """The task can never run, because those that wait for it hold what it needs.

    It has ended; tell its owner the reason.
    """

    __slots__ = ()


class Warn(AboutTask):
    """The task waits for what is held without end; tell its program why, once."""

    __slots__ = ()


class Disown(AboutTask):
    """The task ends with the one that has started it; tell its owner."""

    __slots__ = ()


class Abandon(AboutTask):
    """The node closes before the task could end; tell its owner."""

    __slots__ = ()


class Forget(AboutTask):
    """The task has ended and nobody waits for it; drop what is kept for it."""

    __slots__ = ()


Effect = (
    Spawn
    | Assign
    | Granted
    | Reserved
    | Evict
    | Misfit
    | Reclaim
    | Ahead
    | Revoke
    | Interrupt
    | Retire
    | Kill
    | Settle
    | Expire
    | Lose
    | Deadlock
    | Warn
    | Disown
    | Abandon
    | Forget
)

NOTHING: Final[Sequence[Effect]] = ()
"""The commonest answer."""
