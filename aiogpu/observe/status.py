"""The status of a node: plain data, and how it reads as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from aiogpu.core.model.ids import OWN
from aiogpu.core.model.text import SHOWN, aligned, in_words, listing, rest, span, terms
from aiogpu.core.model.units import CPU, GPU_MEMORY, MEMORY, number, size, written
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.devices import DeviceSet, Share
from aiogpu.core.resources.ledger import Lease

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process on a device that is none of the node's workers, nor below one.

    Attributes:
        pid: its process id, as the driver writes it.
        name: of its program, "" where it cannot be seen from here.
        memory: bytes of device memory that it uses, None where the driver does not
            say.
    """

    pid: int
    name: str = ""
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """One device, when it was last looked at.

    Attributes:
        seen: when that was, by the scheduler's clock.
        used: bytes of its memory in use, by whomever; None where unknown.
        utilisation: percent of the last moments in which something ran on it; None
            where unknown.
        others: processes that are not ours; None where that cannot be told.
        workers: bytes of it that workers use, with all below them, by worker id.
        outgrown: those of them that use more than was reserved for them.
        unknown: what of this could not be learnt and why, None if nothing.
    """

    seen: float
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    workers: Mapping[int, int] = field(default_factory=dict)
    outgrown: frozenset[int] = frozenset()
    unknown: str | None = None


Observations = Mapping[tuple[str, int], Observed]
"""By the device's kind, and its index among those."""


NOTHING: Final[Observations] = {}
UNSEEN: Final = Observed(0.0)
"""Of a device that was never looked at."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One worker's share of a device, or its amount of another resource.

    Attributes:
        share: in whole units: 0.25 of a device, 2.0 CPUs.
        worker: the worker's id.
        pid: its process id, 0 while it starts.
        task: name of the task that it runs, None while it ends after one.
        seconds: for how long it has run that task, None where that is not known;
            short of the truth by a second at most.
        is_endless: whether it holds its share until its owner gives it up.
        is_settling: its processes have ended; whether the device is free of them is
            still to be seen.
        memory: bytes of the device's memory that it has reserved, by name or by its
            share; 0 where unknown, and for what is no GPU.
        used: bytes of the device's memory that it uses with all below it, None where
            that is not known.
        has_outgrown: whether that is more than was reserved for it.
    """

    share: float
    worker: int
    pid: int
    task: str | None
    seconds: float | None = None
    is_endless: bool = False
    is_settling: bool = False
    memory: int = 0
    used: int | None = None
    has_outgrown: bool = False


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: its identity, the free share, who holds the rest.

    Attributes:
        kind: the name of the resource, "GPU".
        id: as tasks see it; an index, or a UUID or MIG id.
        type: the accelerator's type, such as "A100", where it is known.
        uuid: the vendor's unique id, where it is known.
        name: the vendor's name for the product, where it is known.
        memory: bytes of device memory, 0 where unknown.
        free: the share that nobody holds, 1.0 for all of it; 0.0 while it is set aside.
        holders: who holds the rest.
        aside: why it is given to nobody for now, None where it is not set aside.
        is_unverified: whether the last share came back without a word of the driver
            that nothing is left on it, since the driver cannot tell here.
        memory_reserved: bytes of its memory that the holders have reserved together.
        used: bytes of its memory in use, by whomever; None where unknown.
        utilisation: percent of the last moments in which something ran on it; None
            where unknown.
        others: processes on it that are not ours; None where that cannot be told.
        seen: seconds since its driver was asked last, None if it never was: it is
            logical, or its vendor's driver cannot be asked.
        unknown: what of all this could not be learnt and why, None if nothing.
    """

    kind: str
    id: int | str
    type: str | None
    uuid: str | None
    name: str | None
    memory: int
    free: float
    holders: tuple[Holder, ...]
    aside: str | None = None
    is_unverified: bool = False
    memory_reserved: int = 0
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    seen: float | None = None
    unknown: str | None = None


def scalars_of(lease: Lease) -> Iterable[tuple[str, int]]:
    """Undivided resources of a lease; of a placement group's, what members leave."""
    for name, amount in lease.request.scalars:
        free = (part.free.get(name, 0) for part in lease.parts)
        yield name, max(sum(free), 0) if lease.parts else amount


