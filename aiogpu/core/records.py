"""The scheduler's records of tasks and workers, and their states.

`move` changes a state, and only along the tables here; a move that is not in the table
is a defect of aiogpu and raises. The bursts that are sent to a worker and come back
from it set `QUEUED`, `RUNNING` and `ENDED` directly, because a call for each task would
be too slow. A state says where something is, never how it got there. The diagrams in
`docs/architecture.md` are drawn from these tables.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import UNLIMITED, Environment, Lane, Request, TaskSpec
from aiogpu.core.model.units import BY_SHARE, GPU
from aiogpu.core.resources.ledger import Lease
from aiogpu.errors import InternalError


class TaskState(Enum):
    """The states of a task."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    EXPECTING = "expecting"
    """Results of others are its arguments, and not there yet; holds nothing."""
    STARTING = "starting"
    """Holds a lease; its worker is being forked. No code of it has run."""
    QUEUED = "queued"
    """Sent ahead to a worker that runs another; no code of it has run."""
    RUNNING = "running"
    """Sent to a worker; its code may be running."""
    BLOCKED = "blocked"
    """Its code waits for tasks that it has started; it holds no CPU meanwhile."""
    DELAYED = "delayed"
    """It has failed and will wait again, some time later; holds nothing."""
    STOPPING = "stopping"
    """Nobody wants its result any more; its code may still be running."""
    ENDED = "ended"
    """Its code has stopped, or never ran."""

    __hash__ = object.__hash__


class WorkerState(Enum):
    """The states of a worker."""

    STARTING = "starting"
    """Asked for; not connected yet."""
    IDLE = "idle"
    """Connected; runs nothing."""
    BUSY = "busy"
    """Runs one task; others of its shape may be queued behind it."""
    ENDING = "ending"
    """Gets no more work; its process has not ended yet."""
    SETTLING = "settling"
    """All its processes have ended; its devices were not seen free of them yet."""
    GONE = "gone"
    """Its process and all that it started have ended."""

    __hash__ = object.__hash__


class Memory(Enum):
    """The kinds of memory for which a task's worker can be killed."""

    HOST = "host"
    """Memory of the machine runs out."""
    DEVICE = "device"
    """The task used more device memory than it had reserved."""


_T = TaskState
TASK_LEADS_TO: Final = {
    _T.WAITING: (_T.EXPECTING, _T.STARTING, _T.QUEUED, _T.RUNNING, _T.ENDED),
    _T.EXPECTING: (_T.WAITING, _T.ENDED),
    _T.STARTING: (_T.RUNNING, _T.WAITING, _T.ENDED),
    _T.QUEUED: (_T.RUNNING, _T.WAITING, _T.STOPPING, _T.ENDED),
    _T.RUNNING: (_T.BLOCKED, _T.STOPPING, _T.WAITING, _T.DELAYED, _T.ENDED),
    _T.BLOCKED: (_T.RUNNING, _T.STOPPING, _T.WAITING, _T.DELAYED, _T.ENDED),
    _T.DELAYED: (_T.STARTING, _T.RUNNING, _T.WAITING, _T.ENDED),
    _T.STOPPING: (_T.ENDED,),
    _T.ENDED: (),
}

_W = WorkerState
WORKER_LEADS_TO: Final = {
    _W.STARTING: (_W.IDLE, _W.BUSY, _W.ENDING, _W.GONE),
    _W.IDLE: (_W.BUSY, _W.ENDING, _W.GONE),
    _W.BUSY: (_W.IDLE, _W.ENDING, _W.SETTLING, _W.GONE),
    _W.ENDING: (_W.SETTLING, _W.GONE),
    _W.SETTLING: (_W.GONE,),
    _W.GONE: (),
}

Binding = tuple[Environment, tuple[tuple[str, tuple[int, ...]], ...], int]
"""What a worker is tied to for life.

That is its environment, its devices by kind, and what limits its use of their memory
(`limit_of`): frameworks are told of it once.
"""


@dataclass(slots=True, eq=False)
class Kin:
    """The ties of a task to its parent, and to the tasks that it has started.

    Attributes:
        lane: its place among all; a child goes before what is no child, since
            its parent may hold resources while it waits for the child.
        parent: who has started it, None once it is on its own.
        children: unfinished tasks that end with it.
        waits_for: unfinished tasks for which its code waits.
        awaited_by: who waits for it, if anybody.
    """

    lane: Lane
    parent: TaskRecord | None = None
    children: dict[TaskId, TaskRecord] = field(default_factory=dict)
    waits_for: dict[TaskId, TaskRecord] = field(default_factory=dict)
    awaited_by: TaskRecord | None = None


