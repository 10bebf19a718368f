"""The tasks that wait, by program and shape; within these by priority and submission.

Every step costs the same however many tasks wait. Shapes of one program that ask for
the same resources, and differ in their environment alone, are one group: where one of
them does not fit, none does. This module knows the order, not what fits.

A task that leaves a `FifoQueue` before its turn stays in the deque, and is skipped when
its turn comes. Such a task is called stale here. Each task that leaves also removes a
few stale tasks from the front; where stale tasks outnumber waiting ones, it removes a
few further behind as well. So stale tasks do not pile up, and no single step is long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeVar

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.request import Lane, Request, Shape
from aiogpu.core.queue.fair_share import Client, Clients
from aiogpu.core.records import TaskRecord, TaskState, sort_key

SWEPT: Final = 4
"""How many queued tasks `note_left` examines for each task that leaves."""

SEARCHED: Final = 4096
"""Tasks that are looked at one by one, for a position or for those near the front."""

_WAITING: Final = TaskState.WAITING


class FifoQueue:
    """Tasks in order of their ids.

    `_swept` holds the front, which `note_left` has cleared of stale tasks, and `_rest`
    holds the tasks behind. `_left` counts the stale tasks in both.
    """

    def __init__(self) -> None:
        self._swept: deque[TaskRecord] = deque()
        self._rest: deque[TaskRecord] = deque()
        self._left = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._swept) + len(self._rest) - self._left

    def push(self, record: TaskRecord) -> None:
        """Add a task with an id above all others."""
        self._rest.append(record)

    def extend(self, records: Iterable[TaskRecord]) -> None:
        """Add tasks with ids above all others, in order of their ids."""
        self._rest.extend(records)

    def push_back(self, record: TaskRecord) -> None:
        """Put back a task that was taken; costs O(tasks before its old place)."""
        earlier = []
        while (head := self.head()) is not None and head.id < record.id:
            earlier.append(head)
            self.pop()
        self._swept.appendleft(record)
        self._swept.extendleft(reversed(earlier))

    def head(self) -> TaskRecord | None:
        """The first that waits, None without one."""
        for part in (self._swept, self._rest):
            while part:
                record = part[0]
                if record.state is _WAITING:
                    return record
                part.popleft()
                self._left -= 1
        return None

    def pop(self) -> None:
        """Remove the head."""
        (self._swept or self._rest).popleft()

    def take(self, most: int) -> list[TaskRecord]:
        """Remove the head and those behind it of the same spec, so many at most."""
        taken: list[TaskRecord] = []
        head = self.head()
        assert head is not None, "the lane is empty"
        part = self._swept or self._rest
        while part and len(taken) < most:
            record = part[0]
            if record.state is not _WAITING:
                self._left -= 1
            elif record.spec is head.spec:
                taken.append(record)
            else:
                break
            part.popleft()
        return taken

    def note_left(self) -> None:
        """Count one stale task: it is in a deque but no longer waits."""
        self._left += 1
        front = self._swept or self._rest
        for _ in range(SWEPT):
            # Else tasks that leave in order of their ids pile up at the front, and one
            # `head()` would have to skip them all.
            if front and front[0].state is not _WAITING:
                front.popleft()
                self._left -= 1
        if self._left > len(self):
            for _ in range(min(SWEPT, len(self._rest))):
                record = self._rest.popleft()
                if record.state is _WAITING:
                    self._swept.append(record)
                else:
                    self._left -= 1
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
        return max(before, min(place, len(self) - 1))

    def near(self) -> Iterator[TaskRecord]:
        """Those that wait near the front; of the first some thousands, not of all."""
        for record in islice(chain(self._swept, self._rest), SEARCHED):
            if record.state is _WAITING:
                yield record

    def __iter__(self) -> Iterator[TaskRecord]:
        for part in (self._swept, self._rest):
            for record in part:
                if record.state is _WAITING:
                    yield record


def _id_of(record: TaskRecord) -> TaskId:
    return record.id


Precedence = tuple[Lane, int]
"""Sorts what goes first: lane, then task id."""

BucketKey = tuple[ClientId, Shape]
"""What tasks of one bucket have in common."""

EXPECTED: Final = 1e-3
"""Seconds that a task is assumed to take: the least, and if nothing is known of it."""

T = TypeVar("T")


def precedence(record: TaskRecord) -> Precedence:
    """Sort key over all shapes: priority, depth, then order of submission."""
    return sort_key(record), record.id


class Bucket:
    """The waiting tasks of one shape.

    Attributes:
        size: how many wait.
        turn: the key under which the group's heap has this bucket: that of its head, or
            of an earlier head; None once the bucket is dropped.
    """

    def __init__(self, shape: Shape, group: Group) -> None:
        self.shape = shape
        self.group = group
        self.size = 0
        self.turn: Precedence | None = None
        self._lanes: dict[Lane, FifoQueue] = {}
        self._order: list[Lane] = []

    def __repr__(self) -> str:
        return f"<Bucket of {self.size} asking for {self.shape.request}>"

    def __lt__(self, other: Bucket) -> bool:
        return id(self) < id(other)

    def push(self, record: TaskRecord) -> None:
        """Add a new task behind those of its lane."""
        self.size += 1
        lane = self._lanes.get(
            record.spec.lane if record.kin is None else record.kin.lane
        )
        if lane is None:
            self._add_lane(record).push(record)
            self._note(record)
        else:
            lane.push(record)

    def extend(self, records: list[TaskRecord]) -> None:
        """Add new tasks of one spec, which have no kin, behind those of their lane."""
        first, *rest = records
        self.push(first)
        self._lanes[first.spec.lane].extend(rest)
        self.size += len(rest)

    def push_back(self, record: TaskRecord) -> None:
        """Give a task that has left the queue its old place again."""
        self.size += 1
        lane = self._lanes.get(sort_key(record))
        if lane is None:
            lane = self._add_lane(record)
        lane.push_back(record)
        self._note(record)

    def _add_lane(self, record: TaskRecord) -> FifoQueue:
        key = sort_key(record)
        lane = self._lanes[key] = FifoQueue()
        insort(self._order, key)
        return lane

    def _note(self, record: TaskRecord) -> None:
        """Enter the bucket in its group's heap anew if this task is its new first."""
        turn = precedence(record)
        if self.turn is None or turn < self.turn:
            self.group.enter(self, turn)

    def head(self) -> TaskRecord | None:
        """The task whose turn it is, None when nothing waits."""
        while self._order:
            record = self._lanes[self._order[0]].head()
            if record is not None:
                return record
            del self._lanes[self._order.pop(0)]
        return None

    def pop(self) -> None:
        """Remove the head."""
        self._lanes[self._order[0]].pop()
        self.size -= 1

    def take(self, most: int) -> list[TaskRecord]:
        """Remove the head and those behind it of the same spec, so many at most."""
        taken = self._lanes[self._order[0]].take(most)
        self.size -= len(taken)
        return taken

    def discard(self, record: TaskRecord) -> None:
        """Note that a task waits no longer; its state says so already."""
        self.size -= 1
        self._lanes[sort_key(record)].note_left()

    def position(self, record: TaskRecord) -> int:
        """How many of this shape go before it. Costs at most a search by halves."""
        before = 0
        for key in self._order:
            if key == sort_key(record):
                return before + self._lanes[key].position(record)
            before += len(self._lanes[key])
        return before

    def near(self) -> Iterator[TaskRecord]:
        """Those whose turn comes first; some thousands of each lane at most."""
        for key in self._order:
            yield from self._lanes[key].near()

    def oldest(self) -> float:
        """Return when the one that has waited longest was submitted. Costs O(lanes)."""
        heads = (lane.head() for lane in self._lanes.values())
        return min(head.since for head in heads if head is not None)

    def __iter__(self) -> Iterator[TaskRecord]:
        for key in self._order:
            yield from self._lanes[key]


