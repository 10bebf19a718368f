"""Finds tasks that wait for what is held without end, so that their program is warned.

While something is held without end and tasks wait that were not warned of, an alarm
rings every few seconds, and the first tasks of some groups that ask for the same
resources are looked at. A group is warned of once, until it is empty.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.effects import Effect, Warn
from aiogpu.core.model.request import Request
from aiogpu.core.model.units import CPU
from aiogpu.core.queue.ready import Group
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.shortage import (
    Lack,
    find_bound,
    find_lacks,
    is_held_endlessly,
    runs_endlessly,
)
from aiogpu.core.scheduler.state import SchedulerState
from aiogpu.core.scheduler.timers import AlarmKind

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
        for group in node.ready.groups()
        if not group.is_warned and (is_bound or names & _asked(group.request))
    ]
    if not groups:
        node.expect_stalls(now)
        return
    # Not always the same: each look costs as much as there are holders.
    turn = node.stall_turn % len(groups)
    chosen = (groups[turn:] + groups[:turn])[:LOOKED_AT]
    node.stall_turn = turn + len(chosen)
    found = [_look_at(node, group, now, effects) for group in chosen]
    if len(chosen) < len(groups):
        found.append(now + node.config.warn_after)
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


def _look_at(
    node: SchedulerState, group: Group, now: float, effects: list[Effect]
) -> float:
    """Warn a line if it is time; gives when to look at it again, 0 for never."""
    first = group.first()
    assert first is not None, group
    record, after = first[1], node.config.warn_after
    if now < record.since + after:
        return record.since + after
    if node.clients is not None and node.clients.bars(record):
        return now + after
    lacks = list(find_lacks(node, record))
    if not is_held_endlessly(node, record, lacks):
        return now + after
    # Who has something for a moment only may give it back as soon.
    youngest = min(
        (
            now - worker.watched_since
            for worker in node.holders
            if runs_endlessly(worker) and worker.watched is worker.task
            if worker.lease and any(_has(worker.lease, lack) for lack in lacks)
        ),
        default=after,
    )
    # Compared as moments: what is left may be too little to make a later one.
    if (moment := now + after - youngest) > now:
        return moment
    group.is_warned = True
    effects.append(Warn(record.id))
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
