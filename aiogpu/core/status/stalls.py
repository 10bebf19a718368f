"""Warns of tasks that wait for what is held without end, and names the holder.

While something is held without end and tasks wait that were not warned of, an alarm
rings every few seconds, and the first tasks of some groups that ask for the same
resources are looked at. A group is warned of once, until it is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiogpu.core.effects import Effect, Warn
from aiogpu.core.model.text import listing, span, terms
from aiogpu.core.model.units import CPU, written
from aiogpu.core.scheduler.timers import AlarmKind
from aiogpu.core.status.holdings import Holder, Holdings
from aiogpu.core.status.why import find_bound, why_waiting

if TYPE_CHECKING:
    from aiogpu.core.model.request import Request
    from aiogpu.core.queue.ready import Group
    from aiogpu.core.records import TaskRecord
    from aiogpu.core.scheduler.state import SchedulerState
    from aiogpu.core.status.why import Shortage, Why


LOOKED_AT: Final = 32
"""Groups that are looked at together."""


def look_for_stalls(node: SchedulerState, now: float, effects: list[Effect]) -> None:
    """Warn the lines that wait for what is held without end; look again for others."""
    node.stalls_at = None
    names = _held_endlessly(node)
    if node.is_closing or not names:
        return  # the next that begins without end sets the alarm again
    is_bound = find_bound(node) > 0
    groups = [
        group
        for group in node.ready.by_request.values()
        if not group.is_warned and (is_bound or names & _asked(group.request))
    ]
    if not groups:
        node.expect_stalls(now)
        return
    # Not always the same: each look costs as much as there are holders.
    turn = node.stall_turn % len(groups)
    chosen = (groups[turn:] + groups[:turn])[:LOOKED_AT]
    node.stall_turn = turn + len(chosen)
    holdings = Holdings(node.holders, {}, now)
    found = [_look_at(node, group, holdings, effects) for group in chosen]
    if len(chosen) < len(groups):
        found.append(now + node.patience.warn_after)
    if moments := [moment for moment in found if moment]:
        node.stalls_at = min(moments)
        node.timers.set(node.stalls_at, AlarmKind.STALL, 0)


def _held_endlessly(node: SchedulerState) -> set[str]:
    """The resources of which something is held without end."""
    return {
        name
        for worker in node.holders
        if worker.lease is not None
        and worker.task is not None
        and worker.task.spec.is_endless
        for name in _asked(worker.lease.request) | {CPU}
    }


def _asked(request: Request) -> set[str]:
    return {name for name, _ in (*request.scalars, *request.devices)}


def _look_at(
    node: SchedulerState, group: Group, holdings: Holdings, effects: list[Effect]
) -> float:
    """Warn a line if it is time; gives when to look at it again, 0 for never."""
    first = group.first()
    assert first is not None, group
    record, now, after = first[1], holdings.now, node.patience.warn_after
    if now < record.since + after:
        return record.since + after
    if node.clients is not None and node.clients.bars(record):
        return now + after
    why = why_waiting(node, record, holdings)
    if not why.is_held_endlessly:
        return now + after
    # Who has something for a moment only may give it back as soon.
    youngest = min((one.seconds or after for one in _holders(why)), default=after)
    # Compared as moments: what is left may be too little to make a later one.
    if (moment := now + after - youngest) > now:
        return moment
    group.is_warned = True
    effects.append(Warn(record.id, _told(record, why)))
    return 0.0


def _holders(why: Why) -> list[Holder]:
    return [
        holder
        for shortage in why.reasons
        for holder in shortage.holders
        if holder.is_endless
    ]


def _told(record: TaskRecord, why: Why) -> str:
    waits = f"{record.spec.name} (task {record.id}) has waited {span(why.seconds or 0)}"
    if why.bound:
        return (
            f"{waits} for a worker process: there are {why.bound}, each is held "
            f"without end, and there is no room for more. `aiogpu doctor` says what "
            f"bounds them."
        )
    held = [
        _held(holder, shortage)
        for shortage in why.reasons
        for holder in shortage.holders
        if holder.is_endless
    ]
    return (
        f"{waits} for {terms(why.request.items())}, and what it needs is held without "
        f"end: {listing(held, len(held), '; ')}. It can start when a holder ends: an "
        f"actor ends by aiogpu.kill() or with its last handle (a notebook keeps those "
        f"that it has shown, in Out). Or ask for less."
    )


def _held(holder: Holder, shortage: Shortage) -> str:
    amount = f"{shortage.resource} {written(shortage.resource, holder.share)}"
    for device in shortage.devices:
        if any(one is holder for one in device.holders):
            share = written(device.kind, holder.share)
            amount = f"{share} of {device.kind} {device.id}"
    return f"{holder.task} holds {amount}"
