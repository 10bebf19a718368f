"""Makes a `NodeStatus` of the scheduler's state.

It costs as much as there are workers and devices. Of the tasks that wait, of which
there may be a million, only the first are looked at, and each shape once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.request import Request, Shape
from aiogpu.core.model.units import CPU
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.shortage import rival_of
from aiogpu.core.scheduler.state import Reservation, SchedulerState
from aiogpu.observe.status import (
    NOBODY,
    NOTHING,
    Holdings,
    NodeStatus,
    Observations,
    Program,
    Queue,
    TaskStatus,
    WorkerStatus,
    clients_seen,
    placement_status,
    shape_status,
)
from aiogpu.observe.why import describe, find_outages, wait_in_words, why_not_running

DELAYED: Final = "has failed before, and is tried again in a while"


EXPECTING: Final = "waits for results that are its arguments"


LISTED: Final = 100
"""Waiting tasks, and shapes, that a picture shows one by one."""


NO_LEASES: Final[Mapping[WorkerId, WorkerRecord]] = {}


def snapshot(
    node: SchedulerState,
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
    node: SchedulerState,
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
                *(
                    placement_group.record,
                    node.ledger,
                    len(placement_group.living),
                    pids,
                ),
                reasons.of(placement_group.record)
                if placement_group.record.worker is None
                else "",
            )
            for placement_group in node.placement_groups.values()
        ),
        outages=find_outages(node, now),
    )


class _Reasons:
    """Why tasks wait; said once for all that ask for the same."""

    def __init__(self, node: SchedulerState, now: float) -> None:
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
            reason = self._known[key] = wait_in_words(self._node, record, self._now)
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
