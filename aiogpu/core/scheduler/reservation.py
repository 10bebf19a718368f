"""Reserves resources for a task that others would otherwise overtake for ever.

The first of the tasks that do not fit, once it has been first of its kind for
`reserve_after`, has what it needs kept for it. Tasks that come after it may take only
the rest, or what they give back, by their own `timeout`, before it could begin. There
is one reservation at a time, so each ends with the tasks that run now. What is held
without end is never waited for: then nothing is kept. The idea is EASY backfilling
(Lifka, 1995).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Final

from aiogpu.core.model.request import PlacementGroupSpec, Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue.ready import precedence
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import BundleLedger, Lease, Ledger
from aiogpu.core.resources.placement_group import (
    Layout,
    candidates,
    masks_of,
)
from aiogpu.core.resources.topology import indices
from aiogpu.core.scheduler.state import Reservation, SchedulerState

STANDS: Final = 0.05
"""Seconds for which a plan holds, made or given up."""

STANDS_LONGEST: Final = 1.0
"""The same where nothing has come back meanwhile."""

LOOKED_AT: Final = 32
"""Devices that a plan compares beside those that it takes."""


@dataclass(slots=True)
class Hold:
    """What is known of a lease: when it ends, whether it ever does."""

    lease: Lease
    ends: float
    is_endless: bool


def reserve(
    node: SchedulerState,
    record: TaskRecord,
    now: float,
    before: Reservation | None = None,
) -> Reservation | None:
    """Plan what to keep for a task; None if somebody holds it without end.

    Args:
        node: what there is, and who holds it.
        record: the task.
        now: the time.
        before: what was kept for the task until now.
    """
    request = record.spec.shape.request
    if isinstance(request.placement_group, PlacementGroupSpec):
        return _for_gang(node, record, request.placement_group, now)
    if request.placement_group is None:
        return _plan(node, record, None, now, before)
    parts = candidates(node.ledger, request)
    if before is not None and before.part in parts:
        # What has been kept there so far is not given up for another bundle.
        parts.insert(0, before.part)
    plans = (_plan(node, record, part, now, before) for part in parts)
    return next((plan for plan in plans if plan is not None), None)


def _plan(
    node: SchedulerState,
    record: TaskRecord,
    part: BundleLedger | None,
    now: float,
    before: Reservation | None,
) -> Reservation | None:
    """Plan what to keep of a bundle, or of the node for None."""
    request, ledger = record.spec.shape.request, part or node.ledger
    until = 0.0
    for name, amount in request.scalars:
        moment = _when_enough(node, part, name, amount)
        if moment is None:
            return None
        until = max(until, moment)
    barred = {}
    are_ready = True
    for kind, amount in request.devices:
        devices = ledger.device_sets[kind]
        first = before.barred.get(kind, 0) if before and before.part is part else 0
        chosen = _choose(node, ledger, (kind, amount), request, first)
        if chosen is None:
            return None
        barred[kind], moment = chosen
        until = max(until, moment)
        are_ready = are_ready and devices.could_serve(amount, request, barred[kind])
    turn = precedence(record)
    # While its devices are awaited, others may compute: they are bound to end as well.
    kept = dict(request.scalars) if are_ready else {}
    grace = node.config.cancel_grace
    return Reservation(
        *(record, turn, barred, kept, until, now, grace, part), seen_of(node)
    )


def stands(node: SchedulerState, plan: Reservation, now: float) -> bool:
    """Whether a plan is to be followed on: it is new, or nothing better can be had."""
    if now < plan.planned_at + STANDS:
        return True
    return now < plan.planned_at + STANDS_LONGEST and plan.seen == seen_of(node)


def seen_of(node: SchedulerState) -> tuple[int, ...]:
    """Changes when a plan may be bettered: something came back, or is set aside."""
    ledger = node.ledger
    return ledger.ended, *(each.aside_mask for each in ledger.device_sets.values())


def _for_gang(
    node: SchedulerState,
    record: TaskRecord,
    placement_group: PlacementGroupSpec,
    now: float,
) -> Reservation | None:
    """The same for a group: what its bundles will be on, once enough has ended."""
    rest, until = node.ledger.copy(), 0.0
    aside = {k: each.aside_mask for k, each in node.ledger.device_sets.items()}
    held = sorted(_holds(node, None), key=lambda hold: hold.ends)
    for hold in (None, *(one for one in held if not one.is_endless)):
        if hold is not None:
            rest.suppose(hold.lease, is_held=False)
            until = hold.ends
        leases = Layout(rest, placement_group, aside, None).find()
        if leases is not None:
            break
    else:
        return None
    barred: dict[str, int] = {}
    for lease in leases:
        for kind, mask in masks_of(lease):
            barred[kind] = barred.get(kind, 0) | mask
    turn, grace = precedence(record), node.config.cancel_grace
    # It needs all at once, so all of it is kept.
    kept = dict(record.spec.shape.request.scalars)
    return Reservation(
        *(record, turn, barred, kept, until, now, grace), seen=seen_of(node)
    )


def _holds(node: SchedulerState, part: BundleLedger | None) -> Iterator[Hold]:
    for worker in node.holders:
        if worker.lease is not None and worker.lease.home is part:
            yield _hold(node, worker.lease)


def _hold(node: SchedulerState, lease: Lease) -> Hold:
    if lease.holder is None:
        return Hold(lease, inf, is_endless=True)  # what a bundle has not
    holder = node.workers.get(lease.holder) or node.granted.get(lease.holder)
    record = None if holder is None else holder.task
    if record is None:
        return Hold(lease, 0.0, is_endless=False)  # its process is ending
    ends = inf
    if record.spec.timeout is not None:
        ends = record.since + record.spec.timeout + node.grace_of(record)
    return Hold(lease, ends, record.spec.is_endless)


def _when_enough(
    node: SchedulerState, part: BundleLedger | None, name: str, wanted: int
) -> float | None:
    """When there is so much of an undivided resource. Costs O(leases) if not now."""
    free = (part or node.ledger).free[name]
    if free >= wanted:
        return 0.0
    held = [
        (hold.ends, amount, hold.is_endless)
        for hold in _holds(node, part)
        for other, amount in hold.lease.request.scalars
        if other == name
    ]
    for ends, amount, is_endless in sorted(held):
        if not is_endless:
            free += amount
            if free >= wanted:
                return ends
    return None


def _choose(
    node: SchedulerState,
    ledger: Ledger,
    asked: tuple[str, int],
    request: Request,
    first: int,
) -> tuple[int, float] | None:
    """The devices that will serve soonest, as a mask, and when.

    Of very many some are looked at: those of `first`, and then the emptiest.
    """
    kind, amount = asked
    devices, wanted = ledger.device_sets[kind], max(amount // UNIT, 1)
    usable = devices.usable(amount, request) & ~devices.aside_mask
    found: list[tuple[float, int, int]] = []
    for index in chain(indices(usable & first), devices.emptiest(usable & ~first)):
        leases = ledger.by_device.on(kind, index)
        if amount >= UNIT:
            moment = _when_whole(node, leases)
        else:
            held = [_hold(node, lease) for lease in leases]
            moment = _when_room(devices, index, amount, request, held)
        if moment is not None:
            found.append((moment, -devices.free[index], index))
            if len(found) == wanted + LOOKED_AT:
                break
    if len(found) < wanted:
        return None
    best = sorted(found)[:wanted]
    return sum(1 << index for _, _, index in best), best[-1][0]


def _when_whole(node: SchedulerState, leases: Iterable[Lease]) -> float | None:
    """Return when all that is held of a device has ended, None if never."""
    moment = 0.0
    for lease in leases:
        hold = _hold(node, lease)
        if hold.is_endless:
            return None
        moment = max(moment, hold.ends)
    return moment


def _when_room(
    devices: DeviceSet, index: int, amount: int, request: Request, held: list[Hold]
) -> float | None:
    """Return when a device has room for a share of it, None if never."""
    filling, memory = devices.filling.alone(index), devices.demand(request)
    moment = 0.0
    for hold in sorted(held, key=lambda hold: hold.ends):
        if filling.has_room(0, amount, memory):
            break
        if not hold.is_endless:
            part = hold.lease.part_of(devices.kind, index)
            filling.move(0, part, devices.demand(hold.lease.request), -1)
            moment = hold.ends
    return moment if filling.has_room(0, amount, memory) else None
