"""Matches what waits with what is free.

One function looks at everything that is ready and takes leases for what fits, in order
of priority and submission. Each task is started before the next is looked at. A task
that does not fit holds up those of its own shape only, as in Ray. Other shapes go past
it, until it has waited so long that what it needs is kept for it (`reservation`).

Between clients that share a node, the highest priority goes first. Then a client gives
way if another one, given one task more, would still hold no more than it holds now.
Both are shares of the requested resources, divided by the clients' weights. A client
that has started no task for `LONGEST` need not give way. Of the clients that are left,
the one with the least virtual time (`fair_share`) is next. So what clients hold differs
by one task at most. A worker that ends a task goes on with the same client for a
`SLICE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import ClientId
from aiogpu.core.model.request import Request
from aiogpu.core.queue.fair_share import LONGEST, Client, Clients, usage_of
from aiogpu.core.queue.ready import Bucket, Group, Precedence, precedence
from aiogpu.core.records import TaskRecord, TaskState, sort_key
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.resources.placement_group import would_help
from aiogpu.core.scheduler.cancellation import evict_idle_worker
from aiogpu.core.scheduler.state import SchedulerState, goes_before

if TYPE_CHECKING:
    from aiogpu.core.scheduler.state import Reservation


def place(node: SchedulerState) -> Iterator[tuple[TaskRecord, Lease]]:
    """Take tasks from the queue, each with its lease, until nothing more fits.

    If tasks lack only a worker process, as many idle workers are retired.
    """
    clients = node.clients
    node.worker_limit.refused = 0
    round_ = PlacementRound(node)
    if node.reservation is not None and not _is_first(node, node.reservation.record):
        node.reservation = None
    while round_.left:
        one = round_.only or round_.next()
        group = one.turns[0][2]
        first = group.first()
        assert first is not None, group
        _, record, bucket = first
        if clients is not None and clients.bars(record):
            round_.leave_out(one)
            continue
        refused = node.worker_limit.refused
        lease = node.take(record)
        if lease is None and node.outages and node.has_outage(record):
            round_.pass_over(one, bucket)
            continue
        if lease is None:
            round_.leave_out(one)
            if clients is not None and refused == node.worker_limit.refused:
                round_.refuse(record)
            evict_idle_worker(node)
            _reserve(node, group, record)
            continue
        if node.reservation is not None and node.reservation.record is record:
            node.reservation = None
        bucket.pop()
        yield record, lease
        round_.go_on(one)
    round_.end()


def _is_first(node: SchedulerState, record: TaskRecord) -> bool:
    """Return whether a task waits, and is the first of its group."""
    if record.state is not TaskState.WAITING:
        return False
    first = node.ready.group_of(record).first()
    return first is not None and first[1] is record


def note_stuck(node: SchedulerState, record: TaskRecord) -> None:
    """Note since when the first task of a group has not fitted."""
    group = node.ready.group_of(record)
    if group.stuck is not record and _is_first(node, record):
        group.stuck = record
        group.reserve_at = node.now + node.config.reserve_after
        if not group.is_warned:
            node.expect_stalls()


Turns = list[tuple[Precedence, int, Group]]
"""The groups of one program as a heap, in the order of their heads."""

SLICE: Final = 0.02
"""Seconds for which a program may go on with a lease, whoever waits: another program's
task would need another process, and its start takes about as long."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A program in a placement round.

    Attributes:
        turns: its groups.
        client: what is known of it; None where it has the node alone.
        priority: of the first of them, negated.
        task: the number of its first task.
        now, then: its share of what its first task requests, without that task and
            with it; see `Clients.share_of`.
    """

    id: ClientId
    turns: Turns
    client: Client | None = None
    priority: int = 0
    task: int = 0
    now: float = 0.0
    then: float = 0.0


class PlacementRound:
    """One pass over all that waits: the programs that may still start something.

    Attributes:
        left: the programs, by id.
        only: the one program that waits, if no other does; then its turn is always
            next.
    """

    def __init__(self, node: SchedulerState) -> None:
        self._node = node
        self._clients = clients = node.clients
        self.only: Candidate | None = None
        self.left: dict[ClientId, Candidate] = {}
        self._refused: set[Request] = set()
        self._passed_over: list[Bucket] = []
        for id_, groups in node.ready.of_client.items():
            turns: Turns = []
            for number, group in enumerate(groups.values()):
                first = group.first()
                assert first is not None, group
                turns.append((first[0], number, group))
            heapify(turns)
            client = None if clients is None else clients.of(id_)
            self.left[id_] = one = Candidate(id_, turns, client)
        if len(self.left) == 1:
            self.only = one
        else:
            for one in list(self.left.values()):
                self._note(one)

    def _note(self, one: Candidate) -> None:
        """Update a program after its first group or what it holds has changed."""
        turns = one.turns
        while turns and turns[0][2].request in self._refused:
            heappop(turns)
        if not turns:
            del self.left[one.id]
        elif one is not self.only:
            assert self._clients is not None, one
            assert one.client is not None, one
            ((priority, _), one.task), _, group = turns[0]
            one.priority = priority
            one.now, one.then = self._clients.share_of(one.client, group.request)

    def go_on(self, one: Candidate) -> None:
        """The first task of a program has begun, or is passed over."""
        _, number, group = one.turns[0]
        after = group.first()
        if after is None:
            heappop(one.turns)
        else:
            heapreplace(one.turns, (after[0], number, group))
        self._note(one)

    def pass_over(self, one: Candidate, bucket: Bucket) -> None:
        """Set a bucket aside for this round: no worker can be started for its tasks."""
        kept, head = self._node.reservation, bucket.head()
        if kept is not None and kept.record is head:
            self._node.reservation = None
        bucket.turn = None
        self._passed_over.append(bucket)
        self.go_on(one)

    def end(self) -> None:
        """Take back into their groups what was passed over."""
        for bucket in self._passed_over:
            head = bucket.head()
            assert head is not None, bucket
            bucket.group.enter(bucket, precedence(head))

    def leave_out(self, one: Candidate) -> None:
        """Drop the first group of a program: nothing more of it can begin."""
        heappop(one.turns)
        self._note(one)

    def refuse(self, record: TaskRecord) -> None:
        """Drop all groups that ask for the same as a task that does not fit."""
        node, request = self._node, record.spec.shape.request
        kept = node.reservation
        is_kept_away = kept is not None and not kept.lets_pass(node, record)
        if not is_kept_away and not node.exclusive.is_wanted:
            self._refused.add(request)
            for one in list(self.left.values()):
                if one.turns[0][2].request == request:
                    self._note(one)

    def next(self) -> Candidate:
        """Return the program whose turn it is.

        A program whose first task does not fit, but which has other groups, is returned
        first. That drops the group, so that its share is computed for a task that it
        can start.
        """
        priority = min(one.priority for one in self.left.values())
        candidates = [one for one in self.left.values() if one.priority == priority]
        if len(candidates) > 1:
            for one in candidates:
                if len(one.turns) > 1 and not self._fits(one):
                    return one
        return self._fairest(candidates)

    def _fits(self, one: Candidate) -> bool:
        first = one.turns[0][2].first()
        return first is not None and self._node.fits(first[1])

    def _fairest(self, candidates: list[Candidate]) -> Candidate:
        kept = self._node.reservation
        if kept is not None:
            for one in candidates:
                if one.task == kept.record.id:
                    return one
        assert self._clients is not None, self
        floor = min(one.then for one in candidates)
        overdue = self._node.now - LONGEST
        fair = (
            (one.client.virtual_time, one.now, one.task, one)
            for one in candidates
            if one.client is not None
            and (one.now < floor or one.client.since <= overdue)
        )
        return min(fair)[3]


def _reserve(node: SchedulerState, group: Group, record: TaskRecord) -> None:
    """Make a reservation for the first task of a group, if its time has come.

    What is kept already stays so, unless it is for one that goes after this one: of
    another program, one of a lower priority.
    """
    kept, clients = node.reservation, node.clients
    note_stuck(node, record)
    is_others = kept is not None and kept.record is not record
    if kept is not None and is_others and not goes_before(record, kept.record):
        return
    if node.now < group.reserve_at:
        return
    if clients is not None and kept is None and node.now < group.reserve_at + LONGEST:
        for worker in node.workers:
            usage = None if worker.lease is None else usage_of(worker.lease)
            if usage is not None:
                usage.charge()
        mine = clients.of(record.client).virtual_time
        if any(clients.of(id_).virtual_time < mine for id_ in node.ready.of_client):
            return
    found = _keep_for(node, group, record, None if is_others else kept)
    if found is not None or not is_others:
        node.reservation = found


def _keep_for(
    node: SchedulerState, group: Group, record: TaskRecord, before: Reservation | None
) -> Reservation | None:
    """Renew the reservation `before` of the first task of a group, or make one.

    The time in the queue does not count while a task waits behind others of its shape:
    of a million equal tasks, each starts soon after it has become the first.
    """
    # Loaded late: most programs never wait long enough.
    from aiogpu.core.scheduler.reservation import STANDS, reserve, stands

    if before is not None and stands(node, before):
        return before
    reservation = reserve(node, record, before)
    if reservation is None:
        group.reserve_at = node.now + STANDS
    elif before is not None:
        # Whoever was let past must not put off the moment that was promised.
        reservation.until = min(reservation.until, before.until)
    return reservation


def may_go_on(node: SchedulerState, lease: Lease, bucket: Bucket) -> bool:
    """Return whether a program may go on with a lease, or has to give way to another.

    The lease counts as given back, and only programs count that this would help.
    """
    clients, queue, head = node.clients, node.ready, bucket.head()
    assert clients is not None, node
    assert head is not None, bucket
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
    clients: Clients, lease: Lease, head: TaskRecord, rivals: list[TaskRecord]
) -> bool:
    """Return whether the holder of a lease goes before all rivals."""
    client, request = clients.of(head.client), lease.request
    now, floor = clients.share_of(client, request, has_it=True)
    shares = []
    for record in rivals:
        other = clients.of(record.client)
        has, would = clients.share_of(other, record.spec.shape.request)
        floor = min(floor, would)
        shares.append((other.virtual_time, has, record.id, other.since))
    overdue = clients.clock.now - LONGEST
    if now >= floor:
        return False
    return not any(
        (virtual_time, has, id_) < (client.virtual_time, now, head.id)
        for virtual_time, has, id_, since in shares
        if has < floor or since <= overdue
    )
