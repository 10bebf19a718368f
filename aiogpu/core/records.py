"""What the scheduler remembers of each task and each worker.

Records are plain state. Only `move_task` and `move_worker` write a state, and only
along the tables of `lifecycle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Lease
from aiogpu.core.lifecycle import (
    TASK_LEADS_TO,
    WORKER_LEADS_TO,
    TaskState,
    WorkerState,
)
from aiogpu.core.specs import Environment, TaskSpec
from aiogpu.errors import InternalError

Binding = tuple[Environment, tuple[tuple[str, tuple[int, ...]], ...]]
"""What a worker is tied to for life: its environment, and its devices by kind."""


@dataclass(slots=True, eq=False)
class TaskRecord:
    """One task, from submission until its code has stopped.

    Attributes:
        id: also its place in the order of submission.
        retries_left: -1 is without end.
        starts_failed: workers in a row that ended before they took the task.
        interrupts: how often its worker was asked to stop it.
        kill_at: when its worker is killed, once it is being stopped.
    """

    id: TaskId
    spec: TaskSpec
    retries_left: int
    state: TaskState = TaskState.WAITING
    worker: WorkerRecord | None = None
    starts_failed: int = 0
    interrupts: int = 0
    kill_at: float = 0.0


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process, from the wish for it until all of it has ended.

    Attributes:
        binding: None while nothing has been assigned to it.
        task: what it runs, or will run once it has started.
        lease: what it holds. A lease stays with a worker that ends until its
            process is gone, also when the task's result is long known.
        calls: finished calls by function, for functions with `max_calls`.
        is_last: whether it ends after the task that it runs.
    """

    id: WorkerId
    state: WorkerState = WorkerState.STARTING
    binding: Binding | None = None
    task: TaskRecord | None = None
    lease: Lease | None = None
    calls: dict[int, int] = field(default_factory=dict)
    is_last: bool = False


def move_task(record: TaskRecord, state: TaskState) -> None:
    """Move a task; raises `InternalError` where its table does not lead."""
    if state not in TASK_LEADS_TO[record.state]:
        raise InternalError(f"task {record.id} cannot go {record.state} -> {state}")
    record.state = state


def move_worker(record: WorkerRecord, state: WorkerState) -> None:
    """Move a worker; raises `InternalError` where its table does not lead."""
    if state not in WORKER_LEADS_TO[record.state]:
        raise InternalError(f"worker {record.id} cannot go {record.state} -> {state}")
    record.state = state


def binding_of(spec: TaskSpec, lease: Lease) -> Binding:
    """The binding that a worker needs to run this spec on this lease."""
    environment = spec.shape.environment
    if not lease.shares:
        return environment, ()
    if len(lease.shares) == 1 == len(lease.shares[0]):
        kind, ((index, _),) = lease.request.devices[0][0], lease.shares[0]
        return environment, ((kind, (index,)),)
    devices = tuple(
        (kind, tuple(index for index, _ in shares))
        for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True)
    )
    return environment, devices
