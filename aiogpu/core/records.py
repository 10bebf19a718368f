"""The scheduler's records of tasks and workers, and their states.

`move` changes a state along the tables here; any other move is a defect of aiogpu and
raises. Code that handles bursts of tasks sets `QUEUED`, `RUNNING` and `ENDED` directly,
because a call for each task would be too slow. The diagrams in `design/architecture.md`
are drawn from these tables.
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
    """Waits for results that are its arguments; holds nothing."""
    STARTING = "starting"
    """Holds a lease; its worker is being forked. None of its code has run."""
    QUEUED = "queued"
    """Sent ahead to a worker that runs another task; none of its code has run."""
    RUNNING = "running"
    """Sent to a worker; its code may be running."""
    BLOCKED = "blocked"
    """Its code waits for tasks that it has started; holds no CPU."""
    DELAYED = "delayed"
    """Has failed and is queued again later; holds nothing."""
    EVICTED = "evicted"
    """An idle actor that has left to let others start; queued again when it is called;
    holds nothing."""
    STOPPING = "stopping"
    """Cancelled; its code may still be running."""
    ENDED = "ended"
    """Its code has stopped, or never ran."""

    __hash__ = object.__hash__


class WorkerState(Enum):
    """The states of a worker."""

    STARTING = "starting"
    """Being forked; not connected yet."""
    IDLE = "idle"
    """Connected; runs nothing."""
    BUSY = "busy"
    """Runs one task; others of the same shape may be in its queue."""
    ENDING = "ending"
    """Gets no more tasks; its process has not ended yet."""
    SETTLING = "settling"
    """It has no task, and its code never runs again, but it keeps its devices: they may
    not be free yet, or a process of it has not ended in spite of SIGKILL."""
    GONE = "gone"
    """Its process and all descendants have ended."""

    __hash__ = object.__hash__


class Memory(Enum):
    """The kinds of memory for which a task's worker can be killed."""

    HOST = "host"
    """The machine's memory runs out."""
    DEVICE = "device"
    """The task used more device memory than it had reserved."""


_T = TaskState
TASK_LEADS_TO: Final = {
    _T.WAITING: (_T.EXPECTING, _T.STARTING, _T.QUEUED, _T.RUNNING, _T.ENDED),
    _T.EXPECTING: (_T.WAITING, _T.ENDED),
    _T.STARTING: (_T.RUNNING, _T.WAITING, _T.ENDED),
    _T.QUEUED: (_T.RUNNING, _T.WAITING, _T.STOPPING, _T.ENDED),
    _T.RUNNING: (
        _T.BLOCKED,
        _T.STOPPING,
        _T.WAITING,
        _T.DELAYED,
        _T.EVICTED,
        _T.ENDED,
    ),
    _T.BLOCKED: (_T.RUNNING, _T.STOPPING, _T.WAITING, _T.DELAYED, _T.ENDED),
    _T.DELAYED: (_T.STARTING, _T.RUNNING, _T.WAITING, _T.ENDED),
    _T.EVICTED: (_T.WAITING, _T.ENDED),
    _T.STOPPING: (_T.ENDED,),
    _T.ENDED: (),
}

_W = WorkerState
WORKER_LEADS_TO: Final = {
    _W.STARTING: (_W.IDLE, _W.BUSY, _W.ENDING, _W.SETTLING, _W.GONE),
    _W.IDLE: (_W.BUSY, _W.ENDING, _W.GONE),
    _W.BUSY: (_W.IDLE, _W.ENDING, _W.SETTLING, _W.GONE),
    _W.ENDING: (_W.SETTLING, _W.GONE),
    _W.SETTLING: (_W.GONE,),
    _W.GONE: (),
}

Binding = tuple[Environment, tuple[tuple[str, tuple[int, ...]], ...], int]
"""The properties that a worker keeps for life.

These are its environment, its devices by kind, and its limit of device memory
(`limit_of`), which frameworks read only once.
"""


@dataclass(slots=True, eq=False)
class Kin:
    """The links of a task to its parent and its children.

    Attributes:
        lane: the task's place in the queue; a child goes before tasks without a
            parent, since its parent may hold resources while it waits for the child.
            A task that has its turn (`scheduler.turns`) is in a lane before all others
            of its priority.
        depth: 0 for a task without a parent, -1 for its children, and so on.
        parent: the parent; None if the task does not end with it.
        children: unfinished tasks that end with this task.
        waits_for: unfinished tasks for which the task's code waits.
        awaited_by: the task that waits for this one, or None.
    """

    lane: Lane
    depth: int
    parent: TaskRecord | None = None
    children: dict[TaskId, TaskRecord] = field(default_factory=dict)
    waits_for: dict[TaskId, TaskRecord] = field(default_factory=dict)
    awaited_by: TaskRecord | None = None

    def is_disowned(self, task: TaskId) -> bool:
        """Return True if a parent has given up this task, which has not ended yet."""
        parent = None if self.parent is None else self.parent.kin
        return parent is not None and task not in parent.children


