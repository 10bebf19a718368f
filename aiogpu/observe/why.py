"""Why a task is where it is: what it waits for, who holds that, whose turn it is.

Nothing is changed by asking. It costs as much as there are workers, and next to nothing
for each task that waits. Shortages are found in the ledger in the way in which
`SchedulerState.take` refuses a lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.model.request import BundleRef
from aiogpu.core.model.text import SHOWN, listing, span, terms
from aiogpu.core.model.units import GPU_MEMORY, number, spoken, written
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
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
    NOBODY,
    DeviceStatus,
    Holder,
    Holdings,
    OutageStatus,
    Program,
    ReservationStatus,
    name_of,
)

if TYPE_CHECKING:
    from aiogpu.core.model.request import Environment


def find_outage(
    node: SchedulerState, environment: Environment, now: float
) -> OutageStatus | None:
    """Why a task of this environment gets no worker; None if that is not the cause."""
    outage = node.outages.get(environment)
    if outage is not None:
        return _outage_status(environment, outage, now)
    return _crowding(node, now)


def find_outages(node: SchedulerState, now: float) -> tuple[OutageStatus, ...]:
    """All of them."""
    everywhere = _crowding(node, now)
    return (
        *((everywhere,) if everywhere is not None else ()),
        *(_outage_status(*pair, now) for pair in node.outages.items()),
    )


def _outage_status(
    environment: Environment, outage: Outage, now: float
) -> OutageStatus:
    return OutageStatus(
        outage.reason,
        outage.failures,
        now - outage.since,
        max(outage.retry_at - now, 0.0) if outage.is_paused else 0.0,
        tuple(name for name, _ in environment if name != PROGRAM),
        any(name == PROGRAM for name, _ in environment),
    )


def _crowding(node: SchedulerState, now: float) -> OutageStatus | None:
    """Of descriptors or processes, which concerns all environments.

    Where there are workers, tasks wait for these instead.
    """
    room = node.worker_limit
    if not room.failures or not room.reason:
        return None
    if any(worker.state is not WorkerState.STARTING for worker in node.workers):
        return None
    return OutageStatus(
        room.reason, room.failures, now - room.since, max(room.retry_at - now, 0.0)
    )


def why_not_running(
    record: TaskRecord, worker: WorkerRecord, pids: Mapping[int, int]
) -> str | None:
    """In one line what it waits for; None where its code may run."""
    if record.spec.is_lease and record.state is TaskState.STOPPING:
        return "is given back; processes that it was for have not ended yet"
    if record.state is TaskState.STARTING:
        return "a worker is being forked for it"
    if record.state is TaskState.QUEUED:
        before = worker.task.spec.name if worker.task else ""
        return f"sent ahead to pid {pids.get(worker.id, 0)}, behind {before}"
    if record.state is TaskState.BLOCKED and record.kin is not None:
        children = record.kin.waits_for.values()
        if not children:
            return "waits for an actor"
        names = (child.spec.name for child in children)
        return f"waits for its children: {listing(names, len(children))}"
    return None


READING: Final = "its program to read the results that it was sent"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource of which a task cannot get now what it asks for.

    Attributes:
        resource: its name, "CPU" or "GPU"; "gpu_memory" where there are shares enough
            of GPUs, but not with so much memory. All of that is in bytes.
        asked: how much the task asks for; below 1, a share of one device. Of memory,
            the most that it takes of a device.
        free: how much nobody holds; of devices, the sum of the free shares of
            those that the task may use.
        total: how much there is, of devices those that the task may use.
        kept: how much of what is free is kept for another task.
        devices: the devices that the task may use, each with its free share and its
            holders; empty for a resource that is not made of devices.
        holders: who holds the rest.
    """

    resource: str
    asked: float
    free: float
    total: float
    kept: float
    devices: tuple[DeviceStatus, ...]
    holders: tuple[Holder, ...]


def _told(devices: DeviceSet, index: int, name: str) -> str:
    if index in devices.availability.aside:
        return "set aside"
    if name == GPU_MEMORY:
        return written(name, devices.filling.free_memory(index))
    return f"{number(devices.free[index]):g}"


