"""Matches waiting tasks with free resources.

One function goes through the ready tasks by priority and submission, and takes a lease
for each task that fits. Each task is started before the next is considered. A task that
does not fit blocks only tasks of its own shape, as in Ray. Other shapes overtake it,
until it has waited so long that resources are reserved for it (`reservation` in
`contention`).

Between clients that share a node, the highest priority goes first. Then a client gives
way if another client with one more task would still hold no more than the first one
holds now. Both are shares of the requested resources, divided by the clients' weights.
A client that has started no task for `LONGEST` need not give way. Among the remaining
clients the least virtual time (`fair_share`) is next. So the shares of clients differ
by one task at most. A worker that ends a task keeps its client for a `SLICE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import ClientId
from aiogpu.core.model.request import Request
from aiogpu.core.queue.fair_share import LONGEST, Account, Accounts, usage_of
from aiogpu.core.queue.ready import Bucket, Group, precedence
from aiogpu.core.records import Precedence, TaskRecord, sort_key
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.resources.placement_group import would_help
from aiogpu.core.scheduler.cancellation import evict_idle_worker
from aiogpu.core.scheduler.state import (
    SchedulerState,
    goes_before,
    is_first_of_group,
    note_stuck,
)
from aiogpu.core.scheduler.task_tree import is_disowned
from aiogpu.core.scheduler.turns import give_turn

if TYPE_CHECKING:
    from aiogpu.core.scheduler.contention.many_groups import ManyGroups
    from aiogpu.core.scheduler.state import Reservation


def place(node: SchedulerState) -> Iterator[tuple[TaskRecord, Lease]]:
    """Yield tasks from the queue, each with its lease, until nothing more fits.

    One idle worker is retired for each task that lacks only a worker process.
    """
    clients = node.clients
    node.worker_limit.refused = 0
    plan = node.reservation
    if plan is not None and not is_first_of_group(node, plan.record):
        node.reservation = None
    round_ = PlacementRound(node)
    while round_.left:
        candidate = round_.only or round_.next()
        group = candidate.turns[0][2]
        first = group.first()
        assert first is not None, group
        _, record, bucket = first
        if node.disowned and is_disowned(record):
            round_.drop_group(candidate)
            continue
        if clients is not None and clients.bars(record):
            round_.drop_group(candidate)
            continue
        refused = node.worker_limit.refused
        lease = node.take(record)
        if lease is None and node.outages and node.has_outage(record):
            round_.pass_over(candidate, bucket)
            continue
        if lease is None:
            round_.drop_group(candidate)
            if clients is not None and refused == node.worker_limit.refused:
                round_.drop_same_requests(record)
            evict_idle_worker(node)
            _reserve(node, group, record)
            if node.worker_limit.refused > refused and node.lacks_workers:
                break  # the other groups would be refused as well, each at a cost
            continue
        if node.reservation is not None and node.reservation.record is record:
            node.reservation = None
        bucket.pop()
        if record.kin is not None:
            give_turn(node, record)
        yield record, lease
        round_.advance(candidate)
    round_.end()


Turns = list[tuple[Precedence, int, Group]]
"""The groups of one program as a heap, in the order of their heads."""

SLICE: Final = 0.02
"""Seconds for which a program may keep a lease while other programs wait. A task of
another program needs another process, whose start takes about as long."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A program in a placement round.

    Attributes:
        turns: the program's groups; if it has many, the next of them alone.
        many: yields the next of many groups; None if there are few.
        client: the program's account; None if the node is not shared.
        priority: negated priority of the first task.
        task: id of the first task.
        now: the program's share of the resources that its first task requests; see
            `Accounts.share_of`.
        then: the same once the first task has started.
    """

    id: ClientId
    turns: Turns
    client: Account | None = None
    many: ManyGroups | None = None
    priority: int = 0
    task: int = 0
    now: float = 0.0
    then: float = 0.0


class PlacementRound:
    """One pass over all waiting tasks.

    Attributes:
        left: the programs that may still start a task, by id.
        only: the only program with waiting tasks; None if there are several.
    """

    def __init__(self, node: SchedulerState) -> None:
        self._node = node
        self._clients = clients = node.clients
        self.only: Candidate | None = None
        self.left: dict[ClientId, Candidate] = {}
        self._refused: set[Request] = set()
        self._passed_over: list[Bucket] = []
        self._many: list[ManyGroups] = []
        indexes = node.ready.indexes
        for id_, groups in node.ready.of_client.items():
            turns: Turns = []
            client = None if clients is None else clients.of(id_)
            self.left[id_] = candidate = Candidate(id_, turns, client)
            if indexes and id_ in indexes:
                # Imported late: few programs have so many groups.
                from aiogpu.core.scheduler.contention.many_groups import ManyGroups

                candidate.many = ManyGroups(node, id_, indexes[id_])
                self._many.append(candidate.many)
                continue
            for number, group in enumerate(groups.values()):
                first = group.first()
                assert first is not None, group
                turns.append((first[0], number, group))
            heapify(turns)
        if len(self.left) == 1:
            self.only = candidate
            if candidate.many is not None:
                self._update(candidate)
        else:
            for candidate in list(self.left.values()):
                self._update(candidate)

    def _update(self, candidate: Candidate) -> None:
        """Update a program after its first group or its leases have changed."""
        turns = candidate.turns
        if candidate.many is not None:
            turns[:] = candidate.many.next(self._refused)
        while turns and turns[0][2].request in self._refused:
            heappop(turns)
        if not turns:
            del self.left[candidate.id]
        elif candidate is not self.only:
            client = candidate.client
            assert self._clients is not None, candidate
            assert client is not None, candidate
            ((priority, _), candidate.task), _, group = turns[0]
            candidate.priority = priority
            shares = self._clients.share_of(client, group.request)
            candidate.now, candidate.then = shares

    def advance(self, candidate: Candidate) -> None:
        """Go on after the first task of a program has started or was passed over."""
        _, number, group = candidate.turns[0]
        if candidate.many is not None:
            candidate.many.note_start(group)
        after = group.first()
        if after is None:
            heappop(candidate.turns)
        else:
            heapreplace(candidate.turns, (after[0], number, group))
        self._update(candidate)

    def pass_over(self, candidate: Candidate, bucket: Bucket) -> None:
        """Skip a bucket in this round: no worker can be started for its tasks."""
        reservation, head = self._node.reservation, bucket.head()
        if reservation is not None and reservation.record is head:
            self._node.reservation = None
        bucket.turn = None
        self._passed_over.append(bucket)
        self.advance(candidate)

    def end(self) -> None:
        """Return the buckets that were passed over to their groups."""
        for many in self._many:
            many.end()
        for bucket in self._passed_over:
            bucket.group.enter(bucket, precedence(bucket.head()))

    def drop_group(self, candidate: Candidate) -> None:
        """Drop the first group of a program: its first task cannot start now."""
        _, _, group = heappop(candidate.turns)
        if candidate.many is not None:
            candidate.many.drop(group)
        self._update(candidate)

    def drop_same_requests(self, record: TaskRecord) -> None:
        """Drop all groups with the request of a task that does not fit."""
        node, request = self._node, record.spec.shape.request
        plan = node.reservation
        is_reserved = plan is not None and not plan.lets_pass(node, record)
        if not is_reserved and not node.exclusive.is_wanted:
            self._refused.add(request)
            for candidate in list(self.left.values()):
                if candidate.turns[0][2].request == request:
                    self._update(candidate)

    def next(self) -> Candidate:
        """Return the program whose turn it is.

        A program with several groups whose first task does not fit is returned first:
        the caller drops the group, and the program's share is computed for a task that
        can start.
        """
        priority = min(c.priority for c in self.left.values())
        candidates = [c for c in self.left.values() if c.priority == priority]
        if len(candidates) > 1:
            for candidate in candidates:
                if self._has_others(candidate) and not self._fits(candidate):
                    return candidate
        return self._fairest(candidates)

    def _has_others(self, candidate: Candidate) -> bool:
        if candidate.many is not None:
            return len(self._node.ready.of_client[candidate.id]) > 1
        return len(candidate.turns) > 1

    def _fits(self, candidate: Candidate) -> bool:
        first = candidate.turns[0][2].first()
        return first is not None and self._node.fits(first[1])

    def _fairest(self, candidates: list[Candidate]) -> Candidate:
        reservation = self._node.reservation
        if reservation is not None:
            for candidate in candidates:
                if candidate.task == reservation.record.id:
                    return candidate
        assert self._clients is not None, self
        floor = min(c.then for c in candidates)
        overdue = self._node.now - LONGEST
        fair = (
            (c.client.virtual_time, c.now, c.task, c)
            for c in candidates
            if c.client is not None and (c.now < floor or c.client.since <= overdue)
        )
        return min(fair)[3]


def _reserve(node: SchedulerState, group: Group, record: TaskRecord) -> None:
    """Make a reservation for the first task of a group, if its time has come.

    A reservation for another task is replaced only if this task goes before the other:
    between programs, if it has a higher priority.
    """
    present, clients = node.reservation, node.clients
    note_stuck(node, record)
    is_others = present is not None and present.record is not record
    if present is not None and not (
        present.record is record
        or goes_before(record, present.record)
        or present.needs(record)
    ):
        return
    if node.now < group.reserve_at:
        return
    is_early = node.now < group.reserve_at + LONGEST
    if clients is not None and present is None and is_early:
        for worker in node.workers:
            usage = None if worker.lease is None else usage_of(worker.lease)
            if usage is not None:
                usage.charge()
        mine = clients.of(record.client).virtual_time
        if any(clients.of(id_).virtual_time < mine for id_ in node.ready.of_client):
            return
    renewed = _make_reservation(node, group, record, None if is_others else present)
    if renewed is not None or not is_others:
        node.reservation = renewed


def _make_reservation(
    node: SchedulerState, group: Group, record: TaskRecord, before: Reservation | None
) -> Reservation | None:
    """Renew the reservation `before` of a group's first task, or make a new one.

    The time in the queue does not count while a task waits behind others of its shape:
    of a million equal tasks, each starts soon after it has become the first.
    """
    # Imported late: most programs never wait long enough.
    from aiogpu.core.scheduler.contention.reservation import (
        REPLAN_AFTER,
        is_current,
        reserve,
    )

    if before is not None and is_current(node, before):
        return before
    reservation = reserve(node, record, before)
    if reservation is None:
        group.reserve_at = node.now + REPLAN_AFTER
    elif before is not None:
        # Tasks that were let past must not delay the promised start.
        reservation.until = min(reservation.until, before.until)
    return reservation


def may_keep_lease(node: SchedulerState, lease: Lease, bucket: Bucket) -> bool:
    """Return True if a program may keep a lease for its next task; else it gives way.

    Only programs that the lease's end would help are considered.
    """
    clients, queue, head = node.clients, node.ready, bucket.head()
    assert clients is not None, node
    client = clients.of(head.client)
    usage = usage_of(lease)
    if usage is None or usage.client is not client or clients.exceeds(client):
        return False
    if usage.note_task() < SLICE:
        return True
    helped: dict[Request, bool] = {}
    rivals = []
    for group in queue.groups():
        first = None if group.client == head.client else group.first()
        if first is None or sort_key(first[1])[0] > sort_key(head)[0]:
            continue
        request = group.request
        if request not in helped:
            helped[request] = would_help(node.ledger, lease, request)
        if helped[request] and not clients.bars(first[1]):
            if sort_key(first[1])[0] < sort_key(head)[0]:
                return False
            rivals.append(first[1])
    if rivals and not _is_fairest(clients, lease, head, rivals):
        return False
    clients.note_turn(client)
    usage.begin_slice()
    return True


def _is_fairest(
    clients: Accounts, lease: Lease, head: TaskRecord, rivals: list[TaskRecord]
) -> bool:
    """Return True if the holder of a lease goes before all rivals."""
    client, request = clients.of(head.client), lease.request
    now, floor = clients.share_of(client, request, has_it=True)
    shares = []
    for record in rivals:
        other = clients.of(record.client)
        share, then = clients.share_of(other, record.spec.shape.request)
        floor = min(floor, then)
        shares.append((other.virtual_time, share, record.id, other.since))
    overdue = clients.clock.now - LONGEST
    if now >= floor:
        return False
    return not any(
        (virtual_time, share, id_) < (client.virtual_time, now, head.id)
        for virtual_time, share, id_, since in shares
        if share < floor or since <= overdue
    )
