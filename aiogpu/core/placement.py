"""Matches what waits with what is free.

One function looks at all that is ready and takes leases for what fits, in order of
priority and submission; each is started before the next is looked at. A task that
does not fit holds up those of its own shape only, as in Ray; other shapes go past
it, until it has waited so long that what it needs is kept for it (`reservation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from aiogpu.core.effects import Effect
from aiogpu.core.lease import Lease
from aiogpu.core.node import Node
from aiogpu.core.ready import Bucket, Group, Precedence
from aiogpu.core.records import TaskRecord
from aiogpu.core.stopping import make_way
from aiogpu.core.timers import AlarmKind

if TYPE_CHECKING:
    from aiogpu.core.reservation import Reservation


def place(
    node: Node, now: float, effects: list[Effect]
) -> Iterator[tuple[TaskRecord, Lease]]:
    """Take tasks from the queue, each with its lease, until nothing more fits.

    Where one lacks nothing but a worker, an idle one that fits nobody before it has
    to go: `effects` says which.
    """
    before, node.reservation = node.reservation, None
    node.room.refused = 0
    ready = node.ready
    ready.unserved.clear()
    turns: list[tuple[Precedence, int, Group]] = []
    for number, group in enumerate(ready.by_request.values()):
        first = group.first()
        assert first is not None, group
        turns.append((first[0], number, group))
    heapify(turns)
    while turns:
        group = turns[0][2]
        first = ready.first(group)
        assert first is not None, group
        _, record, bucket = first
        lease = node.take(record)
        if lease is None and bucket.shape in ready.unserved:
            _go_on(turns, ready.first(group))
            continue
        if lease is None:
            heappop(turns)
            make_way(node, now, effects)
            if node.reservation is None:
                node.reservation = keep_for(node, group, before, now)
            continue
        ready.pop(bucket)
        yield record, lease
        _go_on(turns, ready.first(group))


def _go_on(
    turns: list[tuple[Precedence, int, Group]],
    after: tuple[Precedence, TaskRecord, Bucket] | None,
) -> None:
    """The first task of the first group has been looked at; another is its first."""
    if after is None:
        heappop(turns)
    else:
        heapreplace(turns, (after[0], *turns[0][1:]))


def note_stuck(node: Node, record: TaskRecord, now: float) -> None:
    """A task does not fit: if it is the first of its group, count from now on."""
    request = record.spec.shape.request
    is_shared = node.clients is not None
    group = node.ready.by_request[(record.client, request) if is_shared else request]
    if group.stuck is not record:
        first = node.ready.first(group)
        if first is not None and first[1] is record:
            group.stuck = record
            group.reserve_at = now + node.patience.reserve_after
            if node.stalls_at is None and not group.is_warned:
                node.stalls_at = now + node.patience.warn_after
                node.timers.set(node.stalls_at, AlarmKind.STALL, 0)


def keep_for(
    node: Node,
    group: Group,
    before: Reservation | None,
    now: float,
) -> Reservation | None:
    """Keep something for the first of a group, if it has been that for long.

    One that has only stood behind others of its kind is held up by nobody: where a
    million wait, each is soon on its way once it comes first.
    """
    first = node.ready.first(group)
    assert first is not None, group
    record = first[1]
    note_stuck(node, record, now)
    if now < group.reserve_at or (node.outages and node.has_outage(record)):
        return None
    from aiogpu.core.reservation import STANDS, reserve, stands  # who waits, waits

    if before is not None and before.record is not record:
        before = None
    if before is not None and stands(node, before, now):
        return before
    reservation = reserve(node, record, now, before)
    if reservation is None:
        group.reserve_at = now + STANDS
    elif before is not None:
        # Whoever was let past must not put off the moment that was promised.
        reservation.until = min(reservation.until, before.until)
    return reservation