def find_shortages(
    ledger: Ledger, lacks: Iterable[Lack], holdings: Holdings
) -> Iterator[Shortage]:
    """What a waiting task lacks, each with its holders."""
    for lack in lacks:
        devices: tuple[DeviceStatus, ...] = ()
        if lack.mask:
            devices = holdings.of_devices(ledger.device_sets[lack.kind], lack.mask)
            holders = tuple(one for device in devices for one in device.holders)
            total = float(len(devices))
            if lack.name == GPU_MEMORY:
                total = float(sum(device.memory for device in devices))
        else:
            holders = holdings.of_scalar(lack.name)
            total = number(ledger.capacity[lack.name])
        yield Shortage(
            *(lack.name, number(lack.asked), number(lack.free), total),
            *(number(lack.kept), devices, holders),
        )


def wait_in_words(node: SchedulerState, record: TaskRecord, now: float) -> str:
    """In one line what a waiting task waits for."""
    if node.exclusive.bars(record):
        return "waits until another has run alone, for which memory ran out before"
    if node.clients is not None and node.clients.of(record.client).is_behind:
        return f"waits for {READING}"
    if node.clients is not None and (limit := node.clients.why_barred(record)):
        return f"waits for its program's own limit: it holds {limit}"
    outage = find_outage(node, record.spec.shape.environment, now)
    if outage is not None and not record.spec.is_lease:
        return str(outage)
    if lacks := tell_lacks(node, record):
        within = record.spec.shape.request.placement_group
        return lacks + (f" in {within}" if isinstance(within, BundleRef) else "")
    if placement := awaited_gang(node, record):
        return f"waits for {placement}, its placement"
    if most := find_bound(node):
        return f"waits for a worker: there are {most}, and no room for more"
    return "waits for its turn"


def tell_lacks(node: SchedulerState, record: TaskRecord) -> str:
    """In one line for which resources it waits, empty if it lacks none."""
    rival = rival_of(node, record)
    short = []
    for lack in find_lacks(node, record):
        told = f"free: {written(lack.name, number(lack.free))}"
        if lack.mask:
            devices = ledger_for(node, record).device_sets[lack.kind]
            shares = (
                f"{devices.devices[index].id}: {_told(devices, index, lack.name)}"
                for index in indices(lack.mask)
            )
            told = f"free by device: {listing(shares, lack.mask.bit_count())}"
        if rival and lack.kept:
            told += f"; kept for {rival.record.spec.name}"
        asked = written(lack.name, number(lack.asked))
        short.append(f"{spoken(lack.name)} {asked} ({told})")
    return "waits for " + " and ".join(short) if short else ""


def awaited_gang(node: SchedulerState, record: TaskRecord) -> str:
    """The name of its placement group, if that is not granted yet; empty otherwise."""
    within = record.spec.shape.request.placement_group
    if isinstance(within, BundleRef) and within.key not in node.ledger.placement_groups:
        return within.name
    return ""


def describe(
    node: SchedulerState, reservation: Reservation | None, now: float
) -> ReservationStatus | None:
    """A reservation in the user's terms."""
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


LOOKED_AT: Final = 100
"""Tasks in the order of turns among which a task's rivals are looked for."""


