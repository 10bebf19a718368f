"""Finds the resources that a waiting task lacks, and warns if they are held for good.

The search follows the rules by which `SchedulerState.take` refuses a lease, and changes
nothing. While resources are held without end and tasks wait, an alarm checks, every few
seconds, the first tasks of some groups that ask for these resources. Each group causes
one warning, until it becomes empty.
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
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import BundleLedger, Lease, Ledger
from aiogpu.core.resources.placement_group import candidates
from aiogpu.core.resources.topology import indices
from aiogpu.core.scheduler.contention.reservation import is_held_for_good
from aiogpu.core.scheduler.state import Reservation, SchedulerState


class Lack(NamedTuple):
    """A resource that a task lacks; amounts in parts (`UNIT`).

    Attributes:
        name: name of the resource.
        asked: amount that the task asks for.
        free: amount that is free.
        kept: part of the free amount that is reserved for another task.
        mask: the devices that the task may use; 0 if the resource has no devices.
        is_claimed: the resource is reserved for another task, once it is free.
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
    """Yield the resources that a waiting task lacks, in its bundle if it has one."""
    request, ledger = record.spec.shape.request, ledger_for(node, record)
    if isinstance(request.placement_group, BundleRef) and not isinstance(
        ledger, BundleLedger
    ):
        return  # the placement group has no resources yet
    rival = rival_of(node, record)
    has_lack = False
    for name, asked in request.scalars:
        free = max(ledger.free[name], 0)
        claim = rival.kept.get(name, 0) if rival else 0
        kept = min(claim, free)
        if free - kept < asked:
            has_lack = True
            yield Lack(name, asked, free, kept, 0, claim > 0)
    for kind, asked in request.devices:
        devices = ledger.device_sets[kind]
        barred = rival.barred.get(kind, 0) if rival else 0
        if isinstance(request.placement_group, PlacementGroupSpec):
            lack = _group_lack(devices, asked, barred)
            if not has_lack or lack.free - lack.kept < asked:
                yield lack
        elif devices.choose(asked, request, barred) is None:
            mask = ledger.masks[kind] if isinstance(ledger, BundleLedger) else -1
            yield _device_lack(devices, asked, request, barred, mask)


def ledger_for(node: SchedulerState, record: TaskRecord) -> Ledger:
    """Return the ledger from which a task takes: the node's, or its bundle's."""
    return next(iter(candidates(node.ledger, record.spec.shape.request)), node.ledger)


def _group_lack(devices: DeviceSet, asked: int, barred: int) -> Lack:
    """Return the lack of devices for a whole placement group."""
    mask = devices.mask_of_type(None)
    free, kept = (
        sum(devices.free[index] for index in indices(part))
        for part in (mask & ~devices.availability.aside_mask, mask & barred)
    )
    return Lack(devices.kind, asked, free, kept, mask, bool(barred), devices.kind)


def _device_lack(
    devices: DeviceSet, asked: int, request: Request, barred: int, mask: int
) -> Lack:
    """Return the lack of device shares or, if these suffice, of device memory."""
    mask &= devices.usable(asked, request)
    available = mask & ~devices.availability.aside_mask
    part, memory = min(asked, UNIT), devices.demand(request)
    with_shares = [
        index for index in indices(available & ~barred) if devices.free[index] >= part
    ]
    is_short_of_memory = not asked or len(with_shares) >= max(asked // UNIT, 1)
    kind = devices.kind
    name, wanted, free = kind, asked, devices.free
    if is_short_of_memory:
        sizes = [devices.capacity[index] * part // UNIT for index in indices(mask)]
        wanted = UNIT * (named_bytes(asked, memory) or max(sizes, default=0))
        free = [UNIT * devices.free_memory(i) for i in range(len(devices.free))]
        name = GPU_MEMORY
    all_free = sum(free[index] for index in indices(available))
    kept = sum(free[index] for index in indices(available & barred))
    return Lack(name, wanted, all_free, kept, mask, bool(barred & mask), kind)


def rival_of(node: SchedulerState, record: TaskRecord) -> Reservation | None:
    """Return the reservation that a task must leave alone, or None."""
    reservation = node.reservation
    if reservation is None or reservation.lets_pass(node, record):
        return None
    return reservation


def find_bound(node: SchedulerState) -> int:
    """Return the number of workers if their limit is reached, else 0."""
    present = len(node.workers)
    return present if present >= node.worker_limit.now else 0


def is_held_endlessly(
    node: SchedulerState, record: TaskRecord, lacks: list[Lack]
) -> bool:
    """Return True if a waiting task lacks resources that others hold without end."""
    if not lacks:
        return find_bound(node) > 0 and all(
            worker.holds_endlessly for worker in node.workers
        )
    sets = ledger_for(node, record).device_sets
    if any(
        lack.mask and sets[lack.kind].availability.aside_mask & lack.mask
        for lack in lacks
    ):
        return False  # a device that is set aside may come back
    return is_held_for_good(node, record)


GROUPS_PER_CHECK: Final = 32
"""Groups that one alarm checks."""


def warn_of_stalls(node: SchedulerState) -> None:
    """Warn of groups that wait for resources held without end."""
    node.stalls_at = None
    names = _held_endlessly(node)
    if node.is_closing or not names:
        return  # the start of the next endless task sets the alarm again
    is_bound = find_bound(node) > 0
    groups = [
        group
        for group in node.ready.groups()
        if not group.is_warned and (is_bound or names & _asked(group.request))
    ]
    if not groups:
        node.expect_stalls()
        return
    # Groups take turns, because the check of one group costs O(holders).
    turn = node.stall_turn % len(groups)
    chosen = (groups[turn:] + groups[:turn])[:GROUPS_PER_CHECK]
    node.stall_turn = turn + len(chosen)
    next_checks = [_check_group(node, group) for group in chosen]
    if len(chosen) < len(groups):
        next_checks.append(node.now + node.config.warn_after)
    if times := [time for time in next_checks if time]:
        node.stalls_at = min(times)
        node.timers.set(node.stalls_at, AlarmKind.STALL, 0)


def _held_endlessly(node: SchedulerState) -> set[str]:
    """Return the names of the resources that are held without end."""
    return {
        name
        for worker in node.holders
        if worker.lease is not None and worker.holds_endlessly
        for name in _asked(worker.lease.request) | {CPU}
    }


def _asked(request: Request) -> set[str]:
    return {name for name, _ in (*request.scalars, *request.devices)}


def _check_group(node: SchedulerState, group: Group) -> float:
    """Warn of a group if it is time; return when to check again, 0.0 for never."""
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
    # A holder that has just begun may soon give the resource back.
    youngest = min(
        (
            node.now - worker.watched_since
            for worker in node.holders
            if worker.holds_endlessly and worker.watched is worker.task
            if worker.lease and any(_has(worker.lease, lack) for lack in lacks)
        ),
        default=after,
    )
    # Times are compared: added to `now`, a tiny difference may be lost by rounding.
    if (time := node.now + after - youngest) > node.now:
        return time
    group.is_warned = True
    node.effects.append(Warn(record.id))
    return 0.0


def _has(lease: Lease, lack: Lack) -> bool:
    """Return True if a lease holds some of a lacking resource."""
    if not lack.mask:
        is_lent = lease.is_lent and lack.name == CPU
        return not is_lent and lack.name in dict(lease.request.scalars)
    return any(
        kind == lack.kind and lack.mask >> share[0] & 1
        for kind, share, _ in lease.held()
    )