def shares_of(lease: Lease, devices: DeviceSet) -> Iterable[tuple[Share, int]]:
    """The same of devices of a kind, each with the bytes of its memory."""
    for part in lease.parts:
        if of_part := part.device_sets.get(devices.kind):
            for at, free in enumerate(of_part.free):
                if part.masks[devices.kind] >> at & 1:
                    memory = of_part.filling.free_memory(at)
                    if free or memory:
                        yield (at, free), memory
    if not lease.parts:
        sets = lease.home.device_sets if lease.home else {}
        own = sets.get(devices.kind, devices)
        for kind, share, memory in lease.held():
            if kind == devices.kind:
                yield share, own.memory_of(share, memory)


class Holdings:
    """The workers of a node at one moment, asked who holds what.

    Attributes:
        pids: process ids of the live workers.
        now: that moment.
    """

    def __init__(
        self,
        workers: Iterable[WorkerRecord],
        pids: Mapping[int, int],
        now: float,
        observed: Observations = NOTHING,
    ) -> None:
        self.pids = pids
        self.now = now
        self._observed = observed
        self._workers = [worker for worker in workers if worker.lease is not None]

    def of_scalar(self, name: str) -> tuple[Holder, ...]:
        """The holders of an undivided resource; a blocked task holds no CPU.

        A placement group holds what none of its members does.
        """
        return tuple(
            self._holder(worker, part)
            for worker in self._workers
            if worker.lease and not (worker.lease.is_lent and name == CPU)
            for held, part in scalars_of(worker.lease)
            if held == name and (part or not worker.lease.parts)
        )

    def of_devices(self, devices: DeviceSet, mask: int) -> tuple[DeviceStatus, ...]:
        """The devices of a mask, each with its holders."""
        holders: list[list[Holder]] = [[] for _ in devices.devices]
        looks = [
            self._observed.get((devices.kind, index), UNSEEN)
            for index in range(len(holders))
        ]
        for worker in self._workers:
            assert worker.lease is not None, worker
            for (index, part), memory in shares_of(worker.lease, devices):
                look = looks[index]
                holder = replace(
                    self._holder(worker, part, memory),
                    used=look.workers.get(worker.id),
                    has_outgrown=worker.id in look.outgrown,
                )
                holders[index].append(holder)
        aside = devices.availability.aside
        return tuple(
            DeviceStatus(
                *(devices.kind, device.id, device.type, device.uuid, device.name),
                device.memory,
                0.0 if index in aside else number(devices.free[index]),
                tuple(holders[index]),
                aside.get(index),
                index in devices.unverified,
                devices.memory_reserved(index),
                *(look.used, look.utilisation, look.others),
                None if look is UNSEEN else max(0.0, self.now - look.seen),
                look.unknown,
            )
            for index, (device, look) in enumerate(
                zip(devices.devices, looks, strict=True)
            )
            if mask >> index & 1
        )

    def _holder(self, worker: WorkerRecord, part: int, memory: int = 0) -> Holder:
        task = worker.task
        return Holder(
            *(number(part), worker.id, self.pids.get(worker.id, 0)),
            None if task is None else task.spec.name,
            self.seconds_of(worker),
            task is not None and task.spec.is_endless,
            task is None and worker.state is WorkerState.SETTLING,
            memory,
        )

    def seconds_of(self, worker: WorkerRecord) -> float | None:
        """For how long a worker runs its task; see `Holder`."""
        # It is watched since it was given a task, or since it was seen with another.
        is_known = worker.task is not None and worker.watched is worker.task
        return self.now - worker.watched_since if is_known else None


_HOLD_NOTHING: Final = frozenset({TaskState.WAITING.value, TaskState.EXPECTING.value})