@dataclass(frozen=True, slots=True)
class Why:
    """Why a task waits, or what it does instead. `str()` tells it in words.

    Attributes:
        name: the task's name.
        task: its number; 0 while its node is opening.
        state: "opening" (the node is), "waiting", "starting" (its worker is being
            forked), "queued" (sent ahead to a worker that runs another), "running",
            "blocked" (it waits for tasks that it has started), "delayed" (it has
            failed and is tried again soon), "expecting" (results of others are its
            arguments, and not there yet), "sent" (to a cluster that does not tell
            whether it runs), "stopping" or "ended".
        seconds: since it was submitted; None where the node was not asked.
        request: what it asks for, `{"CPU": 1.0, "GPU": 0.5}`.
        position: its place among those of its program that wait for the same, 1 for
            the first;
            beyond some thousands, those that left before it may still count. None
            unless it waits.
        of: how many of its program wait for the same.
        rivals: names of other programs whose tasks go before it, at most eight.
        rival_count: how many such programs there are.
        limit: what its program holds of what it may, if that is why it waits:
            "2 of at most 2 GPU".
        is_behind: its program does not read the results that it was sent, so nothing
            more of it is started.
        reasons: for a waiting task, one for each resource that is short.
        reservation: what is kept for it, since it has waited long; or for another,
            where that is why it waits.
        is_held_endlessly: whether it waits for what others hold without end; then
            nothing is kept for it, however long it waits.
        bound: how many workers there are, if it lacks nothing else and there may be no
            more of them; `aiogpu doctor` says what bounds them. 0 otherwise.
        is_held_up: whether it waits so that another can run alone, for which memory
            ran out before.
        worker: id of its worker, None without one.
        pid: process id of its worker or, of a lease, of the program that has asked for
            it; 0 without one or while it starts.
        runs_for: seconds since its code began; None where that is not known.
        behind: names of the tasks that go before it on its worker, the one that
            runs first; at most eight.
        children: names of the tasks that it waits for, or whose results it expects;
            at most eight.
        count: how many there are of `behind` or of `children`.
        is_ahead: whether it is a stream that waits for its consumer, since it is as far
            ahead as it may be.
        outcome: how it has ended, in words: "it was cancelled"; None before.
        where: the conditions on its GPUs in words, while it waits for some.
        is_lease: whether it is a lease, which processes hold that are no workers.
        placement: name of the placement in which it is to run, while that waits.
        notes: what else a cluster tells, a line each.
        outage: why no worker can be started for it, if that is why it waits.
    """

    name: str
    task: int
    state: str
    seconds: float | None = None
    request: Mapping[str, float] = field(default_factory=dict)
    position: int | None = None
    of: int = 0
    reasons: tuple[Shortage, ...] = ()
    reservation: ReservationStatus | None = None
    is_held_endlessly: bool = False
    bound: int = 0
    is_held_up: bool = False
    worker: int | None = None
    pid: int = 0
    runs_for: float | None = None
    behind: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    count: int = 0
    is_ahead: bool = False
    outcome: str | None = None
    where: str = ""
    rivals: tuple[str, ...] = ()
    rival_count: int = 0
    limit: str = ""
    is_behind: bool = False
    is_lease: bool = False
    placement: str = ""
    notes: tuple[str, ...] = ()
    outage: OutageStatus | None = None

    def __str__(self) -> str:
        return explain(self)


def why(
    node: SchedulerState,
    record: TaskRecord,
    pids: Mapping[int, int],
    now: float,
    programs: Mapping[int, Program] = NOBODY,
) -> Why:
    """Say why a task that has not ended is where it is.

    Args:
        node: the node that has it.
        record: the task.
        pids: process ids of the live workers.
        now: the moment for which it is said.
        programs: who the clients of the node are, by their numbers.
    """
    if record.state is TaskState.DELAYED:
        return _why(record, now)
    if record.state is TaskState.EXPECTING:
        needs = awaited_results(node, record)
        return _why(
            *(record, now),
            children=_names(needs),
            count=len(needs),
            placement=awaited_gang(node, record),
        )
    if record.worker is not None:
        return _on_worker(record, record.worker, Holdings((), pids, now))
    return why_waiting(node, record, Holdings(node.holders, pids, now), programs)


def _why(record: TaskRecord, now: float, **more: Any) -> Why:
    return Why(
        *(record.spec.name, record.id, record.state.value, now - record.since),
        record.spec.shape.request.as_numbers(),
        **more,
    )


def why_waiting(
    node: SchedulerState,
    record: TaskRecord,
    holdings: Holdings,
    programs: Mapping[int, Program] = NOBODY,
) -> Why:
    """The same of a task that stands in the queue."""
    bucket, clients = node.ready.bucket_of(record), node.clients
    lacks = list(find_lacks(node, record))
    outage = find_outage(node, record.spec.shape.environment, holdings.now)
    # The reservation for this task, or for one that takes what this one lacks.
    reservation = node.reservation
    if reservation is not None and reservation.record is not record:
        reservation = reservation if any(one.is_claimed for one in lacks) else None
    # Where programs share the node: which of them go before it.
    first = islice(node.ready.in_turn(), LOOKED_AT if clients is not None else 0)
    before = takewhile(lambda other: other is not record, first)
    rivals = dict.fromkeys(
        other.client for other in before if other.client != record.client
    )
    return _why(
        *(record, holdings.now),
        where=str(record.spec.shape.request.where or ""),
        position=bucket.position(record) + 1,
        of=bucket.size,
        reasons=tuple(find_shortages(ledger_for(node, record), lacks, holdings)),
        bound=0 if lacks else find_bound(node),
        is_held_up=node.exclusive.bars(record),
        reservation=describe(node, reservation, holdings.now),
        is_held_endlessly=is_held_endlessly(node, record, lacks),
        placement=awaited_gang(node, record),
        outage=None if record.spec.is_lease else outage,
        rivals=tuple(name_of(id_, programs) for id_ in islice(rivals, SHOWN)),
        rival_count=len(rivals),
        limit=clients.why_barred(record) if clients is not None else "",
        is_behind=clients is not None and clients.of(record.client).is_behind,
    )