@dataclass(slots=True, eq=False)
class Stop:
    """The progress of stopping a task.

    Attributes:
        kill_at: when its worker is killed.
        interrupts: how often its worker was asked to stop it.
    """

    kill_at: float
    interrupts: int = 0


@dataclass(slots=True, eq=False)
class TaskRecord:
    """One task, from submission until its code has stopped.

    Attributes:
        id: also its place in the order of submission.
        since: when it was submitted.
        retries: how often it was tried again.
        starts_failed: workers in a row that ended before they took the task.
        killed_for: the memory for want of which its worker was ended, if it was.
        is_alone: it has had that, and its next try is to be alone.
        client: the program whose it is.
        kin: None for a task without parent and children.
        stop: None unless it is being stopped.
        began: of a task with a timeout, when its worker took it or, once the worker has
            said so, when its code began; None before.
        run_until: when its `run_timeout` ends.
    """

    id: TaskId
    spec: TaskSpec
    since: float = 0.0
    client: ClientId = OWN
    state: TaskState = TaskState.WAITING
    worker: WorkerRecord | None = None
    retries: int = 0
    starts_failed: int = 0
    killed_for: Memory | None = None
    is_alone: bool = False
    kin: Kin | None = None
    stop: Stop | None = None
    began: float | None = None
    run_until: float = inf

    @property
    def retries_left(self) -> int:
        """Retries that are left; -1 for no limit."""
        most = self.spec.max_retries
        return most if most == UNLIMITED else most - self.retries

    def move(self, state: TaskState) -> None:
        """Change the state; `InternalError` if the table does not allow it."""
        if state not in TASK_LEADS_TO[self.state]:
            raise InternalError(f"task {self.id} cannot go {self.state} -> {state}")
        self.state = state


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process, from the wish for it until all of it has ended.

    Attributes:
        environment: of the tasks that it may serve.
        binding: None while nothing has been assigned to it.
        task: what it runs, or will run once it has started.
        queue: tasks of the same shape that it was sent ahead; they take over the
            lease, one after the other.
        refill_at: length of the queue from which on more is sent.
        is_killed: SIGKILL was sent; what it has answered may still be under way.
        lease: what it holds. A lease stays with a worker that ends until its
            process is gone, also when the task's result is long known.
        calls: finished calls by function, for functions with `max_calls`.
        is_last: whether it ends after the task that it runs.
        is_stale: it is told to end when it has no task: a device that it has open was
            sick since, or it was forked from what is old by now.
        revocations: how often its queue was taken back.
        is_revoking: whether it is being taken back.
        look_at: when it is looked at next, None if it is not watched.
        watched: what it ran when that was decided.
        watched_since: when that was decided.
    """

    id: WorkerId
    environment: Environment = ()
    state: WorkerState = WorkerState.STARTING
    binding: Binding | None = None
    task: TaskRecord | None = None
    queue: deque[TaskRecord] = field(default_factory=deque)
    refill_at: int = 0
    is_killed: bool = False
    lease: Lease | None = None
    calls: dict[int, int] = field(default_factory=dict)
    is_last: bool = False
    is_stale: bool = False
    revocations: int = 0
    is_revoking: bool = False
    look_at: float | None = None
    watched: TaskRecord | None = None
    watched_since: float = 0.0

    def move(self, state: WorkerState) -> None:
        """Change the state; `InternalError` if the table does not allow it."""
        if state not in WORKER_LEADS_TO[self.state]:
            raise InternalError(f"worker {self.id} cannot go {self.state} -> {state}")
        self.state = state


def sort_key(record: TaskRecord) -> Lane:
    """The task's place among all: priority, then depth."""
    return record.spec.lane if record.kin is None else record.kin.lane


def binding_of(spec: TaskSpec, lease: Lease) -> Binding:
    """The binding that a worker needs to run this spec on this lease."""
    environment, request = spec.shape.environment, lease.request
    if not lease.shares:
        return environment, (), 0
    limit = limit_of(request) if request.gpu_memory else 0
    if len(lease.shares) == 1 == len(lease.shares[0]):
        kind, ((index, _),) = request.devices[0][0], lease.shares[0]
        return environment, ((kind, (index,)),), limit
    devices = tuple(
        (kind, tuple(index for index, _ in shares))
        for (kind, _), shares in zip(request.devices, lease.shares, strict=True)
    )
    return environment, devices, limit


def limit_of(request: Request) -> int:
    """Tells apart what limits the use of GPU memory: bytes, or minus the parts."""
    if request.gpu_memory != BY_SHARE:
        return request.gpu_memory
    return -sum(amount for kind, amount in request.devices if kind == GPU)
