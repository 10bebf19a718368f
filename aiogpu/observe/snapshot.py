"""Makes a `NodeStatus` of the scheduler's state.

It costs as much as there are workers and devices. Of the tasks that wait, of which
there may be a million, only the first are looked at, and each shape once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from aiogpu.core.model.ids import OWN, PROGRAM
from aiogpu.core.model.request import PlacementGroupSpec, Request, Shape
from aiogpu.core.model.units import CPU, GPU, GPU_MEMORY, number
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord
from aiogpu.core.resources.ledger import BundleLedger
from aiogpu.core.resources.topology import indices
from aiogpu.core.scheduler.shortage import rival_of
from aiogpu.core.scheduler.state import Reservation, SchedulerState
from aiogpu.observe.status import (
    NOBODY,
    NOTHING,
    THE_NODES,
    BundleStatus,
    ClientStatus,
    Holdings,
    NodeStatus,
    Observations,
    PlacementStatus,
    Program,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
)
from aiogpu.observe.why import describe, find_outages, wait_in_words, why_not_running

DELAYED: Final = "has failed before, and is tried again in a while"


EXPECTING: Final = "waits for results that are its arguments"


GROUP_STATES: Final = {TaskState.RUNNING: "ready", TaskState.STOPPING: "removing"}


LISTED: Final = 100
"""Waiting tasks, and shapes, that a picture shows one by one."""


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
    ready, reasons = node.ready, _Reasons(node, now)
    holders = list(node.holders)
    numbers = _Numbers()
    held = [(record, holder) for holder in holders for record in _tasks_of(holder)]
    held.sort(key=lambda pair: pair[0].id)
    first = [
        *((one, reasons.of(one)) for one in islice(ready.in_turn(), LISTED)),
        *((one, DELAYED) for one in islice(node.delayed.values(), LISTED)),
        *((node.tasks[id_], EXPECTING) for id_ in islice(node.expecting, LISTED)),
    ]
    tasks = [
        _task(record, numbers, why_not_running(record, holder, pids), pids)
        for record, holder in held
    ]
    tasks += [_task(record, numbers, reason, pids) for record, reason in first]
    holdings = Holdings(holders, pids, now, observed)
    return NodeStatus(
        total=node.ledger.totals(),
        available=node.ledger.available(),
        devices=tuple(
            status
            for devices in node.ledger.device_sets.values()
            for status in holdings.of_devices(devices, devices.mask_of_type(None))
        ),
        workers=tuple(_worker(record, pids) for record in node.workers),
        tasks=tuple(tasks),
        waiting_count=len(node.tasks) - len(held),
        shapes=tuple(
            _shape(head, bucket.size, now - bucket.oldest(), reasons.of(head))
            for head, bucket in islice(ready.heads_in_turn(), LISTED)
        ),
        shape_count=len(ready.by_shape),
        reservation=describe(node, node.reservation, now),
        clients=tuple(_clients(node, (record for record, _ in held), programs)),
        placements=tuple(
            _placement(group.record, node, len(group.living), pids, reasons)
            for group in node.placement_groups.values()
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


def _clients(
    node: SchedulerState,
    held: Iterable[TaskRecord],
    programs: Mapping[int, Program],
) -> Iterator[ClientStatus]:
    """All programs that share a node, by number; none where it is one's alone."""
    running = Counter(record.client for record in held)
    known = {OWN: Program(THE_NODES, 0), **programs}
    for one in sorted(node.clients or (), key=lambda one: one.id):
        if one.id != OWN or one.unfinished or one.held:
            yield ClientStatus(
                one.id,
                *known.get(one.id, Program("", 0)),
                weight=one.weight,
                running=running[one.id],
                waiting=one.unfinished - running[one.id],
                holds={name: number(parts) for name, parts in sorted(one.held.items())},
                limits=one.limits,
                has_left=one.has_left,
            )


def _shape(first: TaskRecord, count: int, seconds: float, reason: str) -> ShapeStatus:
    """The waiting tasks of one shape, of which one is the first."""
    request, environment = first.spec.shape.request, first.spec.shape.environment
    return ShapeStatus(
        request=request.as_numbers(),
        strategy="spread" if request.spread else "pack",
        variables=tuple(name for name, _ in environment if name != PROGRAM),
        count=count,
        first=first.spec.name,
        seconds=seconds,
        reason=reason,
        where=str(request.where or ""),
        client=first.client,
    )


def _placement(
    record: TaskRecord,
    node: SchedulerState,
    members: int,
    pids: Mapping[int, int],
    reasons: _Reasons,
) -> PlacementStatus:
    """A placement group, as the queue has it, with so many members."""
    group, worker = record.spec.shape.request.placement_group, record.worker
    assert isinstance(group, PlacementGroupSpec), record
    parts = node.ledger.placement_groups.get(group.key)
    asked = [bundle.request().as_numbers() for bundle in group.bundles]
    if parts is None:
        bundles = [BundleStatus(one, one, {}) for one in asked]
    else:
        bundles = list(map(_granted, parts, asked))
    return PlacementStatus(
        *(record.id, record.spec.name, group.key),
        GROUP_STATES.get(record.state, TaskState.WAITING.value),
        group.strategy,
        tuple(bundles),
        members,
        record.client,
        pids.get(worker.id, 0) if worker else 0,
        reasons.of(record) if parts is None and worker is None else None,
        record.spec.is_detached,
    )


def _granted(part: BundleLedger, request: Mapping[str, float]) -> BundleStatus:
    free = {name: number(max(part.free.get(name, 0), 0)) for name in request}
    devices = {}
    for kind, mask in part.masks.items():
        of_kind = part.device_sets[kind]
        free[kind] = number(sum(of_kind.free))
        if kind == GPU and GPU_MEMORY in request:
            memory = map(of_kind.filling.free_memory, indices(mask))
            free[GPU_MEMORY] = float(sum(memory))
        devices[kind] = tuple(of_kind.devices[at].id for at in indices(mask))
    return BundleStatus(request, free, devices)
