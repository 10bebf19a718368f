"""Whose turn it is among programs that share a node.

The highest priority first, whoever has it. Within it, a program gives way to those
that, with one task more, would hold no more than it does: each share by weight, and
of what the task asks for. Among the rest it is the turn of who has had least (its
tag, see `clients`). So what programs hold differs by one task at most, and what they
have had by what was running meanwhile. Who has waited `LONGEST` gives way to nobody.
A worker that ends a task goes on with the same program for a `SLICE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final

from aiogpu.core.clients import Client, Clients
from aiogpu.core.effects import Effect
from aiogpu.core.ids import ClientId
from aiogpu.core.lease import Lease
from aiogpu.core.node import Node
from aiogpu.core.placement import keep_for, note_stuck
from aiogpu.core.ready import Bucket, Group, Precedence
from aiogpu.core.records import TaskRecord, lane_of
from aiogpu.core.resources import Request
from aiogpu.core.shared_queue import SharedQueue
from aiogpu.core.stake import LONGEST
from aiogpu.core.stopping import make_way

Turns = list[tuple[Precedence, int, Group]]
"""The groups of one program as a heap, in the order of their heads."""

SLICE: Final = 0.02
"""Seconds for which a program may go on with a lease, whoever waits: another program's
task would need another process, and its start takes about as long."""


def place_fairly(
    node: Node, now: float, effects: list[Effect]
) -> Iterator[tuple[TaskRecord, Lease]]:
    """Take tasks from the queue as `placement.place` does, in the order of turns."""
    queue, clients = node.ready, node.clients
    assert isinstance(queue, SharedQueue), queue
    assert clients is not None, node
    node.room.refused = 0
    queue.unserved.clear()
    round_ = Round(node, queue, clients)
    if not round_.stands():
        node.reservation = None
    while (one := round_.next()) is not None:
        group = one.turns[0][2]
        first = queue.first(group)
        if first is None:
            # Another program's task of the same shape could not have a worker.
            round_.leave_out(one)
            continue
        _, record, bucket = first
        if clients.bars(record):
            round_.leave_out(one)
            continue
        refused = node.room.refused
        lease = node.take(record)
        if lease is None and bucket.shape in queue.unserved:
            round_.go_on(one)
            continue
        if lease is None:
            round_.leave_out(one)
            if refused == node.room.refused:
                round_.refuse(record)
            make_way(node, now, effects)
            _reserve(node, queue, group, now)
            continue
        if node.reservation is not None and node.reservation.record is record:
            node.reservation = None
        queue.pop(bucket)
        yield record, lease
        round_.go_on(one)


@dataclass(slots=True, eq=False)
class Candidate:
    """A program in a round.

    Attributes:
        turns: its groups.
        priority: of the first of them, negated.
        task: the number of its first task.
        now, then: what it holds of what that asks for, and what it would (`share_of`).
    """

    client: Client
    turns: Turns
    priority: int = 0
    task: int = 0
    now: float = 0.0
    then: float = 0.0


class Round:
    """Who is still to be looked at, when all that waits is looked at once."""

    def __init__(self, node: Node, queue: SharedQueue, clients: Clients) -> None:
        self._node = node
        self._queue = queue
        self._clients = clients
        self._left: dict[ClientId, Candidate] = {}
        self._refused: set[Request] = set()
        for id_, groups in queue.of_client.items():
            turns: Turns = []
            for number, group in enumerate(groups.values()):
                first = group.first()
                assert first is not None, group
                turns.append((first[0], number, group))
            heapify(turns)
            self._left[id_] = one = Candidate(clients.of(id_), turns)
            self._note(one)

    def stands(self) -> bool:
        """Whether what is kept is still for the first of its kind."""
        kept = self._node.reservation
        if kept is None:
            return False
        request = kept.record.spec.shape.request
        group = self._queue.of_client.get(kept.record.client, {}).get(request)
        first = None if group is None else group.first()
        return first is not None and first[1] is kept.record

    def _note(self, one: Candidate) -> None:
        """Another group is its first, or it holds more; nothing more may fit."""
        turns = one.turns
        while turns and turns[0][2].request in self._refused:
            heappop(turns)
        if not turns:
            del self._left[one.client.id]
            return
        ((priority, _), one.task), _, group = turns[0]
        one.priority = priority
        one.now, one.then = self._clients.share_of(one.client, group.request)

    def go_on(self, one: Candidate) -> None:
        """The first task of a program has begun."""
        _, number, group = one.turns[0]
        after = self._queue.first(group)
        if after is None:
            heappop(one.turns)
        else:
            heapreplace(one.turns, (after[0], number, group))
        self._note(one)

    def leave_out(self, one: Candidate) -> None:
        """Nothing more of the first group of a program can begin."""
        heappop(one.turns)
        self._note(one)

    def refuse(self, record: TaskRecord) -> None:
        """A task does not fit: neither do others that ask for the same."""
        node, request = self._node, record.spec.shape.request
        kept = node.reservation
        is_kept_away = kept is not None and not kept.lets_pass(record)
        if not is_kept_away and not node.solitude.is_wanted:
            self._refused.add(request)
            for one in list(self._left.values()):
                if one.turns[0][2].request == request:
                    self._note(one)

    def next(self) -> Candidate | None:
        """The program whose turn it is; None when nobody is left.

        Before it come those whose first task does not fit, and has others behind it: a
        program's share is that of what it could begin with.
        """
        if not self._left:
            return None
        priority = min(one.priority for one in self._left.values())
        candidates = [one for one in self._left.values() if one.priority == priority]
        if len(candidates) > 1:
            for one in candidates:
                if len(one.turns) > 1 and not self._fits(one):
                    return one
        return self._fairest(candidates)

    def _fits(self, one: Candidate) -> bool:
        first = self._queue.first(one.turns[0][2])
        return first is not None and self._node.fits(first[1])

    def _fairest(self, candidates: list[Candidate]) -> Candidate:
        kept = self._node.reservation
        if kept is not None:
            for one in candidates:
                if one.task == kept.record.id:
                    return one
        floor = min(one.then for one in candidates)
        overdue = self._clients.now - LONGEST
        return min(
            (
                each
                for each in candidates
                if each.now < floor or each.client.since <= overdue
            ),
            key=lambda each: (each.client.tag, each.now, each.task),
        )


def _reserve(node: Node, queue: SharedQueue, group: Group, now: float) -> None:
    """Keep something for the first of a group, once it is its program's turn.

    What is kept already stays so, unless it is for a lower priority.
    """
    first, kept, clients = queue.first(group), node.reservation, node.clients
    assert first is not None, group
    assert clients is not None, node
    record = first[1]
    note_stuck(node, record, now)
    if kept is not None and kept.record is not record:
        if lane_of(record)[0] >= lane_of(kept.record)[0]:
            return
    elif kept is None and now < group.reserve_at + LONGEST:
        if now < group.reserve_at:
            return
        for worker in node.workers:
            if worker.lease is not None and worker.lease.stake is not None:
                worker.lease.stake.charge()
        mine = clients.of(record.client).tag
        if any(clients.of(id_).tag < mine for id_ in queue.of_client):
            return
    is_others = kept is not None and kept.record is not record
    found = keep_for(node, group, kept, now)
    if found is not None or not is_others:
        node.reservation = found


def may_go_on(node: Node, lease: Lease, bucket: Bucket) -> bool:
    """Whether a program may go on with a lease, or has to give way to another.

    The lease counts as given back, and only those count whom that would help.
    """
    clients, queue, head = node.clients, node.ready, bucket.head()
    assert clients is not None, node
    assert isinstance(queue, SharedQueue), queue
    assert head is not None, bucket
    client = clients.of(head.client)
    stake = lease.stake
    if stake is None or stake.client is not client or clients.exceeds(client):
        return False
    if stake.note_task() < SLICE:
        return True
    helped: dict[Request, bool] = {}
    rivals = []
    for group in queue.by_request.values():
        first = None if group.client == head.client else group.first()
        if first is None or lane_of(first[1])[0] > lane_of(head)[0]:
            continue
        request = group.request
        if request not in helped:
            helped[request] = node.ledger.would_help(lease, request)
        if helped[request] and not clients.bars(first[1]):
            if lane_of(first[1])[0] < lane_of(head)[0]:
                return False
            rivals.append(first[1])
    if rivals and not _is_fairest(clients, lease, head, rivals):
        return False
    clients.note_turn(client)
    stake.begin_slice()
    return True


def _is_fairest(
    clients: Clients, lease: Lease, head: TaskRecord, rivals: list[TaskRecord]
) -> bool:
    """Whether it is the turn of one that has a lease, and not of others."""
    client, request = clients.of(head.client), lease.request
    now, floor = clients.share_without(client, request)
    shares = []
    for record in rivals:
        other = clients.of(record.client)
        has, would = clients.share_of(other, record.spec.shape.request)
        floor = min(floor, would)
        shares.append((other.tag, has, record.id, other.since))
    overdue = clients.now - LONGEST
    if now >= floor:
        return False
    return not any(
        (tag, has, id_) < (client.tag, now, head.id)
        for tag, has, id_, since in shares
        if has < floor or since <= overdue
    )
