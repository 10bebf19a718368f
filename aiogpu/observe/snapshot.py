"""Makes a `NodeStatus`, and a `Why`, from the state of the scheduler.

Changes nothing. The cost of a status grows with the workers and devices, not with the
waiting tasks, of which there may be a million: only the first tasks, and each shape
once, are examined. Shortages are found by the rules by which `SchedulerState.take`
refuses a lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice, takewhile
from math import inf
from typing import Any, Final

from aiogpu.core.model.ids import OWN, PROGRAM, ClientId, is_of_program
from aiogpu.core.model.request import (
    BundleRef,
    Environment,
    PlacementGroupSpec,
    Request,
    Shape,
)
from aiogpu.core.model.text import SHOWN
from aiogpu.core.model.units import CPU, GPU, GPU_MEMORY, number
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.devices import DeviceSet, Share
from aiogpu.core.resources.ledger import BundleLedger, Lease, Ledger
from aiogpu.core.resources.topology import indices
from aiogpu.core.scheduler.shortage import (
    Lack,
    find_bound,
    find_lacks,
    is_held_endlessly,
    ledger_for,
    rival_of,
)
from aiogpu.core.scheduler.state import (
    Outage,
    Reservation,
    SchedulerState,
    awaited_results,
)
from aiogpu.observe.status import (
    ALL_ENDED,
    NOBODY,
    NOTHING,
    THE_NODES,
    UNSEEN,
    BundleStatus,
    ClientStatus,
    DeviceStatus,
    EndedTask,
    Holder,
    NodeStatus,
    Observations,
    OutageStatus,
    PlacementStatus,
    Program,
    ReservationStatus,
    ShapeStatus,
    TaskStatus,
    UnendedStatus,
    WorkerStatus,
    name_and_pid,
)
from aiogpu.observe.why import Shortage, Why, brief, stall_in_words

LISTED: Final = 100
"""The most waiting tasks, and the most shapes, that a status lists."""
EXAMINED: Final = 100
"""The most tasks, in the order of turns, among which `why` looks for rivals."""
GROUP_STATES: Final = {TaskState.RUNNING: "ready", TaskState.STOPPING: "removing"}


def snapshot(
    node: SchedulerState,
    pids: Mapping[int, int],
    now: float,
    observed: Observations = NOTHING,
    programs: Mapping[int, Program] = NOBODY,
    unended: Mapping[int, UnendedStatus] = ALL_ENDED,
) -> NodeStatus:
    """Return the status of a node.

    Args:
        node: the scheduler's state.
        pids: the process id of each live worker.
        now: the time.
        observed: the last readings of the devices.
        programs: the clients, by number.
        unended: the processes that have not ended with their worker or lease, by its
            id.
    """
    ready, reasons = node.ready, _Reasons(node, now)
    holders = list(node.holders)
    numbers = cache(Request.as_numbers)
    held = [(record, holder) for holder in holders for record in _tasks_of(holder)]
    held.sort(key=lambda pair: pair[0].id)
    first = [
        *islice(ready.in_turn(), LISTED),
        *islice(node.delayed.values(), LISTED),
        *(node.tasks[id_] for id_ in islice(node.expecting, LISTED)),
    ]
    holdings = Holdings(holders, pids, now, observed, unended)
    tasks = []
    # One line for all tasks of a worker in one state: 60 may be in its queue.
    held_reasons: dict[tuple[int, TaskState], str | None] = {}
    for record, holder in held:
        key = holder.id, record.state
        if record.state is not TaskState.RUNNING and key not in held_reasons:
            held_reasons[key] = brief(_on_worker(record, holder, holdings))
        tasks.append(_task(record, numbers, held_reasons.get(key), pids))
    tasks += [_task(record, numbers, reasons.of(record), pids) for record in first]
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
        waiting_count=len(node.tasks) - len(held) - len(node.evicted),
        shapes=tuple(_shapes(node, reasons)),
        shape_count=len(ready.by_shape),
        reservation=_reservation(node, node.reservation, now),
        clients=tuple(_clients(node, (record for record, _ in held), programs)),
        placements=tuple(
            _placement(group.record, node, len(group.living), pids, reasons)
            for group in node.placement_groups.values()
        ),
        outages=_outages(node, now),
        unended=tuple(unended.values()),
    )


class _Reasons:
    """Reasons for waiting, one line each; cached for equal requests."""

    def __init__(self, node: SchedulerState, now: float) -> None:
        self._node = node
        self.now = now
        # Without workers: one line has no room for the holders.
        self._holdings = Holdings((), {}, now)
        self._cache: dict[tuple[int, Shape, Reservation | None], str | None] = {}

    def of(self, record: TaskRecord) -> str | None:
        if record.state is not TaskState.WAITING:
            return brief(_why(record, self._holdings.now))
        # Environments matter only if workers cannot be started for some of them.
        shape = record.spec.shape
        if not self._node.outages and shape.environment:
            shape = Shape(shape.request)
        key = record.client, shape, rival_of(self._node, record)
        if key not in self._cache:
            lacks = list(find_lacks(self._node, record))
            waits = _waits(self._node, record, lacks, self._holdings)
            self._cache[key] = brief(waits)
        return self._cache[key]


def reasons_of(
    node: SchedulerState,
    records: Iterable[TaskRecord],
    pids: Mapping[int, int],
    now: float,
) -> list[str]:
    """Return, for each of some unfinished tasks, why its code does not run, or ""."""
    reasons, holdings = _Reasons(node, now), Holdings((), pids, now)

    def reason_of(record: TaskRecord) -> str | None:
        if record.worker is None:
            return reasons.of(record)
        return brief(_on_worker(record, record.worker, holdings))

    return [reason_of(record) or "" for record in records]


def held_records(node: SchedulerState) -> list[TaskRecord]:
    """Return the tasks that have a worker, and the held leases, by number."""
    held = [record for holder in node.holders for record in _tasks_of(holder)]
    return sorted(held, key=lambda record: record.id)


def _tasks_of(worker: WorkerRecord) -> list[TaskRecord]:
    return [worker.task, *worker.queue] if worker.task is not None else []


def _task(
    record: TaskRecord,
    numbers: Callable[[Request], Mapping[str, float]],
    reason: str | None,
    pids: Mapping[int, int],
) -> TaskStatus:
    held = numbers(record.spec.shape.request)
    worker, is_lease = record.worker, record.spec.is_lease
    lease = worker.lease if worker else None
    if lease is not None and lease.is_lent and record.spec.is_endless:
        held = {name: amount for name, amount in held.items() if name != CPU}
    return TaskStatus(
        id=record.id,
        name=record.spec.name,
        state=record.state.value,
        request=held,
        worker=worker.id if worker and not is_lease else None,
        reason=reason,
        client=record.client,
        is_lease=is_lease,
        pid=pids.get(worker.id, 0) if worker else 0,
    )


def _worker(record: WorkerRecord, pids: Mapping[int, int]) -> WorkerStatus:
    task = record.task.spec.name if record.task else None
    return WorkerStatus(record.id, pids.get(record.id, 0), record.state.value, task)


def _clients(
    node: SchedulerState,
    held: Iterable[TaskRecord],
    programs: Mapping[int, Program],
) -> Iterator[ClientStatus]:
    """Yield the programs that share a node, by number; none if only one uses it."""
    running = Counter(record.client for record in held)
    evicted = Counter(record.client for record in node.evicted.values())
    known = {OWN: Program(THE_NODES, 0), **programs}
    for client in sorted(node.clients or (), key=lambda client: client.id):
        if client.id != OWN or client.unfinished or client.held:
            amounts = sorted(client.held.items())
            yield ClientStatus(
                client.id,
                *known.get(client.id, Program("", 0)),
                weight=client.weight,
                running=running[client.id],
                waiting=client.unfinished - running[client.id] - evicted[client.id],
                holds={name: number(parts) for name, parts in amounts},
                limits=client.limits,
                has_left=client.has_left,
            )


def _shapes(node: SchedulerState, reasons: _Reasons) -> Iterator[ShapeStatus]:
    """Yield the waiting tasks by program and shape, in the order of their turns."""
    firsts: dict[tuple[ClientId, Shape], TaskRecord] = {}
    for head, bucket in node.ready.heads_in_turn():
        firsts.setdefault((head.client, bucket.shape), head)
        if len(firsts) == LISTED:
            break
    for (client, shape), first in firsts.items():
        lanes = node.ready.by_shape[client, shape].values()
        since = min(bucket.head().since for bucket in lanes)
        yield ShapeStatus(
            request=shape.request.as_numbers(),
            gpu_strategy="spread" if shape.request.spread else "pack",
            variables=_shown(shape.environment),
            count=sum(bucket.size for bucket in lanes),
            first=first.spec.name,
            seconds=reasons.now - since,
            reason=reasons.of(first) or "",
            where=str(shape.request.where or ""),
            client=client,
        )


def _placement(
    record: TaskRecord,
    node: SchedulerState,
    members: int,
    pids: Mapping[int, int],
    reasons: _Reasons,
) -> PlacementStatus:
    """Return the status of a placement group, which is a task for the scheduler."""
    group, worker = record.spec.shape.request.placement_group, record.worker
    assert isinstance(group, PlacementGroupSpec), record
    parts = node.ledger.placement_groups.get(group.key)
    asked = [bundle.as_numbers() for bundle in group.bundles]
    if parts is None:
        bundles = [BundleStatus(request, request, {}) for request in asked]
    else:
        bundles = list(map(_granted, parts, asked))
    return PlacementStatus(
        task=record.id,
        name=record.spec.name,
        id=group.key,
        state=GROUP_STATES.get(record.state, TaskState.WAITING.value),
        strategy=group.strategy,
        bundles=tuple(bundles),
        members=members,
        client=record.client,
        pid=pids.get(worker.id, 0) if worker else 0,
        reason=reasons.of(record) if parts is None and worker is None else None,
        is_detached=record.spec.is_detached,
    )


def _granted(part: BundleLedger, request: Mapping[str, float]) -> BundleStatus:
    free = {name: number(max(part.free.get(name, 0), 0)) for name in request}
    devices = {}
    for kind, mask in part.masks.items():
        of_kind = part.device_sets[kind]
        free[kind] = number(sum(of_kind.free))
        if kind == GPU and GPU_MEMORY in request:
            memory = map(of_kind.free_memory, indices(mask))
            free[GPU_MEMORY] = float(sum(memory))
        devices[kind] = tuple(of_kind.devices[index].id for index in indices(mask))
    return BundleStatus(request, free, devices)


class Holdings:
    """The leases of a node's workers at one moment.

    Attributes:
        pids: process ids of the live workers.
        now: the time.
    """

    def __init__(
        self,
        workers: Iterable[WorkerRecord],
        pids: Mapping[int, int],
        now: float,
        observed: Observations = NOTHING,
        unended: Mapping[int, UnendedStatus] = ALL_ENDED,
    ) -> None:
        self.pids = pids
        self.now = now
        self._unended = unended
        self._observed = observed
        self._workers = [worker for worker in workers if worker.lease is not None]

    def of_scalar(self, name: str) -> tuple[Holder, ...]:
        """Return the holders of a resource without devices.

        A blocked task holds no CPU. A placement group holds what its members leave.
        """
        return tuple(
            self._holder(worker, part)
            for worker in self._workers
            if worker.lease and not (worker.lease.is_lent and name == CPU)
            for scalar, part in _scalars_of(worker.lease)
            if scalar == name and (part or not worker.lease.parts)
        )

    def of_devices(self, devices: DeviceSet, mask: int) -> tuple[DeviceStatus, ...]:
        """Return the devices of a mask, each with its holders."""
        holders: list[list[Holder]] = [[] for _ in devices.devices]
        readings = [
            self._observed.get((devices.kind, index), UNSEEN)
            for index in range(len(holders))
        ]
        for worker in self._workers:
            assert worker.lease is not None, worker
            for (index, part), memory in _shares_of(worker.lease, devices):
                reading = readings[index]
                holder = replace(
                    self._holder(worker, part, memory),
                    used=reading.workers.get(worker.id),
                    has_outgrown=worker.id in reading.outgrown,
                )
                holders[index].append(holder)
        aside = devices.availability.aside
        return tuple(
            DeviceStatus(
                kind=devices.kind,
                id=device.id,
                type=device.type,
                uuid=device.uuid,
                name=device.name,
                memory=device.memory,
                free=0.0 if index in aside else number(devices.free[index]),
                holders=tuple(holders[index]),
                aside=aside.get(index),
                is_unverified=index in devices.unverified,
                memory_reserved=devices.memory_reserved(index),
                used=reading.used,
                utilisation=reading.utilisation,
                others=reading.others,
                seen=None if reading is UNSEEN else max(0.0, self.now - reading.seen),
                unknown=reading.unknown,
                temperature=reading.temperature,
                power=reading.power,
            )
            for index, (device, reading) in enumerate(
                zip(devices.devices, readings, strict=True)
            )
            if mask >> index & 1
        )

    def _holder(self, worker: WorkerRecord, part: int, memory: int = 0) -> Holder:
        task, left = worker.task, self._unended.get(worker.id)
        return Holder(
            share=number(part),
            worker=worker.id,
            pid=self.pids.get(worker.id, 0),
            task=None if task is None else task.spec.name,
            seconds=self.seconds_of(worker),
            is_endless=worker.holds_endlessly,
            is_settling=task is None
            and worker.state is WorkerState.SETTLING
            and left is None,
            memory=memory,
            unended="" if left is None else str(left),
            is_ending=task is not None and worker.is_leaving,
            is_evictable=task is not None and task.spec.is_evictable,
        )

    def seconds_of(self, worker: WorkerRecord) -> float | None:
        """Return for how long a worker has run its task; see `Holder.seconds`."""
        # `watched_since`: the task was assigned then, or was first noticed then.
        is_known = worker.task is not None and worker.watched is worker.task
        return self.now - worker.watched_since if is_known else None


def _scalars_of(lease: Lease) -> Iterable[tuple[str, int]]:
    """Yield the scalars of a lease; for a placement group, its free amounts."""
    for name, amount in lease.request.scalars:
        free = (part.free.get(name, 0) for part in lease.parts)
        yield name, max(sum(free), 0) if lease.parts else amount


def _shares_of(lease: Lease, devices: DeviceSet) -> Iterable[tuple[Share, int]]:
    """Yield the shares of devices of a kind, each with the bytes of its memory."""
    for part in lease.parts:
        if of_part := part.device_sets.get(devices.kind):
            for index, free in enumerate(of_part.free):
                if part.masks[devices.kind] >> index & 1:
                    memory = of_part.free_memory(index)
                    if free or memory:
                        yield (index, free), memory
    if not lease.parts:
        sets = lease.home.device_sets
        own = sets.get(devices.kind, devices)
        for kind, share, memory in lease.held():
            if kind == devices.kind:
                yield share, own.memory_of(share, memory)


def why(
    node: SchedulerState,
    record: TaskRecord,
    pids: Mapping[int, int],
    now: float,
    programs: Mapping[int, Program] = NOBODY,
    unended: Mapping[int, UnendedStatus] = ALL_ENDED,
) -> Why:
    """Return why an unfinished task is in its state.

    Args:
        node: the scheduler's state.
        record: the task.
        pids: process ids of the live workers.
        now: the time.
        programs: the clients of the node, by number.
        unended: as for `snapshot`.
    """
    if record.state is TaskState.DELAYED:
        return _why(record, now)
    if record.state is TaskState.EXPECTING:
        needs = awaited_results(node, record)
        return _why(
            record,
            now,
            children=_names(needs),
            count=len(needs),
            placement=_awaited_placement(node, record),
        )
    if record.worker is not None:
        return _on_worker(record, record.worker, Holdings((), pids, now))
    lacks, place = list(find_lacks(node, record)), node.ready.position(record)
    # If programs share the node: which of them go before it.
    count = EXAMINED if node.clients is not None else 0
    before = takewhile(
        lambda other: other is not record, islice(node.ready.in_turn(), count)
    )
    holdings = Holdings(node.holders, pids, now, unended=unended)
    rivals = dict.fromkeys(
        other.client for other in before if other.client != record.client
    )
    return replace(
        _waits(node, record, lacks, holdings),
        position=place[0] + 1,
        of=place[1],
        is_held_endlessly=is_held_endlessly(node, record, lacks),
        rivals=tuple(name_and_pid(id_, programs) for id_ in islice(rivals, SHOWN)),
        rival_count=len(rivals),
        notes=tuple(_other_choices(node, record, holdings)),
    )


def _other_choices(
    node: SchedulerState, record: TaskRecord, holdings: Holdings
) -> Iterator[str]:
    """Yield what the task lacks for each of its other requests."""
    first = record.spec
    for spec in first.alternatives:
        record.spec = spec
        try:
            short = brief(_waits(node, record, [*find_lacks(node, record)], holdings))
        finally:
            record.spec = first
        yield f"or {spec.shape.request}, for which it {short}"


def why_ended(ended: EndedTask) -> Why:
    """Return the `Why` of a task that has ended."""
    return Why(
        name=ended.name,
        task=ended.task,
        state=TaskState.ENDED.value,
        seconds=ended.seconds + (ended.ran or 0.0) + ended.waited,
        request=ended.request,
        ended=ended,
    )


def stall_warning(node: SchedulerState, record: TaskRecord, now: float) -> str:
    """Return the warning for a task that waits for resources held without end."""
    return stall_in_words(why(node, record, {}, now))


def _why(record: TaskRecord, now: float, **more: Any) -> Why:
    return Why(
        name=record.spec.name,
        task=record.id,
        state=record.state.value,
        seconds=now - record.since,
        request=record.spec.shape.request.as_numbers(),
        **more,
    )


def _waits(
    node: SchedulerState, record: TaskRecord, lacks: list[Lack], holdings: Holdings
) -> Why:
    """Return what a queued task waits for, without its place in the queue."""
    clients, within = node.clients, record.spec.shape.request.placement_group
    outage = _outage(node, record.spec.shape.environment, holdings.now)
    # The reservation for this task, or for another that needs what this one lacks.
    reservation = node.reservation
    if reservation is not None and reservation.record is not record:
        reservation = reservation if any(lack.is_claimed for lack in lacks) else None
    return _why(
        record,
        holdings.now,
        where=str(record.spec.shape.request.where or ""),
        reasons=tuple(_shortages(ledger_for(node, record), lacks, holdings)),
        bound=0 if lacks else find_bound(node),
        is_held_up=node.exclusive.bars(record),
        reservation=_reservation(node, reservation, holdings.now),
        placement=_awaited_placement(node, record),
        bundle=str(within) if isinstance(within, BundleRef) else "",
        outage=None if record.spec.is_lease else outage,
        limit=clients.why_barred(record) if clients is not None else "",
        is_behind=clients is not None and clients.of(record.client).is_behind,
    )


def _shortages(
    ledger: Ledger, lacks: Iterable[Lack], holdings: Holdings
) -> Iterator[Shortage]:
    """Yield the shortages of a waiting task, each with its holders."""
    for lack in lacks:
        devices: tuple[DeviceStatus, ...] = ()
        if lack.mask:
            devices = holdings.of_devices(ledger.device_sets[lack.kind], lack.mask)
            holders = tuple(holder for device in devices for holder in device.holders)
            total = float(len(devices))
            if lack.name == GPU_MEMORY:
                total = float(sum(device.memory for device in devices))
        else:
            holders = holdings.of_scalar(lack.name)
            total = number(ledger.capacity[lack.name])
        yield Shortage(
            resource=lack.name,
            asked=number(lack.asked),
            free=number(lack.free),
            total=total,
            kept=number(lack.kept),
            devices=devices,
            holders=holders,
        )


def _on_worker(record: TaskRecord, worker: WorkerRecord, holdings: Holdings) -> Why:
    before: list[TaskRecord] = []
    if record is not worker.task and worker.task is not None:
        ahead = takewhile(lambda other: other is not record, worker.queue)
        before = [worker.task, *ahead]
    waits_for = record.kin.waits_for.values() if record.kin else ()
    return _why(
        record,
        holdings.now,
        worker=None if record.spec.is_lease else worker.id,
        pid=holdings.pids.get(worker.id, 0),
        runs_for=holdings.seconds_of(worker) if record is worker.task else None,
        behind=_names(before),
        children=_names(waits_for),
        count=len(before) + len(waits_for),
        is_lease=record.spec.is_lease,
    )


def _names(records: Iterable[TaskRecord]) -> tuple[str, ...]:
    return tuple(record.spec.name for record in islice(records, SHOWN))


def _awaited_placement(node: SchedulerState, record: TaskRecord) -> str:
    """Return the name of a task's placement group if it is not granted yet, else ""."""
    within = record.spec.shape.request.placement_group
    if isinstance(within, BundleRef) and within.key not in node.ledger.placement_groups:
        return within.name
    return ""