class Group:
    """The buckets of one program that ask for the same resources, in a heap.

    A bucket's head is mostly replaced by a later task. So the bucket's entry in the
    heap is corrected only when it comes to the top. An earlier head gets a new entry,
    and the old entry is dropped when it comes to the top.

    Attributes:
        client: the program.
        size: how many buckets there are.
        stuck: the task that was first when the group last did not fit.
        reserve_at: when resources are to be reserved for `stuck`.
        is_warned: whether a stall of one of its tasks was reported; see `stalls`.
    """

    def __init__(self, request: Request, client: ClientId) -> None:
        self.request = request
        self.client = client
        self.size = 0
        self.stuck: TaskRecord | None = None
        self.reserve_at = 0.0
        self.is_warned = False
        self._turns: list[tuple[Precedence, Bucket]] = []

    def enter(self, bucket: Bucket, turn: Precedence) -> None:
        """A bucket is new, or has an earlier head than before."""
        bucket.turn = turn
        heappush(self._turns, (turn, bucket))

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

    def in_turn(self) -> Iterator[tuple[Precedence, TaskRecord, Bucket]]:
        """The heads of all buckets, in order; changes nothing but what `head` does.

        The heap is walked by another one, of the places where the next may stand, so
        the first few cost little however many there are.
        """
        turns = self._turns
        line: list[tuple[Precedence, int, Bucket]] = []
        following: tuple[int, ...] = (0,)
        while True:
            for place in following:
                if place < len(turns):
                    turn, bucket = turns[place]
                    heappush(line, (turn, place, bucket))
            if not line:
                return
            turn, place, bucket = heappop(line)
            head: TaskRecord | None = None
            if place < 0:
                following, head = (), bucket.head()
            else:
                following = (2 * place + 1, 2 * place + 2)
                if bucket.turn is turn:
                    head = bucket.head()
            if head is not None and head.id == turn[1]:
                yield turn, head, bucket
            elif head is not None:
                heappush(line, (precedence(head), -1, bucket))


