"""A typed picture of the node at one moment: who holds what, what waits and why.

It costs as much as there are workers and devices. Of those that wait, of whom there
may be a million, only the first are looked at, and each shape once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from aiogpu.core.actor_status import ActorStatus
from aiogpu.core.client_status import NOBODY, ClientStatus, Program, clients_seen
from aiogpu.core.failure_status import FailureStatus
from aiogpu.core.holding import NOTHING, DeviceStatus, Holdings
from aiogpu.core.ids import WorkerId
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.observed import Observations
from aiogpu.core.outage import OutageStatus, find_outages
from aiogpu.core.pausing import why_not_running
from aiogpu.core.placement_status import PlacementStatus, placement_status
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.report import report, summary
from aiogpu.core.reservation import Reservation
from aiogpu.core.resources import CPU, Request
from aiogpu.core.shape_status import ShapeStatus, shape_status
from aiogpu.core.shortage import ReservationStatus, describe, rival_of, why_waiting
from aiogpu.core.specs import Shape

DELAYED: Final = "has failed before, and is tried again in a while"
EXPECTING: Final = "waits for results that are its arguments"
LISTED: Final = 100
"""Waiting tasks, and shapes, that a picture shows one by one."""


NO_LEASES: Final[Mapping[WorkerId, WorkerRecord]] = {}
_HOLD_NOTHING: Final = frozenset({TaskState.WAITING.value, TaskState.EXPECTING.value})


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One task that has not ended.

    Attributes:
        id: the task's number.
        name: its name.
        state: "waiting", "starting", "queued", "running", "blocked", "delayed",
            "expecting" or "stopping"; `aiogpu.core.lifecycle.TaskState` says what each
            means. "sent" on a cluster that does not tell whether it runs.
        request: what it asks for, `{"CPU": 1.0, "GPU": 0.25}`.
        worker: id of its worker, None while it waits.
        reason: why its code does not run, None where it may.
        client: the program whose it is, 0 for the node's own.
        is_lease: whether it is a lease, which processes hold that are no workers.
        pid: process id of its worker or, of a lease, of the program that has asked for
            it; 0 while it waits or its worker starts.
    """

    id: int
    name: str
    state: str
    request: Mapping[str, float]
    worker: int | None
    reason: str | None
    client: int = 0
    is_lease: bool = False
    pid: int = 0

    @property
    def is_held(self) -> bool:
        """Whether it has a worker, or is a lease that somebody has."""
        is_leased = self.is_lease and self.state not in _HOLD_NOTHING
        return is_leased or self.worker is not None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker process.

    Attributes:
        id: the worker's number.
        pid: its process id, 0 while it starts.
        state: "starting", "idle", "busy" or "ending".
        task: name of the task that it runs.
    """

    id: int
    pid: int
    state: str
    task: str | None


@dataclass(frozen=True, slots=True, repr=False)
class NodeStatus:
    """The node at one moment. `print` shows it as a table.

    Attributes:
        total: all resources by name, `{"CPU": 4.0, "GPU": 1.0}`.
        available: what is free of each.
        devices: the devices, and who holds them.
        workers: the worker processes.
        tasks: all that have a worker, and leases that are held, by number; then the
            first 100 of those that wait, in the order in which their turns come if
            nothing else is submitted; fewer, where thousands between them were
            cancelled.
        waiting_count: how many wait, listed or not.
        shapes: what they ask for, in the order of the first one's turn; at most 100.
        shape_count: how many shapes there are, listed or not.
        reservation: what is kept for a task that has waited long, None if nothing.
        clients: the programs that share the node, by number; empty where it is one's
            alone.
        actors: all that have a process; then the first 100 of the others.
        failures: the last 100 that have failed, the latest first; none are kept by a
            node without processes.
        draining: seconds that what runs still has where the node is being stopped, and
            takes no new work; None where it is not.
        placements: all of them, in the order in which they were asked for.
        outages: why no worker can be started now, for which tasks, and when the next
            try is; empty where workers start.
    """

    total: Mapping[str, float]
    available: Mapping[str, float]
    devices: tuple[DeviceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    tasks: tuple[TaskStatus, ...]
    waiting_count: int
    shapes: tuple[ShapeStatus, ...]
    shape_count: int
    reservation: ReservationStatus | None
    clients: tuple[ClientStatus, ...] = ()
    actors: tuple[ActorStatus, ...] = ()
    failures: tuple[FailureStatus, ...] = ()
    draining: float | None = None
    placements: tuple[PlacementStatus, ...] = ()
    outages: tuple[OutageStatus, ...] = ()

    @property
    def waiting(self) -> tuple[TaskStatus, ...]:
        """The tasks that hold nothing yet; the first 100 of them."""
        return tuple(t for t in self.tasks if t.state in _HOLD_NOTHING)

    def __repr__(self) -> str:
        return f"<NodeStatus {summary(self)}>"

    def __str__(self) -> str:
        return report(self)


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits at one moment, as far as it is shown.

    Attributes:
        count: how many wait.
        first: those whose turn comes first, each with why it waits.
        shapes: the shapes whose turn comes first.
        shape_count: how many shapes there are.
        reservation: what is kept for one of them.
    """

    count: int
    first: Iterable[tuple[TaskRecord, str]]
    shapes: Iterable[ShapeStatus]
    shape_count: int
    reservation: ReservationStatus | None = None
    clients: tuple[ClientStatus, ...] = ()
    placements: tuple[PlacementStatus, ...] = ()
    outages: tuple[OutageStatus, ...] = ()