@dataclass(frozen=True, slots=True)
class ReservationStatus:
    """What is kept for a task that has long been the first of its line.

    Attributes:
        task: the task's number.
        name: its name.
        devices: ids of the devices kept for it, by kind: `{"GPU": (0, 1)}`.
        amounts: what is kept of other resources: `{"CPU": 2.0}`.
        seconds: from now until it can begin at the latest, None where nobody knows
            (who holds what it needs has no `timeout`).
    """

    task: int
    name: str
    devices: Mapping[str, tuple[int | str, ...]]
    amounts: Mapping[str, float]
    seconds: float | None

    def __str__(self) -> str:
        parts = [
            f"{kind} {listing(map(str, ids), len(ids))}"
            for kind, ids in self.devices.items()
        ]
        parts += [
            f"{name} {written(name, kept)}" for name, kept in self.amounts.items()
        ]
        return in_words(parts)


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
class TaskStatus:
    """One task that has not ended.

    Attributes:
        id: the task's number.
        name: its name.
        state: "waiting", "starting", "queued", "running", "blocked", "delayed",
            "expecting" or "stopping"; `aiogpu.core.records.TaskState` says what each
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
        """True if it has a worker, or is a lease that somebody has."""
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


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """Why no worker can be started, as `status()` and `why()` show it.

    Attributes:
        reason: why the last try failed.
        failures: how many tries in a row have failed.
        seconds: since the first of them.
        retry_in: seconds until the next try; 0 while one is being made, or where
            nothing waits for a worker.
        variables: names of the variables of the `runtime_env` that is concerned; empty
            for that of most tasks, or where all are concerned.
        is_joined: whether it concerns tasks of a program that has joined, and not those
            of the node's own program.
    """

    reason: str
    failures: int
    seconds: float
    retry_in: float
    variables: tuple[str, ...] = ()
    is_joined: bool = False

    def __str__(self) -> str:
        named = ", ".join(self.variables)
        whose = " of a program that has joined" if self.is_joined else ""
        told = whose + (f" with {named}" if named else "")
        told = f" for tasks{told}" if told else ""
        tries = "try has" if self.failures == 1 else "tries have"
        when = f"in {span(self.retry_in)}" if self.retry_in > 0 else "now"
        return (
            f"no worker can be started{told}: {self.reason} ({self.failures} {tries} "
            f"failed in {span(self.seconds)}; next try {when})"
        )


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """An actor that has not ended.

    Attributes:
        id: its number, which is also that of the task that it is to the queue.
        name: under which `aiogpu.get_actor` finds it, None without one.
        namespace: in which that name was given, "" where none was.
        class_name: the name of its class.
        state: "pending" (it waits for its place, or its constructor runs), "alive" or
            "leaving" (it ends after what it was sent).
        holders: how many hold a handle to it.
        worker: id of its worker, None while it has none.
        pid: process id of its worker, 0 without one.
        calls: how many of its calls were not answered yet.
        is_detached: whether it outlives the program that has made it.
        client: the program whose it is, 0 for the node's own.
    """

    id: int
    name: str | None
    namespace: str
    class_name: str
    state: str
    holders: int
    worker: int | None
    pid: int
    calls: int
    is_detached: bool
    client: int = 0


class Program(NamedTuple):
    """Who a client is, as far as the core need not know.

    Attributes:
        name: what it is called by, "train.py".
        pid: its process id.
    """

    name: str
    pid: int


THE_NODES: Final = "the node's own program"


NOBODY: Final[Mapping[int, Program]] = MappingProxyType({})
"""Names of nobody."""


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One of the programs that share a node.

    Attributes:
        id: its number; 0 for the program that the node belongs to, which is among
            them only where it has tasks.
        name: what it is called by; "" where that is not known.
        pid: its process id, 0 where that is not known.
        weight: how much it gets where a program of weight 1 gets 1.
        running: how many of its tasks have a worker, or were sent to one.
        waiting: how many have none.
        holds: what it holds now by resource, `{"CPU": 2.0, "GPU": 0.5}`.
        limits: what it may have.
        has_left: whether its process has gone, and only its tasks are there.
    """

    id: int
    name: str
    pid: int
    weight: float
    running: int
    waiting: int
    holds: Mapping[str, float]
    limits: Limits
    has_left: bool = False


def name_of(client: int, programs: Mapping[int, Program]) -> str:
    """Return what a program is called by."""
    program = programs.get(client)
    if program is not None and program.name:
        return program.name
    return THE_NODES if client == OWN else f"program {client}"


def shown_clients(status: NodeStatus) -> list[ClientStatus]:
    """The programs worth a line: the node's own only if it has tasks."""
    return [
        one for one in status.clients if one.id != OWN or one.running or one.waiting
    ]


def _programs(status: NodeStatus) -> Iterator[str]:
    """Those first that run most; nothing if there is no other than the node's."""
    told = [
        one for one in status.clients if one.id != OWN or one.running or one.waiting
    ]
    if any(one.id != OWN for one in told):
        told.sort(key=lambda one: (-one.running, -one.waiting, one.id))
        yield from _section(
            "programs",
            told,
            lambda one: (
                name_of(one.id, {one.id: Program(one.name, one.pid)}),
                pid_of(one.pid) if one.pid else "",
                f"{one.running} run",
                f"{one.waiting} wait",
                "" if one.weight == 1 else f"weight {one.weight:g}",
                terms(one.holds.items()) if one.holds else "",
                "has left" if one.has_left else "",
            ),
        )