class ReadyQueue:
    """All waiting tasks of the node.

    Attributes:
        by_shape: the buckets that hold a task; empty when nothing waits.
        of_client: of each program that waits, its groups by what they ask for.
        clients: the programs that share the node, None while it is one's alone.
        unserved: shapes whose tasks are passed over: no worker can be started for
            their environments, and none is idle. Each placement round fills it anew.
    """

    def __init__(self) -> None:
        self.unserved: set[Shape] = set()
        self.by_shape: dict[BucketKey, Bucket] = {}
        self.of_client: dict[ClientId, dict[Request, Group]] = {}
        self.clients: Clients | None = None

    def __len__(self) -> int:
        return sum(bucket.size for bucket in self.by_shape.values())

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

    def push(self, record: TaskRecord) -> None:
        """Add a new task behind those of its program, shape and lane."""
        bucket = self.by_shape.get((record.client, record.spec.shape))
        (bucket or self._add(record)).push(record)

    def push_back(self, record: TaskRecord) -> None:
        """Give a task that has left the queue its old place again."""
        bucket = self.by_shape.get((record.client, record.spec.shape))
        (bucket or self._add(record)).push_back(record)

    def _add(self, record: TaskRecord) -> Bucket:
        shape, id_ = record.spec.shape, record.client
        if id_ not in self.of_client:
            self.of_client[id_] = {}
            if self.clients is not None:
                self.clients.note_wish(self.clients.of(id_))
        groups = self.of_client[id_]
        group = groups.get(shape.request)
        if group is None:
            group = groups[shape.request] = Group(shape.request, id_)
        group.size += 1
        bucket = self.by_shape[id_, shape] = Bucket(shape, group)
        return bucket

    def pop(self, bucket: Bucket) -> None:
        """Remove the head of a bucket."""
        bucket.pop()
        if bucket.size == 0:
            self._drop(bucket)

    def take(self, bucket: Bucket, most: int) -> list[TaskRecord]:
        """Remove the head of a bucket and those like it behind, so many at most."""
        taken = bucket.take(most)
        if bucket.size == 0:
            self._drop(bucket)
        return taken

    def discard(self, record: TaskRecord) -> None:
        """Note that a task waits no longer; its state says so already."""
        bucket = self.bucket_of(record)
        bucket.discard(record)
        if bucket.size == 0:
            self._drop(bucket)

    def bucket_of(self, record: TaskRecord) -> Bucket:
        """Where a waiting task stands."""
        return self.by_shape[record.client, record.spec.shape]

    def first(self, group: Group) -> tuple[Precedence, TaskRecord, Bucket] | None:
        """The task of a group whose turn it is, None if all are passed over."""
        if not self.unserved:
            return group.first()
        for turn in group.in_turn():
            if not self.passes_over(turn[1]):
                return turn
        return None

    def passes_over(self, record: TaskRecord) -> bool:
        """Whether no worker can be started for a task; a lease needs none."""
        return record.spec.shape in self.unserved and not record.spec.is_lease

    def _drop(self, bucket: Bucket) -> None:
        group = bucket.group
        bucket.turn = None
        del self.by_shape[group.client, bucket.shape]
        group.size -= 1
        if group.size == 0:
            groups = self.of_client[group.client]
            del groups[group.request]
            if not groups:
                del self.of_client[group.client]

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
            first = self.first(group)
            if first is not None and first[0] < mine and concerns(group.request):
                return False
        return True

    def heads_in_turn(self) -> Iterator[tuple[TaskRecord, Bucket]]:
        """Each bucket with its first task, as their turns are likely to come."""
        heads = {
            id_: heads_in_turn(groups.values())
            for id_, groups in self.of_client.items()
        }
        return self._mix(heads, itemgetter(0))

    def in_turn(self) -> Iterator[TaskRecord]:
        """Tasks as their turns are likely to come; the first few cost little.

        They are all of them, but for those far behind in a long line: so it costs
        little too where hundreds of thousands have left the midst of it.
        """
        tasks = {
            id_: tasks_in_turn(heads_in_turn(groups.values()))
            for id_, groups in self.of_client.items()
        }
        return self._mix(tasks, lambda record: record)

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

    def some(self) -> TaskRecord | None:
        """Any task that waits, the first of its shape; None without one."""
        for bucket in self.by_shape.values():
            return bucket.head()
        return None

    def __iter__(self) -> Iterator[TaskRecord]:
        for bucket in self.by_shape.values():
            yield from bucket


def heads_in_turn(groups: Iterable[Group]) -> Iterator[tuple[TaskRecord, Bucket]]:
    """The buckets of some groups with their first tasks, in the order of those."""
    heads = [group.in_turn() for group in groups]
    for _, head, bucket in merge(*heads, key=itemgetter(0)):
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
