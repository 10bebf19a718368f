"""What a waiting task lacks: which resource is short, and what is kept for another.

Looks at the ledger with the same eyes as `Node.take`, and says in words and figures
what the latter only refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from aiogpu.core.bundles import Part, roomiest
from aiogpu.core.devices import DeviceSet
from aiogpu.core.filling import named_bytes
from aiogpu.core.gang import Gang, Within
from aiogpu.core.holding import DeviceStatus, Holder, Holdings
from aiogpu.core.ledger import Ledger
from aiogpu.core.node import Node
from aiogpu.core.outage import find_outage
from aiogpu.core.records import TaskRecord
from aiogpu.core.reservation import Reservation
from aiogpu.core.resources import (
    GPU_MEMORY,
    UNIT,
    Request,
    number,
    spoken,
    written,
)
from aiogpu.core.wording import in_words, listing


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


class Stock(Protocol):
    """What is looked at to find what is short."""

    @property
    def ledger(self) -> Ledger:
        """What there is, and who holds it."""
        ...

    @property
    def reservation(self) -> Reservation | None:
        """What is kept for one of those that wait."""
        ...


class Lack(NamedTuple):
    """A resource that is short, in parts.

    Attributes:
        name: of the resource.
        asked: by the task.
        free: what nobody holds of it.
        kept: how much of that is kept for another task.
        mask: the devices that the task may use; 0 if it is not made of devices.
        is_claimed: whether it is kept for another task, once it is free.
        kind: the kind of these devices.
    """

    name: str
    asked: int
    free: int
    kept: int
    mask: int
    is_claimed: bool
    kind: str = ""


def find_lacks(node: Stock, record: TaskRecord) -> Iterator[Lack]:
    """The resources for which a waiting task waits; in its bundle, if it has one."""
    request, ledger = record.spec.shape.request, ledger_for(node, record)
    if isinstance(request.gang, Within) and not isinstance(ledger, Part):
        return  # nobody knows yet what its gang will have
    rival = rival_of(node, record)
    is_found = False
    for name, asked in request.scalars:
        free = max(ledger.free[name], 0)
        claim = rival.kept.get(name, 0) if rival else 0
        kept = min(claim, free)
        if free - kept < asked:
            is_found = True
            yield Lack(name, asked, free, kept, 0, claim > 0)
    for kind, asked in request.devices:
        devices = ledger.device_sets[kind]
        barred = rival.barred.get(kind, 0) if rival else 0
        if isinstance(request.gang, Gang):
            lack = _of_all(devices, asked, barred)
            if not is_found or lack.free - lack.kept < asked:
                yield lack
        elif devices.choose(asked, request, barred) is None:
            mask = ledger.masks[kind] if isinstance(ledger, Part) else -1
            yield _of_devices(devices, asked, request, barred, mask)


def ledger_for(node: Stock, record: TaskRecord) -> Ledger:
    """Of what a task takes what it asks for: the node's, or its bundle's."""
    request = record.spec.shape.request
    if isinstance(request.gang, Within):
        return roomiest(node.ledger, request) or node.ledger
    return node.ledger


def _of_all(devices: DeviceSet, asked: int, barred: int) -> Lack:
    """What a gang is short of: whichever of its bundles has no place."""
    mask = devices.mask_of_type(None)
    free, kept = (
        sum(devices.free[at] for at in _in(those))
        for those in (mask & ~devices.aside_mask, mask & barred)
    )
    return Lack(devices.kind, asked, free, kept, mask, bool(barred), devices.kind)


def _of_devices(
    devices: DeviceSet, asked: int, request: Request, barred: int, mask: int
) -> Lack:
    """What is short of devices: shares of them, or where there are enough, memory."""
    mask &= devices.usable(asked, request)
    given = mask & ~devices.aside_mask
    part, memory = min(asked, UNIT), devices.demand(request)
    with_shares = [
        index for index in _in(given & ~barred) if devices.free[index] >= part
    ]
    is_short_of_memory = not asked or len(with_shares) >= max(asked // UNIT, 1)
    kind = devices.kind
    name, wanted, free = kind, asked, devices.free
    if is_short_of_memory:
        filling = devices.filling
        sizes = [filling.capacity[index] * part // UNIT for index in _in(mask)]
        wanted = UNIT * (named_bytes(asked, memory) or max(sizes, default=0))
        free = [UNIT * filling.free_memory(i) for i in range(len(devices.free))]
        name = GPU_MEMORY
    all_free = sum(free[index] for index in _in(given))
    kept = sum(free[index] for index in _in(given & barred))
    return Lack(name, wanted, all_free, kept, mask, bool(barred & mask), kind)


def _in(mask: int) -> Iterator[int]:
    return (index for index in range(mask.bit_length()) if mask >> index & 1)


def _told(devices: DeviceSet, index: int, name: str) -> str:
    if index in devices.aside:
        return "set aside"
    if name == GPU_MEMORY:
        return written(name, devices.filling.free_memory(index))
    return f"{number(devices.free[index]):g}"


def rival_of(node: Stock, record: TaskRecord) -> Reservation | None:
    """The reservation that this task must leave alone, None without one."""
    reservation = node.reservation
    if reservation is None or reservation.lets_pass(record):
        return None
    return reservation


def find_shortages(
    node: Stock, record: TaskRecord, holdings: Holdings
) -> Iterator[Shortage]:
    """The resources for which a waiting task waits, each with its holders."""
    ledger = ledger_for(node, record)
    for lack in find_lacks(node, record):
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


def why_waiting(node: Node, record: TaskRecord, now: float) -> str:
    """In one line what a waiting task waits for."""
    if node.solitude.bars(record):
        return "waits until another has run alone, for which memory ran out before"
    if node.clients is not None and (limit := node.clients.why_barred(record)):
        return f"waits for its program's own limit: it holds {limit}"
    outage = find_outage(node, record.spec.shape.environment, now)
    if outage is not None and not record.spec.is_lease:
        return str(outage)
    if lacks := tell_lacks(node, record):
        within = record.spec.shape.request.gang
        return lacks + (f" in {within}" if isinstance(within, Within) else "")
    if placement := awaited_gang(node, record):
        return f"waits for {placement}, its placement"
    if most := find_bound(node):
        return f"waits for a worker: there are {most}, and no room for more"
    return "waits for its turn"


def tell_lacks(node: Stock, record: TaskRecord) -> str:
    """In one line for which resources it waits, empty if it lacks none."""
    rival = rival_of(node, record)
    short = []
    for lack in find_lacks(node, record):
        told = f"free: {written(lack.name, number(lack.free))}"
        if lack.mask:
            devices = ledger_for(node, record).device_sets[lack.kind]
            shares = (
                f"{devices.devices[index].id}: {_told(devices, index, lack.name)}"
                for index in _in(lack.mask)
            )
            told = f"free by device: {listing(shares, lack.mask.bit_count())}"
        if rival and lack.kept:
            told += f"; kept for {rival.record.spec.name}"
        asked = written(lack.name, number(lack.asked))
        short.append(f"{spoken(lack.name)} {asked} ({told})")
    return "waits for " + " and ".join(short) if short else ""


def awaited_gang(node: Stock, record: TaskRecord) -> str:
    """The name of its gang, if that is not granted yet; empty otherwise."""
    within = record.spec.shape.request.gang
    if isinstance(within, Within) and within.key not in node.ledger.gangs:
        return within.name
    return ""


def find_bound(node: Node) -> int:
    """How many workers there are, if there may be no more; 0 if there may."""
    there = len(node.workers)
    return there if there >= node.room.now else 0


def describe(
    node: Node, reservation: Reservation | None, now: float
) -> ReservationStatus | None:
    """A reservation in the user's terms."""
    if reservation is None:
        return None
    record, sets = reservation.record, node.ledger.device_sets
    return ReservationStatus(
        task=record.id,
        name=record.spec.name,
        devices={
            kind: tuple(
                device.id
                for index, device in enumerate(sets[kind].devices)
                if mask >> index & 1
            )
            for kind, mask in reservation.barred.items()
        },
        amounts={name: number(parts) for name, parts in reservation.kept.items()},
        seconds=None if reservation.until == inf else max(reservation.until - now, 0.0),
    )