@dataclass(frozen=True, slots=True)
class FailureStatus:
    """A task, or a call of an actor, that has failed for good.

    Attributes:
        task: its number; of a call, the actor's.
        name: its name; of a call, "Model.predict".
        error: the exception's type, "ValueError" or "torch.OutOfMemoryError".
        message: the first line of what it says.
        seconds: for how long its owner has known it.
        client: the program whose it was, 0 for the node's own.
    """

    task: int
    name: str
    error: str
    message: str
    seconds: float
    client: int = 0


@dataclass(frozen=True, slots=True)
class ShapeStatus:
    """The waiting tasks that ask for the same.

    Attributes:
        request: what each of them asks for, `{"CPU": 1.0, "GPU": 0.25}`.
        strategy: "pack" or "spread".
        variables: names of the variables of their `runtime_env`.
        count: how many they are.
        first: name of the one whose turn it is.
        seconds: for how long the oldest of them has waited.
        reason: why the first one waits.
        where: the conditions on their GPUs in words, "memory of 40GiB or more".
        client: the program whose they are, 0 for the node's own.
    """

    request: Mapping[str, float]
    strategy: str
    variables: tuple[str, ...]
    count: int
    first: str
    seconds: float
    reason: str
    where: str = ""
    client: int = 0


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """One bundle.

    Attributes:
        request: what it holds, `{"CPU": 2.0, "GPU": 1.0}`, or will.
        free: what no member has of that; the same while it is not granted.
        devices: ids of its devices by kind, `{"GPU": (0,)}`; empty until then.
    """

    request: Mapping[str, float]
    free: Mapping[str, float]
    devices: Mapping[str, tuple[int | str, ...]]

    def __str__(self) -> str:
        told = terms(self.request.items())
        for kind, ids in self.devices.items():
            told += f" on {kind} {listing(map(str, ids), len(ids))}"
        used = {name: n - self.free[name] for name, n in self.request.items()}
        held = {name: amount for name, amount in used.items() if amount}
        return f"{told}, used: {terms(held.items())}" if held else told


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """One placement.

    Attributes:
        task: its number, under which `why` knows it.
        name: its name.
        id: tells it from all others.
        state: "waiting", "ready", or "removing" while those in it stop.
        strategy: how its bundles are laid out.
        bundles: in their order.
        members: how many tasks and actors were given it that have not ended.
        client: the program whose it is, 0 for the node's own.
        pid: process id of that; 0 while it waits.
        reason: why it waits, None if it does not.
        is_detached: whether it outlives the program that has asked for it.
    """

    task: int
    name: str
    id: str
    state: str
    strategy: str
    bundles: tuple[BundleStatus, ...]
    members: int
    client: int = 0
    pid: int = 0
    reason: str | None = None
    is_detached: bool = False


def placement_rows(placements: Sequence[PlacementStatus]) -> Iterator[str]:
    """All of them in words, with their bundles."""
    if placements:
        yield "placements"
    for one in placements[:SHOWN]:
        of = f"pid {one.pid}, " if one.pid else ""
        state = f"{one.state}, detached" if one.is_detached else one.state
        told = f"{one.task}  {one.name}  {one.strategy}  {state}"
        yield f"  {told}  {of}{one.members} in it"
        if one.reason:
            yield f"    {one.reason}"
        for index, bundle in enumerate(one.bundles[:SHOWN]):
            yield f"    bundle {index}: {bundle}"
        yield from (f"  {line}" for line in rest(len(one.bundles) - SHOWN))
    yield from rest(len(placements) - SHOWN)


WIDEST: Final = 100
"""Columns of a line from which on what is seen stands on a line of its own."""


STALE: Final = 5.0
"""Seconds after which it is said how old a look is."""


_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20))


