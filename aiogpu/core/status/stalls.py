"""Warns of tasks that wait for what is held without end, and names the holder.

While tasks wait that were not warned of, an alarm rings every few seconds, and the
first of each group is looked at. A group is warned of once, until it is empty.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from aiogpu.core.effects import Effect, Warn
from aiogpu.core.model.text import listing, span, terms
from aiogpu.core.model.units import written
from aiogpu.core.scheduler.timers import AlarmKind
from aiogpu.core.status.holdings import Holder, Holdings

if TYPE_CHECKING:
    from aiogpu.core.queue.ready import Group
    from aiogpu.core.records import TaskRecord
    from aiogpu.core.scheduler.state import SchedulerState
    from aiogpu.core.status.why import Shortage, Why


LOOKED_AT: Final = 100
"""Lines that are looked at together."""


def look_for_stalls(node: SchedulerState, now: float, effects: list[Effect]) -> None:
    """Warn the lines that wait for what is held without end; look again for others."""
    node.stalls_at = None
    if node.is_closing:
        return
    holdings = Holdings(node.holders, {}, now)
    lines = (group for group in node.ready.by_request.values() if not group.is_warned)
    found = [
        _look_at(node, group, holdings, effects) for group in islice(lines, LOOKED_AT)
    ]
    if len(found) == LOOKED_AT:
        found.append(now + node.patience.warn_after)  # for those behind them
    if moments := [moment for moment in found if moment]:
        node.stalls_at = min(moments)
        node.timers.set(node.stalls_at, AlarmKind.STALL, 0)


def _look_at(
    node: SchedulerState, group: Group, holdings: Holdings, effects: list[Effect]
) -> float:
    """Warn a line if it is time; gives when to look at it again, 0 for never."""
    from aiogpu.core.status.why import why_waiting  # where somebody has waited for long

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
