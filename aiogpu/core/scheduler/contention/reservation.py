"""Reserves resources for a task that others would otherwise overtake for ever.

When the first task that does not fit has been first of its shape for `reserve_after`,
the resources that it needs are reserved. Later tasks may take only the rest, or
resources that they return, by their own `timeout`, before the first task could begin.
There is one reservation at a time, so each ends with the tasks that run now. A task
that needs resources held without end gets no reservation. The idea is EASY backfilling
(Lifka, 1995).

The plan is made on a copy of the ledger: leases end there, in their expected order,
until the request fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from aiogpu.core.model.request import PlacementGroupSpec, Request
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import candidates, try_on
from aiogpu.core.scheduler.state import Reservation, SchedulerState

REPLAN_AFTER: Final = 0.05
"""Seconds after which a plan, or a failed attempt to plan, is renewed."""

REPLAN_UNCHANGED_AFTER: Final = 1.0
"""The same for a plan if no lease has ended since."""


def reserve(
    node: SchedulerState, record: TaskRecord, before: Reservation | None = None
) -> Reservation | None:
    """Plan a reservation for a task.

    Args:
        node: the scheduler's state.
        record: the task.
        before: the task's reservation until now.

    Returns:
        The reservation; None if the task needs resources that are held without end.
    """
    homes = [*candidates(node.ledger, record.spec.shape.request)]
    if before is not None and before.home in homes:
        # The bundle with the old reservation goes first, to keep its resources.
        homes.insert(0, before.home)
    plans = (_plan(node, record, home) for home in homes)
    chosen = next((plan for plan in plans if plan is not None), None)
    if chosen is not None:
        chosen.note_awaited(before)
    return chosen


def is_held_for_good(node: SchedulerState, record: TaskRecord) -> bool:
    """Return True if a task would not fit even after all finite tasks had ended.

    Devices that are set aside count as present: they may come back.
    """
    request = record.spec.shape.request
    for home in candidates(node.ledger, request):
        trial = home.emptied()
        for lease, holder in _leases(node, home):
            if holder.holds_endlessly:
                trial.suppose(lease, is_held=True)
        if any(try_on(trial, choice) for choice in (request, *request.alternatives)):
            return False
    return True


def _plan(node: SchedulerState, record: TaskRecord, home: Ledger) -> Reservation | None:
    """Plan the reservation of a task on the node's ledger or on a bundle's."""
    request = record.spec.shape.request
    earliest = _find_earliest(node, request, home)
    if earliest is None:
        return None
    leases, until = earliest
    barred: dict[str, int] = {}
    for lease in leases:
        for kind, mask in lease.masks():
            barred[kind] = barred.get(kind, 0) | mask
    # While devices are awaited, other tasks may use the CPUs: they end as well. A
    # placement group needs all resources at once, so all are reserved.
    keeps_scalars = isinstance(request.placement_group, PlacementGroupSpec) or all(
        home.device_sets[kind].could_serve(amount, request, barred[kind])
        for kind, amount in request.devices
    )
    kept = dict(request.scalars) if keeps_scalars else {}
    version = plan_version(node)
    return Reservation(home, barred, kept, record, until, node.now, version)


def _find_earliest(
    node: SchedulerState, request: Request, home: Ledger
) -> tuple[list[Lease], float] | None:
    """Find the earliest leases for a request, by the expected ends of others.

    Costs O(leases): bisects for the number of leases that have to end.
    """
    trial = home.copy()
    sets = home.device_sets.items()
    aside = {kind: devices.availability.aside_mask for kind, devices in sets}
    held = sorted(_finite_leases(node, home), key=_expected_order)
    planned: list[Lease] = []
    ended, least, enough = 0, 0, len(held) + 1
    while least < enough:
        count = (least + enough) // 2
        for _, lease in held[ended:count]:
            trial.suppose(lease, is_held=False)
        for _, lease in held[count:ended]:
            trial.suppose(lease, is_held=True)
        ended = count
        if leases := try_on(trial, request, aside):
            planned, enough = leases, count
        else:
            least = count + 1
    until = held[enough - 1][0] if planned and enough else 0.0
    return (planned, until) if planned else None


def _leases(node: SchedulerState, home: Ledger) -> Iterator[tuple[Lease, WorkerRecord]]:
    """Yield the leases of a ledger, each with its holder."""
    for holder in node.holders:
        if holder.lease is not None and holder.lease.home is home:
            yield holder.lease, holder


def _finite_leases(node: SchedulerState, home: Ledger) -> Iterator[tuple[float, Lease]]:
    """Yield the leases of finite tasks, each after its latest possible end."""
    for lease, holder in _leases(node, home):
        task = holder.task
        if holder.holds_endlessly:
            continue
        if task is None:  # the worker is ending
            yield 0.0, lease
        else:
            ends, timeout = inf, task.spec.timeout
            if timeout is not None:
                ends = task.since + timeout + node.grace_of(task)
            yield ends, lease


def _expected_order(timed_lease: tuple[float, Lease]) -> tuple[float, int, int]:
    """Sort key: the latest end, then the emptiest device."""
    ends, lease = timed_lease
    devices = (
        (-lease.home.device_sets[kind].free[index], index)
        for kind, (index, _), _ in lease.held()
    )
    return ends, *min(devices, default=(0, 0))


def is_current(node: SchedulerState, plan: Reservation) -> bool:
    """Return True while a plan is new or no better plan is possible."""
    if node.now < plan.planned_at + REPLAN_AFTER:
        return True
    if node.now >= plan.planned_at + REPLAN_UNCHANGED_AFTER:
        return False
    return plan.version == plan_version(node)


def plan_version(node: SchedulerState) -> tuple[int, ...]:
    """Return a value that changes when a better plan may be possible."""
    sets = node.ledger.device_sets.values()
    return node.ledger.ended, *(devices.availability.aside_mask for devices in sets)
