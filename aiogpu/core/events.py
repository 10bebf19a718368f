"""What the scheduler is told: one small class for each event, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.core.effects import AboutDevice, AboutTask, AboutWorker
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import Environment, TaskSpec

if TYPE_CHECKING:
    from aiogpu.core.queue.fair_share import Limits


@dataclass(slots=True)
class Submitted:
    """A new task is to run. Ids count up. `parent` is the task that started it.

    `needs`: the tasks whose results are its arguments, if some of these are not there
    yet; it waits for `Supplied` then. None if all are. `client`: whose it is; a child
    is its parent's.
    """

    task: TaskId
    spec: TaskSpec
    parent: TaskId | None = None
    needs: tuple[TaskId, ...] | None = None
    client: ClientId = OWN


class Supplied(AboutTask):
    """All arguments of a task are there that were not."""

    __slots__ = ()


class Cancelled(AboutTask):
    """Nobody wants the task's result any more."""

    __slots__ = ()


class WorkerStarted(AboutWorker):
    """A worker that was asked for has connected."""

    __slots__ = ()


@dataclass(slots=True)
class TaskFinished:
    """A worker has answered: the task's code has stopped.

    `retry` says that it failed with an exception for which it is to be tried
    again, should it have retries left; `took` how many seconds its code ran;
    `ran_out` that it has failed for want of device memory.
    """

    task: TaskId
    worker: WorkerId
    retry: bool = False
    took: float = 0.0
    ran_out: bool = False


class WorkerSpoilt(AboutWorker):
    """A worker is unfit for another task: it ends by itself after the one it runs.

    Told before that one is `TaskFinished`.
    """

    __slots__ = ()


@dataclass(slots=True)
class TaskWaits:
    """A task's code waits until these tasks have ended, all of them.

    None of them: it does not wait any more, unless it waits for something
    `elsewhere`, of which nothing is known here.
    """

    task: TaskId
    children: tuple[TaskId, ...]
    elsewhere: bool = False


class Detached(AboutTask):
    """The result of the one that has started this task has a handle to it.

    So it does not end with that one.
    """

    __slots__ = ()


class Resides(AboutTask):
    """The task has its place, and needs no CPU from here on."""

    __slots__ = ()


@dataclass(slots=True)
class TaskSkipped:
    """A worker had a task's turn, saw that it was taken back, and did not run it."""

    task: TaskId
    worker: WorkerId


@dataclass(slots=True)
class Revoked:
    """What the worker had been sent when `Revoke` was said, and had not begun, is back.

    `began` is the last of its tasks that it has begun or is about to, None if none
    of those that it still has; it will begin no other.
    """

    worker: WorkerId
    number: int
    began: TaskId | None


@dataclass(slots=True)
class WorkerGone:
    """A worker's process and all that it started have ended.

    `began` is the last of its tasks that it had begun, None if none of those whose
    answer has not come. `settles`: whether its devices are free is still to be seen;
    one of `Settled` and `SetAside` follows. `is_crowded`: it was never started, for
    want of descriptors or processes. `outage`: why it could not be started; the same is
    likely for others of its environment or, if `is_crowded`, for all.
    """

    worker: WorkerId
    began: TaskId | None = None
    settles: bool = False
    is_crowded: bool = False
    outage: str = ""


class MemoryShort(AboutWorker):
    """Memory runs out, and this worker is the first to go."""

    __slots__ = ()


class Outgrown(AboutWorker):
    """A worker's task uses more device memory than was reserved for it: end it."""

    __slots__ = ()


@dataclass(slots=True)
class Sick:
    """A device is unfit for new tasks until it is `Well`, and why; told again, anew."""

    kind: str
    index: int
    reason: str


class Well(AboutDevice):
    """A device that was `Sick` may be used again."""

    __slots__ = ()


@dataclass(slots=True)
class Foreign:
    """Processes that are none of the node's are on a device, and who; None: no more.

    `is_avoided`: others are chosen before it; else it is given to nobody meanwhile.
    """

    kind: str
    index: int
    reason: str | None
    is_avoided: bool = False


@dataclass(slots=True)
class Settled:
    """The devices of a worker that has gone are free.

    `is_verified`: that was seen; otherwise nobody here can see it.
    """

    worker: WorkerId
    is_verified: bool = True


@dataclass(slots=True)
class SetAside:
    """The devices of a worker that has gone do not become free, and why."""

    worker: WorkerId
    reason: str


@dataclass(slots=True)
class LeaseReturned:
    """All processes have ended for which a lease was granted to this holder.

    `settles`: whether its devices are free is still to be seen; one of `Settled` and
    `SetAside` follows, of that holder.
    """

    holder: WorkerId
    settles: bool = False


class Recovered(AboutDevice):
    """A device that was set aside is free again."""

    __slots__ = ()


@dataclass(slots=True)
class Outdated:
    """Clean workers of this environment were forked from what is old by now."""

    environment: Environment


@dataclass(slots=True)
class ClientJoined:
    """Another program submits tasks too; told again, it has other terms.

    `weight`: how much it gets where one of weight 1 gets 1. From the first of these on
    the node is fair between programs; without any it knows of none.
    """

    client: ClientId
    weight: float = 1.0
    limits: Limits | None = None


@dataclass(slots=True)
class ClientLeft:
    """A program submits nothing any more; what it has submitted goes on."""

    client: ClientId


@dataclass(slots=True)
class ClientBehind:
    """A program does not read what it is sent, or has caught up.

    While it does not, nothing more of it is started: its results would pile up.
    """

    client: ClientId
    is_behind: bool


@dataclass(slots=True)
class TimePassed:
    """The moment named by `Scheduler.deadline()` has come."""


@dataclass(slots=True)
class Closing:
    """The node is shutting down: nothing new starts, all that runs is stopped.

    Attributes:
        at_once: nobody is given time to stop, not even those who have it already.
    """

    at_once: bool = False


Event = (
    Submitted
    | Supplied
    | Cancelled
    | WorkerStarted
    | TaskFinished
    | WorkerSpoilt
    | TaskWaits
    | Detached
    | Resides
    | TaskSkipped
    | Revoked
    | WorkerGone
    | MemoryShort
    | Outgrown
    | Sick
    | Well
    | Foreign
    | Settled
    | SetAside
    | LeaseReturned
    | Recovered
    | Outdated
    | ClientJoined
    | ClientLeft
    | ClientBehind
    | TimePassed
    | Closing
)