def device_rows(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """All devices: a line for each, and below it those who are there."""
    for device, lines in zip(devices, _lines(devices), strict=True):
        yield from lines
        if device.aside is not None:
            yield f"  set aside: {device.aside}"
        if device.is_unverified:
            yield "  unverified: whether ended tasks left something on it is not known"
        yield from _section("", device.holders, _holder)
        if device.others:
            told = listing(map(_other, device.others), len(device.others))
            yield f"  not ours: {told}"
    yield from _unknown(devices)


def _lines(devices: Sequence[DeviceStatus]) -> Iterator[list[str]]:
    """One line a device, or two where it would be too wide."""
    identities = [
        (
            f"{device.kind} {device.id}",
            f"{device.free:g} free",
            device.name or device.type or "",
        )
        for device in devices
    ]
    seen = [_seen(device) for device in devices]
    rows = [(*who, *what) for who, what in zip(identities, seen, strict=True)]
    used = [any(column) for column in zip(*rows, strict=True)]
    joined = aligned(
        [cell for cell, is_used in zip(row, used, strict=True) if is_used]
        for row in rows
    )
    short = aligned(identities)
    for whole, who, what in zip(joined, short, seen, strict=True):
        if len(whole) <= WIDEST:
            yield [whole]
        else:
            yield [who, "  " + "  ".join(filter(None, what))]


def _seen(device: DeviceStatus) -> Sequence[str]:
    is_stale = device.seen is not None and device.seen > STALE
    return (
        _memory(device),
        f"{amount(device.memory_reserved)} reserved" if device.memory_reserved else "",
        "" if device.utilisation is None else f"{device.utilisation} % busy",
        f"seen {span(device.seen or 0.0)} ago" if is_stale else "",
    )


def _memory(device: DeviceStatus) -> str:
    there = amount(device.memory)
    if device.used is None:
        return there
    return f"{amount(device.used, '0')} used" + (f" of {there}" if there else "")


def amount(count: int, none: str = "") -> str:
    """Bytes as people read them, "3.2 GiB"; `none` for less than a MiB."""
    for unit, one in _UNITS:
        if count >= one:
            units = count / one
            return f"{units:.0f} {unit}" if units >= 100 else f"{units:.3g} {unit}"
    return none


def _holder(holder: Holder) -> Sequence[str]:
    held = f"{holder.share:g}" if holder.share else size(holder.memory)
    if holder.is_settling:
        return (held, "(ended)", "", "until its driver agrees", "")
    used = "" if holder.used is None else f"{amount(holder.used, '0')} used"
    if holder.has_outgrown:
        used += ", more than was reserved for it"
    seconds = "" if holder.seconds is None else span(holder.seconds)
    return (
        held,
        holder.task or "(ending)",
        pid_of(holder.pid),
        "without end" if holder.is_endless else seconds,
        used,
    )


def pid_of(pid: int) -> str:
    """A worker's process, which may not be there yet."""
    return f"pid {pid}" if pid else "(starting)"


def _other(process: OtherProcess) -> str:
    told = " ".join(filter(None, (process.name, f"pid {process.pid}")))
    size = "" if process.memory is None else amount(process.memory, "0")
    return f"{told} with {size}" if size else told


def _unknown(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """Each thing that is not known, once for all devices that it is not known of."""
    told: dict[str, list[str]] = {}
    for device in devices:
        if device.unknown is not None:
            told.setdefault(device.unknown, []).append(f"{device.kind} {device.id}")
    for what, names in told.items():
        yield f"not known of {listing(names, len(names))}: {what}"


_STATES: Final = (
    *("running", "blocked", "stopping", "starting", "queued", "sent", "waiting"),
)


def summary(status: NodeStatus) -> str:
    """Return what there is and what happens, on one line."""
    resources = ", ".join(
        f"{name} {written(name, free)}/{written(name, total)}"
        for name, free, total in _worth_telling(status)
    )
    drain = "" if status.draining is None else f"{drain_told(status.draining)}; "
    outage = "no worker can be started; " if status.outages else ""
    workers = f"{len(status.workers)} workers"
    return f"{drain}{outage}{resources}; {workers}; {_counts(status)}"


def _worth_telling(status: NodeStatus) -> Iterator[tuple[str, float, float]]:
    """All resources, but memory only where somebody has some."""
    for name, total in status.total.items():
        free = status.available.get(name, 0.0)
        if name not in (MEMORY, GPU_MEMORY) or free != total:
            yield name, free, total


def _counts(status: NodeStatus) -> str:
    """Return how many tasks there are in each state."""
    counts = Counter(task.state for task in status.tasks)
    counts["waiting"] = status.waiting_count
    told = [f"{counts[name]} {name}" for name in _STATES if counts[name]]
    return ", ".join(told) or "no tasks"


def report(status: NodeStatus) -> str:
    """Everything, in a table."""
    tasks, placements = status.tasks, {one.task for one in status.placements}
    leases = [
        task
        for task in tasks
        if task.is_lease and task.is_held and task.id not in placements
    ]
    rows = [
        *overview(status),
        *device_rows(status.devices),
        *_programs(status),
        *_section(
            "on workers",
            [task for task in tasks if task.worker is not None],
            lambda task: (
                *(str(task.id), task.name, task.state, pid_of(task.pid)),
                *(terms(task.request.items()), task.reason or ""),
            ),
        ),
        # Of these a cluster does not tell where they are.
        *_section(
            "sent",
            [task for task in tasks if task.state == "sent"],
            lambda task: (
                *(str(task.id), task.name),
                *(terms(task.request.items()), task.reason or ""),
            ),
        ),
        *_section(
            "leases",
            leases,
            lambda task: (
                *(str(task.id), task.name, f"pid {task.pid}"),
                *(terms(task.request.items()), task.reason or ""),
            ),
        ),
        *placement_rows(status.placements),
        *_shapes(status),
        *_reservation(status),
        *_section(
            "actors",
            status.actors,
            lambda actor: (
                *(str(actor.id), actor.name or "", actor.class_name, actor.state),
                pid_of(actor.pid) if actor.worker is not None else "",
                f"held by {actor.holders}",
                f"{actor.calls} calls" if actor.calls else "",
            ),
        ),
        *_section(
            "failed",
            status.failures,
            lambda one: (
                *(f"{span(one.seconds)} ago", str(one.task), one.name),
                f"{one.error}: {one.message}" if one.message else one.error,
            ),
        ),
    ]
    return "\n".join(rows)


def _section(
    title: str, entries: Sequence[T], cells: Callable[[T], Sequence[str]]
) -> Iterator[str]:
    """The first few of them below each other, and how many more there are."""
    if entries and title:
        yield title
    yield from aligned(map(cells, entries[:SHOWN]), indent="  ")
    yield from rest(len(entries) - SHOWN)


def overview(status: NodeStatus) -> Iterator[str]:
    """How much is free of each resource, and how many workers and tasks there are."""
    if status.draining is not None:
        yield drain_told(status.draining)
    rows = [
        (name, f"{written(name, free)} of {written(name, total)} free")
        for name, free, total in _worth_telling(status)
    ]
    states = Counter(worker.state for worker in status.workers)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    rows.append(("workers", told or "none"))
    rows.append(("tasks", _counts(status)))
    yield from aligned(rows)
    yield from map(str, status.outages)


def drain_told(seconds: float) -> str:
    """That a node is being stopped."""
    return f"is being stopped: no new work; what runs has {span(seconds)} to end"


def held_tasks(status: NodeStatus) -> list[TaskStatus]:
    """The tasks that have a worker, and the leases that are held."""
    waiting = {task.id for task in status.waiting}
    return [
        task
        for task in status.tasks
        if task.worker is not None or (task.is_lease and task.id not in waiting)
    ]


def state_of(task: TaskStatus) -> str:
    """Its state in a word; of a lease that is held, that it is one."""
    is_held = task.is_lease and task.state == TaskState.RUNNING.value
    return "leased" if is_held else task.state


def _shapes(status: NodeStatus) -> Iterator[str]:
    if status.shapes:
        yield "waiting"
    for shape in status.shapes[:SHOWN]:
        names = ", ".join(shape.variables)
        told = f" with {names}" if names else ""
        spread = ", spread" if shape.strategy == "spread" else ""
        where = f" of {shape.where}" if shape.where else ""
        yield (
            f"  {shape.count} x {terms(shape.request.items())}{where}{spread}{told}: "
            f"{shape.first} first, the oldest for {span(shape.seconds)}"
        )
        yield f"    {shape.reason}"
    yield from rest(status.shape_count - len(status.shapes[:SHOWN]))


def _reservation(status: NodeStatus) -> Iterator[str]:
    kept = status.reservation
    if kept is not None:
        when = "" if kept.seconds is None else f", for {span(kept.seconds)} at most"
        yield f"kept for {kept.name} (task {kept.task}): {kept}{when}"
