"""Reserves resources for a task that others would otherwise overtake for ever.

The first of the tasks that do not fit, once it has been first of its kind for
`reserve_after`, has what it needs kept for it. Tasks that come after it may take only
the rest, or what they give back, by their own `timeout`, before it could begin. There
is one reservation at a time, so each ends with the tasks that run now. What is held
without end is never waited for: then nothing is kept. The idea is EASY backfilling
(Lifka, 1995).

What to keep is tried on a copy of the ledger: leases end there, in the order in which
they are likely to, until what the task asks for can be taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from aiogpu.core.model.request import PlacementGroupSpec, Request
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import candidates, try_on
from aiogpu.core.scheduler.state import Reservation, SchedulerState

STANDS: Final = 0.05
"""Seconds for which a plan holds, made or given up."""

STANDS_LONGEST: Final = 1.0
"""The same where nothing has come back meanwhile."""


def reserve(
    node: SchedulerState, record: TaskRecord, before: Reservation | None = None
) -> Reservation | None:
    """Plan a reservation for a task; None if what it needs is held without end.

    Args:
        node: what there is, and who holds it.
        record: the task.
        before: what was kept for the task until now.
    """
    homes = [*candidates(node.ledger, record.spec.shape.request)]
    if before is not None and before.home in homes:
        # What has been kept there so far is not given up for another bundle.
        homes.insert(0, before.home)
    plans = (_plan(node, record, home) for home in homes)
    return next((plan for plan in plans if plan is not None), None)


def is_held_for_good(node: SchedulerState, record: TaskRecord) -> bool:
    """Return whether a task would not fit even once all finite tasks had ended.

    Devices that are set aside count: they come back some time.
    """
    request = record.spec.shape.request
    for home in candidates(node.ledger, request):
        rest = home.emptied()
        for lease, task in _leases(node, home):
            if task is not None and task.spec.is_endless:
                rest.suppose(lease, is_held=True)
        if try_on(rest, request):
            return False
    return True


def _plan(node: SchedulerState, record: TaskRecord, home: Ledger) -> Reservation | None:
    """Plan what to keep of the node, or of a bundle."""
    request = record.spec.shape.request
    found = _find_soonest(node, request, home)
    if found is None:
        return None
    leases, until = found
    barred: dict[str, int] = {}
    for lease in leases:
        for kind, mask in lease.masks():
            barred[kind] = barred.get(kind, 0) | mask
    # While its devices are awaited, others may compute: they are bound to end as well.
    # A placement group needs all at once, so all of it is kept.
    is_kept = isinstance(request.placement_group, PlacementGroupSpec) or all(
        home.device_sets[kind].could_serve(amount, request, barred[kind])
        for kind, amount in request.devices
    )
    kept = dict(request.scalars) if is_kept else {}
    return Reservation(home, barred, kept, record, until, node.now, seen_of(node))


def _find_soonest(
    node: SchedulerState, request: Request, home: Ledger
) -> tuple[list[Lease], float] | None:
    """Find the earliest lease for a request by the expected ends of others.

    Costs O(leases): how many have to end is found by halves.
    """
    rest = home.copy()
    sets = home.device_sets.items()
    aside = {kind: devices.availability.aside_mask for kind, devices in sets}
    held = sorted(_holds(node, home), key=_order)
    found: list[Lease] = []
    ended, least, enough = 0, 0, len(held) + 1
    while least < enough:
        count = (least + enough) // 2
        for _, lease in held[ended:count]:
            rest.suppose(lease, is_held=False)
        for _, lease in held[count:ended]:
            rest.suppose(lease, is_held=True)
        ended = count
        if leases := try_on(rest, request, aside):
            found, enough = leases, count
        else:
            least = count + 1
    until = held[enough - 1][0] if found and enough else 0.0
    return (found, until) if found else None


def _leases(
    node: SchedulerState, home: Ledger
) -> Iterator[tuple[Lease, TaskRecord | None]]:
    """The leases from a ledger, each with its task; None: its process is ending."""
    for holder in node.holders:
        if holder.lease is not None and holder.lease.home is home:
            yield holder.lease, holder.task


def _holds(node: SchedulerState, home: Ledger) -> Iterator[tuple[float, Lease]]:
    """The leases of finite tasks, each with when it ends at the latest."""
    for lease, task in _leases(node, home):
        if task is None:
            yield 0.0, lease
        elif not task.spec.is_endless:
            ends, timeout = inf, task.spec.timeout
            if timeout is not None:
                ends = task.since + timeout + node.grace_of(task)
            yield ends, lease


def _order(hold: tuple[float, Lease]) -> tuple[float, int, int]:
    """Sort key: what ends soonest, then what is on the emptiest device."""
    ends, lease = hold
    on = (
        (-lease.home.device_sets[kind].free[index], index)
        for kind, (index, _), _ in lease.held()
    )
    return ends, *min(on, default=(0, 0))


def stands(node: SchedulerState, plan: Reservation) -> bool:
    """Return whether to keep a plan: it is new, or no better one is possible."""
    if node.now < plan.planned_at + STANDS:
        return True
    return node.now < plan.planned_at + STANDS_LONGEST and plan.seen == seen_of(node)


def seen_of(node: SchedulerState) -> tuple[int, ...]:
    """A value that changes when a better plan may be possible."""
    sets = node.ledger.device_sets.values()
    return node.ledger.ended, *(each.availability.aside_mask for each in sets)
