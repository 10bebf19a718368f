"""Goes through the groups of a program that has many different requests waiting.

Only groups that may fit are looked at, and those for which resources may be reserved:
with its index, a program's release of a lease does not cost a step for each group.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from math import inf
from operator import le
from typing import Final

from aiogpu.core.model.ids import ClientId
from aiogpu.core.model.request import BundleRef, Request
from aiogpu.core.queue.group_index import Fits, GroupIndex
from aiogpu.core.queue.ready import Bucket, Group
from aiogpu.core.records import Precedence, sort_key
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.resources.placement_group import would_help
from aiogpu.core.resources.room import Amounts, room
from aiogpu.core.scheduler.state import SchedulerState, note_stuck

FAILED_AT_ONCE: Final = 8
"""The most attempts to plan a reservation, for one program, that fail in a round."""

BOUNDED_AT_ONCE: Final = 64
"""The most groups of one program that are tried in a round for tasks that may pass a
reservation because their `timeout` ends them before."""


class ManyGroups:
    """The groups of one program in a placement round."""

    def __init__(
        self, node: SchedulerState, client: ClientId, index: GroupIndex[Group]
    ) -> None:
        self._node = node
        self._client = client
        self._index = index
        self._hidden: list[tuple[Group, float]] = []
        self._tried: dict[Group, None] = {}
        self._due: Group | None = None
        self._new: list[Group] = []
        fresh, index.fresh = index.fresh, []
        self._file(fresh, is_end=False)
        self._file(index.pop_pending(node.now), is_end=False)
        if index.postponed and not index.has_due:
            postponed, index.postponed = index.postponed, []
            self._file(postponed, is_end=False)

    def _file(self, groups: Iterator[Group] | list[Group], *, is_end: bool) -> None:
        """File groups by `reserve_at`; new first tasks only at the end of the round.

        Tasks that are still first then have not fitted.
        """
        for group in groups:
            first = group.first()
            if first is None:
                continue
            if is_end:
                note_stuck(self._node, first[1])
            if group.stuck is first[1]:
                self._index.file(group, first[0], self._node.now)
            else:
                self._new.append(group)

    def next(self, refused: Container[Request]) -> list[tuple[Precedence, int, Group]]:
        """Return the next group to try, in the form of `Turns`; empty if none is left.

        Args:
            refused: requests that need not be tried.
        """
        while (found := self._index.first(self._fits_in)) is not None:
            if found[1].request not in refused:
                break
            self.drop(found[1])
        while (due := self._next_due()) is not None and due.request in refused:
            self.drop(due)
        if due is not None:
            first = due.first()
            assert first is not None, due
            if found is None or first[0] < found[0]:
                found = first[0], due
        return [] if found is None else [(found[0], 0, found[1])]

    def drop(self, group: Group) -> None:
        """Drop a group until the round ends: its first task cannot start now."""
        self._index.hide(group)
        self._hidden.append((group, group.reserve_at))
        if group is self._due:
            self._due = None
            self._tried[group] = None

    def note_start(self, group: Group) -> None:
        """Note that the first task of a group has started."""
        self._new.append(group)

    def _fits_in(self, request: Request) -> Fits:
        """Return what may fit in the family of a request."""
        node = self._node
        free = self._allowed(request, room(node.ledger, request))
        plan, bound = node.reservation, self._bound()
        if plan is None or bound is None:
            return lambda _, least: all(map(le, least, free))
        rest = room(node.ledger, request, plan)
        return lambda turn, least: all(map(le, least, free if turn < bound else rest))

    def _allowed(self, request: Request, free: Amounts) -> Amounts:
        """Reduce what is free to what the program may take by its limits."""
        clients = self._node.clients
        client = None if clients is None else clients.of(self._client)
        # A task in a bundle is charged to its placement group.
        is_in_bundle = isinstance(request.placement_group, BundleRef)
        if client is None or not client.most or is_in_bundle:
            return free
        names = [name for name, _ in (*request.scalars, *request.devices)]
        allowed = {
            name: most - client.held.get(name, 0) for name, most in client.most.items()
        }
        limited = [
            min(amount, allowed.get(name, amount))
            for name, amount in zip(names, free, strict=False)
        ]
        return (*limited, *free[len(names) :])

    def _bound(self) -> Precedence | None:
        """Return a turn from which no task passes the reservation; None if unknown.

        The rules are those of `Reservation.lets_pass`.
        """
        node, plan = self._node, self._node.reservation
        if plan is None or node.blocked or self._index.has_children:
            return None
        if node.now < plan.until < inf and len(self._hidden) < BOUNDED_AT_ONCE:
            return None  # a task with a timeout may pass
        lane, id_ = sort_key(plan.record), plan.record.id
        if plan.record.client != self._client:
            return (lane[0], -1), id_
        return lane, id_ + 1

    def _next_due(self) -> Group | None:
        """Return the next group for which resources may be reserved."""
        node, due = self._node, self._due
        if due is not None:
            first = due.first()
            if first is None or first[1] is not due.stuck:
                due = None  # it has started
        if due is None and not self._must_wait():
            due = self._index.pop_due(node.now, self._bound())
        self._due = due
        return due

    def _must_wait(self) -> bool:
        """Return True if no further reservation is attempted in this round.

        Attempts fail while resources are held without end, and each costs O(leases).
        """
        node, clients = self._node, self._node.clients
        if sum(map(self._has_failed, self._tried)) >= FAILED_AT_ONCE:
            return True
        if clients is None or node.reservation is not None or not self._tried:
            return False
        # Perhaps the program gives way to others that may reserve resources.
        group = next(reversed(self._tried))
        first = group.first()
        is_due = group.reserve_at <= node.now
        return is_due and first is not None and not clients.bars(first[1])

    def _has_failed(self, group: Group) -> bool:
        """Return True if nothing could be reserved, or a limit bars the first task."""
        clients, first = self._node.clients, group.first()
        if group.reserve_at > self._node.now or clients is None or first is None:
            return group.reserve_at > self._node.now
        return clients.bars(first[1])

    def end(self) -> None:
        """Show all groups again, and file those that have a new first task."""
        index = self._index
        index.show([group for group, _ in self._hidden])
        fresh, index.fresh = index.fresh, []
        unfiled = [*self._new, *fresh, *([] if self._due is None else [self._due])]
        unfiled += [
            group
            for group, before in self._hidden
            if group.reserve_at != before and group not in self._tried
        ]
        for group in self._tried:
            is_postponed = self._has_failed(group)
            (index.postponed if is_postponed else unfiled).append(group)
        self._file(unfiled, is_end=True)


def is_first(node: SchedulerState, bucket: Bucket, lease: Lease | None) -> bool:
    """Return True if no task of the same program goes before a bucket's head.

    Args:
        node: the scheduler's state.
        bucket: the bucket.
        lease: only tasks count that its end would help; None: all count.
    """
    index = node.ready.indexes[bucket.group.client]
    mine = bucket.lane, bucket.head().id
    hidden: list[Group] = []
    while (found := index.first(partial(_goes_before, node, mine, lease))) is not None:
        group = found[1]
        if lease is None or would_help(node.ledger, lease, group.request):
            break
        index.hide(group)
        hidden.append(group)
    index.show(hidden)
    return found is None


def _goes_before(
    node: SchedulerState, turn: Precedence, lease: Lease | None, request: Request
) -> Fits:
    """Return what goes before a turn and may be helped by the end of a lease."""
    if lease is None:
        return lambda other, _: other < turn
    if lease.home not in node.ledger.homes(request):
        return lambda _, __: False
    if request.placement_group is not None:
        return lambda other, _: other < turn
    held = {name for name, _ in (*lease.request.scalars, *lease.request.devices)}
    names = [name for name, _ in (*request.scalars, *request.devices)]
    free = room(node.ledger, request)
    # Amounts of what the lease holds do not matter, nor of device memory.
    limits = [
        (place, free[place]) for place, name in enumerate(names) if name not in held
    ]
    return lambda other, least: (
        other < turn and all(least[place] <= most for place, most in limits)
    )