def _reservation(
    node: SchedulerState, reservation: Reservation | None, now: float
) -> ReservationStatus | None:
    """Convert a reservation to the user's units."""
    if reservation is None:
        return None
    record, devices = reservation.record, {}
    for kind, mask in reservation.barred.items():
        of_kind = node.ledger.device_sets[kind].devices
        devices[kind] = tuple(of_kind[index].id for index in indices(mask))
    return ReservationStatus(
        task=record.id,
        name=record.spec.name,
        devices=devices,
        amounts={name: number(parts) for name, parts in reservation.kept.items()},
        seconds=None if reservation.until == inf else max(reservation.until - now, 0.0),
    )


def _outages(node: SchedulerState, now: float) -> tuple[OutageStatus, ...]:
    """Return every outage, that is a reason why workers cannot be started."""
    everywhere = _crowding(node, now)
    return (
        *((everywhere,) if everywhere is not None else ()),
        *(_outage_status(*pair, now) for pair in node.outages.items()),
    )


def _outage(
    node: SchedulerState, environment: Environment, now: float
) -> OutageStatus | None:
    """Return the outage that affects an environment, or None."""
    outage = node.outages.get(environment)
    if outage is not None:
        return _outage_status(environment, outage, now)
    return _crowding(node, now)


def _shown(environment: Environment) -> tuple[str, ...]:
    """Return the names of the user's variables."""
    return tuple(name for name, _ in environment if not is_of_program(name))


def _outage_status(
    environment: Environment, outage: Outage, now: float
) -> OutageStatus:
    return OutageStatus(
        outage.reason,
        outage.failures,
        now - outage.since,
        max(outage.retry_at - now, 0.0) if outage.is_paused else 0.0,
        _shown(environment),
        any(name == PROGRAM for name, _ in environment),
    )


def _crowding(node: SchedulerState, now: float) -> OutageStatus | None:
    """Return the lack of descriptors or processes, an outage for all environments.

    None if there are workers: then tasks wait for these.
    """
    limit = node.worker_limit
    if not limit.failures or not limit.reason:
        return None
    if any(worker.state is not WorkerState.STARTING for worker in node.workers):
        return None
    retry_in = max(limit.retry_at - now, 0.0)
    return OutageStatus(limit.reason, limit.failures, now - limit.since, retry_in)
