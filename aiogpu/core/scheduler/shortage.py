"""Which resources a waiting task lacks, and who is warned that they are held for good.

What is lacking is found the way `SchedulerState.take` refuses; nothing is changed by
asking. While something is held without end and tasks wait that were not warned of, an
alarm rings every few seconds, and the first tasks of some groups that ask for the same
resources are looked at. A group is warned of once, until it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from aiogpu.core.effects import Warn
from aiogpu.core.model.request import (
    BundleRef,
    PlacementGroupSpec,
    Request,
    named_bytes,
)
from aiogpu.core.model.units import CPU, GPU_MEMORY, UNIT
from aiogpu.core.queue.ready import Group
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import BundleLedger, Lease, Ledger
from aiogpu.core.resources.placement_group import candidates
from aiogpu.core.resources.topology import indices
from aiogpu.core.scheduler.reservation import is_held_for_good
from aiogpu.core.scheduler.state import Reservation, SchedulerState


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


def find_lacks(node: SchedulerState, record: TaskRecord) -> Iterator[Lack]:
    """The resources for which a waiting task waits; in its bundle, if it has one."""
    request, ledger = record.spec.shape.request, ledger_for(node, record)
    if isinstance(request.placement_group, BundleRef) and not isinstance(
        ledger, BundleLedger
    ):
        return  # nobody knows yet what its placement group will have
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
        if isinstance(request.placement_group, PlacementGroupSpec):
            lack = _of_all(devices, asked, barred)
            if not is_found or lack.free - lack.kept < asked:
                yield lack
        elif devices.choose(asked, request, barred) is None:
            mask = ledger.masks[kind] if isinstance(ledger, BundleLedger) else -1
            yield _of_devices(devices, asked, request, barred, mask)


def ledger_for(node: SchedulerState, record: TaskRecord) -> Ledger:
    """The ledger from which a task takes: the node's, or its bundle's."""
    return next(iter(candidates(node.ledger, record.spec.shape.request)), node.ledger)


def _of_all(devices: DeviceSet, asked: int, barred: int) -> Lack:
    """Return what a group is short of: whichever of its bundles has no place."""
    mask = devices.mask_of_type(None)
    free, kept = (
        sum(devices.free[at] for at in indices(those))
        for those in (mask & ~devices.availability.aside_mask, mask & barred)
    )
    return Lack(devices.kind, asked, free, kept, mask, bool(barred), devices.kind)


def _of_devices(
    devices: DeviceSet, asked: int, request: Request, barred: int, mask: int
) -> Lack:
    """Return the shortage of devices: of shares, or else of their memory."""
    mask &= devices.usable(asked, request)
    given = mask & ~devices.availability.aside_mask
    part, memory = min(asked, UNIT), devices.demand(request)
    with_shares = [
        index for index in indices(given & ~barred) if devices.free[index] >= part
    ]
    is_short_of_memory = not asked or len(with_shares) >= max(asked // UNIT, 1)
    kind = devices.kind
    name, wanted, free = kind, asked, devices.free
    if is_short_of_memory:
        sizes = [devices.capacity[index] * part // UNIT for index in indices(mask)]
        wanted = UNIT * (named_bytes(asked, memory) or max(sizes, default=0))
        free = [UNIT * devices.free_memory(i) for i in range(len(devices.free))]
        name = GPU_MEMORY
    all_free = sum(free[index] for index in indices(given))
    kept = sum(free[index] for index in indices(given & barred))
    return Lack(name, wanted, all_free, kept, mask, bool(barred & mask), kind)


def rival_of(node: SchedulerState, record: TaskRecord) -> Reservation | None:
    """The reservation that this task must leave alone, None without one."""
    reservation = node.reservation
    if reservation is None or reservation.lets_pass(node, record):
        return None
    return reservation


def find_bound(node: SchedulerState) -> int:
    """Return how many workers there are, if there may be no more; 0 if there may."""
    there = len(node.workers)
    return there if there >= node.worker_limit.now else 0


def is_held_endlessly(
    node: SchedulerState, record: TaskRecord, lacks: list[Lack]
) -> bool:
    """Return whether a waiting task lacks something that others hold without end."""
    if not lacks:
        return find_bound(node) > 0 and all(map(runs_endlessly, node.workers))
    sets = ledger_for(node, record).device_sets
    if any(
        lack.mask and sets[lack.kind].availability.aside_mask & lack.mask
        for lack in lacks
    ):
        # A device that is set aside comes back some time, though nobody knows when.
        return False
    return is_held_for_good(node, record)


def runs_endlessly(worker: WorkerRecord) -> bool:
    """Return whether a worker runs an actor or lease, which only its owner ends."""
    return worker.task is not None and worker.task.spec.is_endless


LOOKED_AT: Final = 32
"""Groups that are looked at together."""


def look_for_stalls(node: SchedulerState) -> None:
    """Warn the groups that wait for what is held without end."""
    node.stalls_at = None
    names = _held_endlessly(node)
    if node.is_closing or not names:
        return  # the next that begins without end sets the alarm again
    is_bound = find_bound(node) > 0
    groups = [
        group
        for group in node.ready.groups()
        if not group.is_warned and (is_bound or names & _asked(group.request))
    ]
    if not groups:
        node.expect_stalls()
        return
    # Not always the same: each look costs as much as there are holders.
    turn = node.stall_turn % len(groups)
    chosen = (groups[turn:] + groups[:turn])[:LOOKED_AT]
    node.stall_turn = turn + len(chosen)
    found = [_look_at(node, group) for group in chosen]
    if len(chosen) < len(groups):
        found.append(node.now + node.config.warn_after)
    if moments := [moment for moment in found if moment]:
        node.stalls_at = min(moments)
        node.timers.set(node.stalls_at, AlarmKind.STALL, 0)


def _held_endlessly(node: SchedulerState) -> set[str]:
    """The resources of which something is held without end."""
    return {
        name
        for worker in node.holders
        if worker.lease is not None and runs_endlessly(worker)
        for name in _asked(worker.lease.request) | {CPU}
    }


def _asked(request: Request) -> set[str]:
    return {name for name, _ in (*request.scalars, *request.devices)}


def _look_at(node: SchedulerState, group: Group) -> float:
    """Warn a group if it is time; return when to look again, 0.0 for never."""
    first = group.first()
    assert first is not None, group
    record, after = first[1], node.config.warn_after
    if node.now < record.since + after:
        return record.since + after
    if node.clients is not None and node.clients.bars(record):
        return node.now + after
    lacks = list(find_lacks(node, record))
    if not is_held_endlessly(node, record, lacks):
        return node.now + after
    # Who has something for a moment only may give it back as soon.
    youngest = min(
        (
            node.now - worker.watched_since
            for worker in node.holders
            if runs_endlessly(worker) and worker.watched is worker.task
            if worker.lease and any(_has(worker.lease, lack) for lack in lacks)
        ),
        default=after,
    )
    # Compared as moments: what is left may be too little to make a later one.
    if (moment := node.now + after - youngest) > node.now:
        return moment
    group.is_warned = True
    node.effects.append(Warn(record.id))
    return 0.0


def _has(lease: Lease, lack: Lack) -> bool:
    """Return whether a lease has something of what a task lacks."""
    if not lack.mask:
        is_lent = lease.is_lent and lack.name == CPU
        return not is_lent and lack.name in dict(lease.request.scalars)
    return any(
        kind == lack.kind and lack.mask >> share[0] & 1
        for kind, share, _ in lease.held()
    )