def snapshot(
    node: Node,
    pids: Mapping[int, int],
    now: float,
    observed: Observations = NOTHING,
    programs: Mapping[int, Program] = NOBODY,
) -> NodeStatus:
    """Picture a node.

    Args:
        node: the node.
        pids: the process id of each live worker.
        now: the time.
        observed: what was last seen on its devices.
        programs: who its clients are, by their numbers.
    """
    queue = _queue_of(node, now, pids, programs)
    return picture(
        *(node.ledger, node.workers, queue, pids, now),
        granted=node.granted,
        observed=observed,
    )


def picture(
    ledger: Ledger,
    workers: Iterable[WorkerRecord],
    queue: Queue,
    pids: Mapping[int, int],
    now: float,
    *,
    granted: Mapping[WorkerId, WorkerRecord] = NO_LEASES,
    observed: Observations = NOTHING,
) -> NodeStatus:
    """Picture what has a ledger, workers, leases and a queue."""
    workers = list(workers)
    holders = [*workers, *granted.values()]
    numbers = _Numbers()
    held = [(record, holder) for holder in holders for record in _tasks_of(holder)]
    held.sort(key=lambda pair: pair[0].id)
    tasks = [
        _task(record, numbers, why_not_running(record, holder, pids), pids)
        for record, holder in held
    ]
    tasks += [_task(record, numbers, reason, pids) for record, reason in queue.first]
    holdings = Holdings(holders, pids, now, observed)
    return NodeStatus(
        total=ledger.totals(),
        available=ledger.available(),
        devices=tuple(
            status
            for devices in ledger.device_sets.values()
            for status in holdings.of_devices(devices, devices.mask_of_type(None))
        ),
        workers=tuple(_worker(record, pids) for record in workers),
        tasks=tuple(tasks),
        waiting_count=queue.count,
        shapes=tuple(queue.shapes),
        shape_count=queue.shape_count,
        reservation=queue.reservation,
        clients=queue.clients,
        placements=queue.placements,
        outages=queue.outages,
    )


def _queue_of(
    node: Node,
    now: float,
    pids: Mapping[int, int],
    programs: Mapping[int, Program],
) -> Queue:
    ready, reasons = node.ready, _Reasons(node, now)
    held = [record for holder in node.holders for record in _tasks_of(holder)]
    return Queue(
        count=len(node.tasks) - len(held),
        first=[
            *((one, reasons.of(one)) for one in islice(ready.in_turn(), LISTED)),
            *((one, DELAYED) for one in islice(node.delayed.values(), LISTED)),
            *((node.tasks[id_], EXPECTING) for id_ in islice(node.expecting, LISTED)),
        ],
        shapes=[
            shape_status(head, bucket.size, now - bucket.oldest(), reasons.of(head))
            for head, bucket in islice(ready.heads_in_turn(), LISTED)
        ],
        shape_count=len(ready.by_shape),
        reservation=describe(node, node.reservation, now),
        clients=clients_seen(node.clients, held, programs),
        placements=tuple(
            placement_status(
                *(gang.record, node.ledger, len(gang.living), pids),
                reasons.of(gang.record) if gang.record.worker is None else "",
            )
            for gang in node.gangs.values()
        ),
        outages=find_outages(node, now),
    )


class _Reasons:
    """Why tasks wait; said once for all that ask for the same."""

    def __init__(self, node: Node, now: float) -> None:
        self._node = node
        self._now = now
        self._known: dict[tuple[int, Shape, Reservation | None], str] = {}

    def of(self, record: TaskRecord) -> str:
        # Environments matter only where workers cannot be started for some of them.
        shape = record.spec.shape
        if not self._node.outages and shape.environment:
            shape = Shape(shape.request)
        key = record.client, shape, rival_of(self._node, record)
        reason = self._known.get(key)
        if reason is None:
            reason = self._known[key] = why_waiting(self._node, record, self._now)
        return reason


class _Numbers(dict[Request, Mapping[str, float]]):
    """Requests in the user's terms, each written once."""

    def __missing__(self, request: Request) -> Mapping[str, float]:
        numbers = self[request] = request.as_numbers()
        return numbers


def _tasks_of(worker: WorkerRecord) -> list[TaskRecord]:
    return [worker.task, *worker.queue] if worker.task is not None else []


def _task(
    record: TaskRecord,
    numbers: _Numbers,
    reason: str | None,
    pids: Mapping[int, int],
) -> TaskStatus:
    held = numbers[record.spec.shape.request]
    worker, is_lease = record.worker, record.spec.is_lease
    lease = worker.lease if worker else None
    if lease is not None and lease.is_lent and record.spec.is_endless:
        held = {name: amount for name, amount in held.items() if name != CPU}
    return TaskStatus(
        *(record.id, record.spec.name, record.state.value),
        held,
        worker.id if worker and not is_lease else None,
        reason,
        record.client,
        is_lease,
        pids.get(worker.id, 0) if worker else 0,
    )


def _worker(record: WorkerRecord, pids: Mapping[int, int]) -> WorkerStatus:
    task = record.task.spec.name if record.task else None
    return WorkerStatus(record.id, pids.get(record.id, 0), record.state.value, task)