def _on_worker(record: TaskRecord, worker: WorkerRecord, holdings: Holdings) -> Why:
    before = _before(record, worker)
    waits_for = record.kin.waits_for.values() if record.kin else ()
    return _why(
        *(record, holdings.now),
        worker=None if record.spec.is_lease else worker.id,
        pid=holdings.pids.get(worker.id, 0),
        runs_for=holdings.seconds_of(worker) if record is worker.task else None,
        behind=_names(before),
        children=_names(waits_for),
        count=len(before) + len(waits_for),
        is_lease=record.spec.is_lease,
    )


def _before(record: TaskRecord, worker: WorkerRecord) -> list[TaskRecord]:
    """Those that go before a task on its worker, the one that runs first."""
    if record is worker.task or worker.task is None:
        return []
    ahead = takewhile(lambda other: other is not record, worker.queue)
    return [worker.task, *ahead]


def _names(records: Iterable[TaskRecord]) -> tuple[str, ...]:
    return tuple(record.spec.name for record in islice(records, SHOWN))


def explain(why: Why) -> str:
    """The whole story, on one line or, of a task that waits, on several."""
    if why.placement:
        return f"{_who(why)} waits for {why.placement}, its placement."
    told = _waiting(why) if why.state == "waiting" else [f"{_who(why)} {_does(why)}."]
    return "\n".join((*told, *(f"  {note}" for note in why.notes)))


def _who(why: Why) -> str:
    return f"{why.name} (task {why.task})" if why.task else why.name


def _does(why: Why) -> str:
    """Return what a task does that does not wait in the queue."""
    request, worker = terms(why.request.items()), f"worker {why.worker} (pid {why.pid})"
    runs = "" if why.runs_for is None else f", for {span(why.runs_for)} now"
    match why.state:
        case "running" if why.is_lease:
            return f"is held by pid {why.pid}{runs}"
        case "stopping" if why.is_lease:
            return (
                f"is given back as soon as its processes have ended, asked for by pid "
                f"{why.pid}{runs}"
            )
        case "sent":
            asks = f"asks for {request} and " if why.request else ""
            return f"{asks}was sent {span(why.seconds or 0.0)} ago"
        case "opening":
            return "waits for its node, which is being opened"
        case "delayed":
            return "has failed before, and is tried again in a while"
        case "starting":
            return f"holds {request}; a worker is being forked for it"
        case "queued":
            before = listing(why.behind, why.count)
            return f"was sent ahead to {worker} and runs after {before}"
        case "running":
            held = ", and waits for its consumer to take items" if why.is_ahead else ""
            return f"runs on {worker}{runs}{held}"
        case "blocked":
            word = "its child" if why.count == 1 else "its children"
            children = f"{word} {listing(why.children, why.count)}"
            awaited = children if why.count else "an actor"
            return f"waits for {awaited}; meanwhile it holds no CPU"
        case "expecting":
            results = listing(why.children, why.count) or "an actor's call"
            return f"waits for its arguments: the result of {results}"
        case "stopping":
            return f"is being stopped; its code on {worker} has not ended yet"
    return f"has ended: {why.outcome}" if why.outcome else "has ended"


def _waiting(why: Why) -> Iterator[str]:
    begin = f"{_who(why)} has waited {span(why.seconds or 0.0)}"
    request = terms(why.request.items()) + (f" of {why.where}" if why.where else "")
    if why.is_held_up:
        yield f"{begin}: another is to run alone first, since memory ran out with it"
        return
    if why.is_behind:
        yield f"{begin} for {READING}"
        return
    if why.limit:
        yield f"{begin} for its program's own limit: it holds {why.limit}"
        return
    if why.outage is not None:
        yield f"{begin} for a worker"
        yield f"  {why.outage}"
        return
    if not why.reasons:
        before = (why.position or 1) - 1
        yield f"{begin} for its turn: {before} before it"
        yield from _rivals(why)
        if why.bound:
            held = ", each held without end" if why.is_held_endlessly else ""
            yield (
                f"  workers: {why.bound}{held}, and no room for more at a time; "
                f"`aiogpu doctor` says what bounds them"
            )
        return
    if why.of > 1:
        yield f"{begin}, as number {why.position} of {why.of} that ask for {request}"
    else:
        yield f"{begin} for {request}"
    yield from _rivals(why)
    for shortage in why.reasons:
        yield f"  {_shortage(shortage)}"
        yield from _aside(shortage.devices)
        pairs = _held(shortage)
        for device, holder in pairs[:SHOWN]:
            yield f"    {_holder(holder, shortage.resource, device)}"
        if len(pairs) > SHOWN:
            yield f"    and {len(pairs) - SHOWN} more"
    yield from _reservation(why)