@dataclass(slots=True, eq=False)
class Stop:
    """The progress of stopping a task.

    Attributes:
        kill_at: when the task's worker is killed.
        interrupts: how often the worker was asked to stop the task.
    """

    kill_at: float
    interrupts: int = 0


@dataclass(slots=True, eq=False)
class TaskRecord:
    """One task, from submission until its code has stopped.

    Attributes:
        id: the id, which increases in the order of submission.
        since: when the task was submitted.
        retries: how often the task was retried.
        starts_failed: workers in a row that ended before they took the task.
        killed_for: the kind of memory for which the task's worker was killed, or None.
        is_alone: no other task ran when it was killed because host memory ran out.
        client: the program that owns the task.
        kin: None for a task without parent and children.
        stop: None unless the task is being stopped.
        began: for a task with a timeout: when its worker took it or, once reported,
            when its code began; None before.
        run_until: when the `run_timeout` ends.
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
        """The number of retries left; -1: no limit."""
        most = self.spec.max_retries
        return most if most == UNLIMITED else most - self.retries

    def move(self, state: TaskState) -> None:
        """Change the state; `InternalError` if the table does not allow it."""
        if state not in TASK_LEADS_TO[self.state]:
            raise InternalError(f"task {self.id} cannot go {self.state} -> {state}")
        self.state = state


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process, from the decision to fork it until it has ended.

    Attributes:
        environment: the environment of the tasks that the worker may run.
        binding: None until a first task was assigned.
        task: the current task, or the task to run once the worker has started.
        queue: tasks of the same shape that were sent ahead; each takes over the lease
            from the one before.
        refill_at: length of the queue at which more tasks are sent.
        is_killed: SIGKILL was sent; replies may still arrive.
        lease: the worker's lease. An ending worker keeps its lease until its process
            is gone, even if the task's result has arrived long before.
        calls: finished calls by function, for functions with `max_calls`.
        prepared: functions that it has run; those of tasks that were sent ahead only
            if some functions need preparation.
        is_last: the worker exits after its current task.
        is_leaving: its endless task was told to end, or to leave.
        is_left: the worker counts as gone, but a process of it has not ended; when it
            will is not known.
        is_stale: retire the worker when it has no task: one of its devices was sick,
            or its zygote was replaced.
        revocations: how often the queue was taken back.
        is_revoking: the queue is being taken back.
        look_at: when the worker's progress is checked next; None if it is not watched.
        watched: the task that ran when this check was set.
        watched_since: when this check was set.
    """

    id: WorkerId
    environment: Environment = ()
    state: WorkerState = WorkerState.STARTING
    binding: Binding | None = None
    task: TaskRecord | None = None
    queue: deque[TaskRecord] = field(default_factory=deque)
    refill_at: int = 0
    is_killed: bool = False
    is_left: bool = False
    lease: Lease | None = None
    calls: dict[int, int] = field(default_factory=dict)
    prepared: dict[int, None] = field(default_factory=dict)
    is_last: bool = False
    is_leaving: bool = False
    is_stale: bool = False
    revocations: int = 0
    is_revoking: bool = False
    look_at: float | None = None
    watched: TaskRecord | None = None
    watched_since: float = 0.0

    @property
    def holds_endlessly(self) -> bool:
        """True if only an owner, or the kernel, decides when the lease ends."""
        if self.task is None or self.is_leaving:
            return self.is_left
        spec = self.task.spec
        return self.is_left or (spec.is_endless and not spec.is_evictable)

    def move(self, state: WorkerState) -> None:
        """Change the state; `InternalError` if the table does not allow it."""
        if state not in WORKER_LEADS_TO[self.state]:
            raise InternalError(f"worker {self.id} cannot go {self.state} -> {state}")
        self.state = state


Precedence = tuple[Lane, int]
"""Sort key of a task: lane, then task id."""


def sort_key(record: TaskRecord) -> Lane:
    """Return the task's place in the queue: priority, then depth."""
    return record.spec.lane if record.kin is None else record.kin.lane


def binding_of(spec: TaskSpec, lease: Lease) -> Binding:
    """Return the binding that a worker needs to run this spec on this lease."""
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
    """Return the limit of GPU memory: bytes, or minus the share in parts."""
    if request.gpu_memory != BY_SHARE:
        return request.gpu_memory
    return -sum(amount for kind, amount in request.devices if kind == GPU)
