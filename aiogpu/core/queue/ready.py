"""The tasks that wait, in a bucket for each program, shape and lane.

Every step costs the same however many tasks wait. Buckets of one program that ask for
the same resources, and differ in their environment or lane alone, are one group: where
one of them does not fit, none does. This module knows the order, not what fits.

A task that leaves a bucket before its turn stays in the deque, and is skipped when its
turn comes. Such a task is called stale here. Each task that leaves also removes a few
stale tasks from the front; where stale tasks outnumber waiting ones, it removes a few
further behind as well. So stale tasks do not pile up, and no single step is long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeVar

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.request import Lane, Request, Shape
from aiogpu.core.queue.fair_share import Client, Clients
from aiogpu.core.records import TaskRecord, TaskState, sort_key

SWEPT: Final = 4
"""How many queued tasks `Bucket.discard` examines for each task that leaves."""

SEARCHED: Final = 4096
"""Tasks that are looked at one by one, for a position or for those near the front."""

_WAITING: Final = TaskState.WAITING

Precedence = tuple[Lane, int]
"""Sorts what goes first: lane, then task id."""

ShapeKey = tuple[ClientId, Shape]
"""A program, and what its tasks ask for."""

EXPECTED: Final = 1e-3
"""Seconds that a task is assumed to take: the least, and if nothing is known of it."""

T = TypeVar("T")


def precedence(record: TaskRecord) -> Precedence:
    """Sort key over all shapes: priority, depth, then order of submission."""
    return sort_key(record), record.id


class Bucket:
    """The waiting tasks of one program, shape and lane, in order of their ids.

    `_swept` holds the front, which `discard` has cleared of stale tasks, and `_rest`
    holds the tasks behind.

    Attributes:
        size: how many wait.
        turn: the key under which the group's heap has this bucket: that of its head, or
            of an earlier head; None where the heap is not to yield the bucket.
    """

    def __init__(self, shape: Shape, lane: Lane, group: Group) -> None:
        self.shape = shape
        self.lane = lane
        self.group = group
        self.size = 0
        self.turn: Precedence | None = None
        self._swept: deque[TaskRecord] = deque()
        self._rest: deque[TaskRecord] = deque()

    def __repr__(self) -> str:
        return f"<Bucket of {self.size} asking for {self.shape.request}>"

    def __lt__(self, other: Bucket) -> bool:
        return id(self) < id(other)

    def push(self, record: TaskRecord) -> None:
        """Add a task with an id above all others."""
        self._rest.append(record)
        self.size += 1
        if self.turn is None:
            self.group.enter(self, (self.lane, record.id))

    def extend(self, records: list[TaskRecord]) -> None:
        """Add tasks with ids above all others, in order, where some wait already."""
        self._rest.extend(records)
        self.size += len(records)

    def push_back(self, record: TaskRecord) -> None:
        """Put back a task that was taken; costs O(tasks before its old place)."""
        earlier = []
        while (head := self.head()) is not None and head.id < record.id:
            earlier.append(head)
            (self._swept or self._rest).popleft()
        self._swept.appendleft(record)
        self._swept.extendleft(reversed(earlier))
        self.size += 1
        turn = precedence(record)
        if self.turn is None or turn < self.turn:
            self.group.enter(self, turn)

    def head(self) -> TaskRecord | None:
        """The first that waits, None without one."""
        for part in (self._swept, self._rest):
            while part:
                record = part[0]
                if record.state is _WAITING:
                    return record
                part.popleft()
        return None

    def pop(self) -> None:
        """Remove the head."""
        (self._swept or self._rest).popleft()
        self.size -= 1
        if not self.size:
            self.group.drop(self)

    def take(self, most: int) -> list[TaskRecord]:
        """Remove the head and those behind it of the same spec, so many at most."""
        taken: list[TaskRecord] = []
        head = self.head()
        assert head is not None, self
        part = self._swept or self._rest
        while part and len(taken) < most:
            record = part[0]
            if record.state is _WAITING:
                if record.spec is not head.spec:
                    break
                taken.append(record)
            part.popleft()
        self.size -= len(taken)
        if not self.size:
            self.group.drop(self)
        return taken

    def discard(self) -> None:
        """Note that a task waits no longer: it is in a deque, but its state says so."""
        self.size -= 1
        if not self.size:
            self.group.drop(self)
            return
        front = self._swept or self._rest
        for _ in range(SWEPT):
            # Else tasks that leave in order of their ids pile up at the front, and one
            # `head()` would have to skip them all.
            if front and front[0].state is not _WAITING:
                front.popleft()
        if len(self._swept) + len(self._rest) > 2 * self.size:
            for _ in range(min(SWEPT, len(self._rest))):
                record = self._rest.popleft()
                if record.state is _WAITING:
                    self._swept.append(record)
            if not self._rest:
                self._swept, self._rest = self._rest, self._swept

    def position(self, record: TaskRecord) -> int:
        """Return how many tasks go before one; beyond `SEARCHED` an upper estimate."""
        before = 0
        for looked, other in enumerate(chain(self._swept, self._rest)):
            if other is record:
                return before
            if looked == SEARCHED:
                break
            before += other.state is _WAITING
        place = bisect_left(self._swept, record.id, key=_id_of)
        if place == len(self._swept):
            place += bisect_left(self._rest, record.id, key=_id_of)
        return max(before, min(place, self.size - 1))

    def near(self) -> Iterator[TaskRecord]:
        """Yield tasks near the front, from the first few thousand."""
        for record in islice(chain(self._swept, self._rest), SEARCHED):
            if record.state is _WAITING:
                yield record

    def __iter__(self) -> Iterator[TaskRecord]:
        for record in chain(self._swept, self._rest):
            if record.state is _WAITING:
                yield record


def _id_of(record: TaskRecord) -> TaskId:
    return record.id


class Group:
    """The buckets of one program that ask for the same resources, in a heap.

    A bucket's head is mostly replaced by a later task. So the bucket's entry in the
    heap is corrected only when it comes to the top. An earlier head gets a new entry,
    and the old entry is dropped when it comes to the top.

    Attributes:
        request: what the tasks ask for.
        client: the program.
        size: how many buckets there are.
        stuck: the task that was first when the group last did not fit.
        reserve_at: when resources are to be reserved for `stuck`.
        is_warned: whether a stall of one of its tasks was reported; see `stalls`.
    """

    def __init__(self, queue: ReadyQueue, request: Request, client: ClientId) -> None:
        self.request = request
        self.client = client
        self.size = 0
        self.stuck: TaskRecord | None = None
        self.reserve_at = 0.0
        self.is_warned = False
        self._queue = queue
        self._turns: list[tuple[Precedence, Bucket]] = []

    def enter(self, bucket: Bucket, turn: Precedence) -> None:
        """A bucket is new, or has an earlier head than before."""
        bucket.turn = turn
        heappush(self._turns, (turn, bucket))

    def drop(self, bucket: Bucket) -> None:
        """Forget an empty bucket, and the group with its last one."""
        bucket.turn = None
        queue, key = self._queue, (self.client, bucket.shape)
        del queue.by_shape[key][bucket.lane]
        if not queue.by_shape[key]:
            del queue.by_shape[key]
        self.size -= 1
        if not self.size:
            groups = queue.of_client[self.client]
            del groups[self.request]
            if not groups:
                del queue.of_client[self.client]

    def first(self) -> tuple[Precedence, TaskRecord, Bucket] | None:
        """The task whose turn it is, None when nothing waits."""
        turns = self._turns
        while turns:
            turn, bucket = turns[0]
            head = bucket.head() if bucket.turn is turn else None
            if head is None:
                heappop(turns)
                continue
            if head.id == turn[1]:
                return turn, head, bucket
            bucket.turn = precedence(head)
            heapreplace(turns, (bucket.turn, bucket))
        return None


class ReadyQueue:
    """All waiting tasks of the node.

    Attributes:
        by_shape: of each program and shape that waits, its buckets by lane; each holds
            a task. Empty when nothing waits.
        of_client: of each program that waits, its groups by what they ask for.
        clients: the programs that share the node, None while it is one's alone.
    """

    def __init__(self) -> None:
        self.by_shape: dict[ShapeKey, dict[Lane, Bucket]] = {}
        self.of_client: dict[ClientId, dict[Request, Group]] = {}
        self.clients: Clients | None = None

    def __len__(self) -> int:
        return sum(bucket.size for bucket in self.buckets())

    def __repr__(self) -> str:
        return f"<ReadyQueue {len(self)} tasks of {len(self.by_shape)} shapes>"

    def share(self, clients: Clients) -> None:
        """Other programs join: from now on those that wait have their turns."""
        self.clients = clients
        for id_ in self.of_client:
            clients.note_wish(clients.of(id_))

    def groups(self) -> Iterator[Group]:
        """All groups, program by program."""
        for groups in self.of_client.values():
            yield from groups.values()

    def buckets(self) -> Iterator[Bucket]:
        """All buckets, shape by shape."""
        for lanes in self.by_shape.values():
            yield from lanes.values()

    def push(self, record: TaskRecord) -> None:
        """Add a new task behind those of its program, shape and lane."""
        self._bucket_for(record).push(record)

    def push_back(self, record: TaskRecord) -> None:
        """Give a task that has left the queue its old place again."""
        self._bucket_for(record).push_back(record)

    def discard(self, record: TaskRecord) -> None:
        """Note that a task waits no longer; its state says so already."""
        self._lanes_of(record)[sort_key(record)].discard()

    def _lanes_of(self, record: TaskRecord) -> dict[Lane, Bucket]:
        return self.by_shape[record.client, record.spec.shape]

    def _bucket_for(self, record: TaskRecord) -> Bucket:
        lane = record.spec.lane if record.kin is None else record.kin.lane
        lanes = self.by_shape.get((record.client, record.spec.shape))
        if lanes is not None and lane in lanes:
            return lanes[lane]
        shape, id_ = record.spec.shape, record.client
        if id_ not in self.of_client:
            self.of_client[id_] = {}
            if self.clients is not None:
                self.clients.note_wish(self.clients.of(id_))
        groups = self.of_client[id_]
        group = groups.get(shape.request)
        if group is None:
            group = groups[shape.request] = Group(self, shape.request, id_)
        group.size += 1
        bucket = Bucket(shape, lane, group)
        self.by_shape.setdefault((id_, shape), {})[lane] = bucket
        return bucket

    def group_of(self, record: TaskRecord) -> Group:
        """The group in which a task waits."""
        return self._lanes_of(record)[sort_key(record)].group

    def position(self, record: TaskRecord) -> tuple[int, int]:
        """How many of a task's program and shape go before it, and how many wait."""
        mine, lanes = sort_key(record), self._lanes_of(record)
        before = sum(bucket.size for lane, bucket in lanes.items() if lane < mine)
        count = sum(bucket.size for bucket in lanes.values())
        return before + lanes[mine].position(record), count

    def is_first(
        self, bucket: Bucket, concerns: Callable[[Request], bool] = bool
    ) -> bool:
        """Return whether nothing of its program goes before this bucket's head.

        `concerns` says of a request whether it matters here.
        """
        if len(self.by_shape) == 1:
            return True
        head = bucket.head()
        assert head is not None, bucket
        mine = precedence(head)
        for group in self.of_client[bucket.group.client].values():
            first = group.first()
            if first is not None and first[0] < mine and concerns(group.request):
                return False
        return True

    def heads_in_turn(self) -> Iterator[tuple[TaskRecord, Bucket]]:
        """Each bucket with its first task, as their turns are likely to come."""
        return self._mix(self._heads(), itemgetter(0))

    def in_turn(self) -> Iterator[TaskRecord]:
        """Tasks as their turns are likely to come.

        They are all of them, but for those far behind in a long line: so it costs
        little too where hundreds of thousands have left the midst of it.
        """
        tasks = {id_: tasks_in_turn(heads) for id_, heads in self._heads().items()}
        return self._mix(tasks, lambda record: record)

    def _heads(self) -> dict[ClientId, Iterator[tuple[TaskRecord, Bucket]]]:
        """The buckets of each program with their first tasks, in order."""
        found: dict[ClientId, list[tuple[Precedence, TaskRecord, Bucket]]] = {}
        for bucket in self.buckets():
            head = bucket.head()
            assert head is not None, bucket
            entry = precedence(head), head, bucket
            found.setdefault(bucket.group.client, []).append(entry)
        return {id_: _in_order(heads) for id_, heads in found.items()}

    def _mix(
        self, lines: dict[ClientId, Iterator[T]], record_of: Callable[[T], TaskRecord]
    ) -> Iterator[T]:
        """Lines of programs as one, as if each task held as much as is thought."""
        clients = self.clients
        if clients is None:
            yield from chain.from_iterable(lines.values())
            return
        heap: list[tuple[int, float, int, T, Client, Iterator[T]]] = []
        for id_, line in lines.items():
            client = clients.of(id_)
            # A program that holds something will have used more when others end.
            virtual_time = (
                client.virtual_time + EXPECTED * clients.held_by(client) / client.weight
            )
            entry = next(line)
            record = record_of(entry)
            heap.append(
                (sort_key(record)[0], virtual_time, record.id, entry, client, line)
            )
        heapify(heap)
        while heap:
            _, virtual_time, _, entry, client, line = heap[0]
            yield entry
            record = record_of(entry)
            mean = max(record.spec.pace.mean, EXPECTED)
            cost = clients.portion_of(record.spec.shape.request).cost
            following = next(line, None)
            if following is None:
                heappop(heap)
            else:
                record = record_of(following)
                key = (
                    sort_key(record)[0],
                    virtual_time + mean * cost / client.weight,
                    record.id,
                )
                heapreplace(heap, (*key, following, client, line))

    def any_task(self) -> TaskRecord | None:
        """Any task that waits, the first of its shape; None without one."""
        for bucket in self.buckets():
            return bucket.head()
        return None

    def __iter__(self) -> Iterator[TaskRecord]:
        for bucket in self.buckets():
            yield from bucket


def _in_order(
    heads: list[tuple[Precedence, TaskRecord, Bucket]],
) -> Iterator[tuple[TaskRecord, Bucket]]:
    """Yield buckets by the precedence of their first tasks; the first cost little."""
    heapify(heads)
    while heads:
        _, head, bucket = heappop(heads)
        yield head, bucket


def tasks_in_turn(heads: Iterator[tuple[TaskRecord, Bucket]]) -> Iterator[TaskRecord]:
    """The tasks of buckets, which come in the order of their heads, in order."""
    coming = next(heads, None)
    line: list[tuple[Precedence, TaskRecord, Iterator[TaskRecord]]] = []
    while coming or line:
        if coming and (not line or precedence(coming[0]) < line[0][0]):
            rest = coming[1].near()
            coming = next(heads, None)
            record = next(rest, None)
        else:
            _, first, rest = heappop(line)
            yield first
            record = next(rest, None)
        if record is not None:
            heappush(line, (precedence(record), record, rest))