def _rivals(why: Why) -> Iterator[str]:
    """Return which other programs' tasks go before it."""
    if why.rivals:
        rivals = listing(why.rivals, why.rival_count)
        yield f"  tasks of other programs go before it: {rivals}"


def _aside(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """Which are set aside and why; some reasons have the device's name already."""
    for device in [each for each in devices if each.aside][:SHOWN]:
        name, reason = f"{device.kind} {device.id}: ", device.aside or ""
        yield f"    set aside: {'' if name in reason else name}{reason}"


def _shortage(shortage: Shortage) -> str:
    name = shortage.resource
    told = (
        f"{spoken(name)} {written(name, shortage.asked)}: "
        f"{written(name, shortage.free)} of {written(name, shortage.total)} free"
    )
    if shortage.devices:
        shares = (
            f"{device.id}: {'set aside' if device.aside else _free(device, name)}"
            for device in shortage.devices
        )
        told += f" ({listing(shares, len(shortage.devices))})"
    kept = written(name, shortage.kept)
    return f"{told}, {kept} of it kept" if shortage.kept else told


def _free(device: DeviceStatus, name: str) -> str:
    if name == GPU_MEMORY:
        return written(name, device.memory - device.memory_reserved)
    return f"{device.free:g}"


def _held(shortage: Shortage) -> list[tuple[DeviceStatus | None, Holder]]:
    """Each holder with its device; of what is not made of devices, longest first."""
    if not shortage.devices:
        held = sorted(shortage.holders, key=lambda one: -(one.seconds or 0.0))
        return [(None, holder) for holder in held]
    return [(each, holder) for each in shortage.devices for holder in each.holders]


def _holder(holder: Holder, name: str, device: DeviceStatus | None) -> str:
    """Say who holds how much; the device, where there are some."""
    held = written(name, holder.share)
    if name == GPU_MEMORY or not holder.share:
        held = written(GPU_MEMORY, holder.memory)
    share = held if device is None else f"{held} of {device.kind} {device.id}"
    if holder.is_settling:
        return f"{share}: held by a process that has ended, until its driver agrees"
    where = f"pid {holder.pid}" if holder.pid else "its worker is being forked"
    if holder.task is None:
        return f"{share}: held by a process that is ending ({where})"
    if holder.is_endless:
        where += ", without end"
    elif holder.seconds is not None:
        where += f", for {span(holder.seconds)}"
    return f"{share}: held by {holder.task} ({where})"


def _reservation(why: Why) -> Iterator[str]:
    kept = why.reservation
    if kept is not None and kept.task != why.task:
        yield f"  kept for {kept.name} (task {kept.task}), which goes first: {kept}"
    elif kept is not None:
        soon = "as soon as all of that is free"
        when = soon if kept.seconds is None else f"within {span(kept.seconds)}"
        yield f"  kept for it: {kept}; it begins {when}"
    if why.is_held_endlessly:
        yield (
            "  nothing is kept for it, however long it waits: what it needs is held "
            "without end"
        )


def stall_in_words(why: Why) -> str:
    """The warning that a task waits for what is held without end, and who holds it."""
    waits = f"{_who(why)} has waited {span(why.seconds or 0)}"
    if why.bound:
        return (
            f"{waits} for a worker process: there are {why.bound}, each is held "
            f"without end, and there is no room for more. `aiogpu doctor` says what "
            f"bounds them."
        )
    held = []
    for shortage in why.reasons:
        for device, holder in _held(shortage):
            if holder.is_endless:
                amount = (
                    f"{shortage.resource} {written(shortage.resource, holder.share)}"
                )
                if device is not None:
                    share = written(device.kind, holder.share)
                    amount = f"{share} of {device.kind} {device.id}"
                held.append(f"{holder.task} holds {amount}")
    return (
        f"{waits} for {terms(why.request.items())}, and what it needs is held without "
        f"end: {listing(held, len(held), '; ')}. It can start when a holder ends: an "
        f"actor ends by aiogpu.kill() or with its last handle (a notebook keeps those "
        f"that it has shown, in Out). Or ask for less."
    )
