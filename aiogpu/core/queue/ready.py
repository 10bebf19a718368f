"""The waiting tasks, in a bucket for each program, shape and lane.

A step costs at most the logarithm of the number of waiting tasks. Buckets of one
program with the same request, which differ only in environment or lane, form a group:
if one does not fit, none does. So do placement groups with equal bundles. This module
knows the order, not what fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, TypeVar

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.request import Lane, PlacementGroupSpec, Request, Shape
from aiogpu.core.queue.fair_share import Account, Accounts
from aiogpu.core.records import Precedence, TaskRecord, sort_key

if TYPE_CHECKING:
    from aiogpu.core.queue.group_index import GroupIndex

FEW: Final = 16
"""Groups of one program that are looked at one by one; more have an index."""

CHUNK: Final = 512
"""Tasks in one list of a bucket. Adding to or removing from the middle of such a list
takes less than a microsecond."""

ShapeKey = tuple[ClientId, Shape]
"""A program, and the shape of its tasks."""

EXPECTED: Final = 1e-3
"""Seconds that a task is assumed to take, at least and if its duration is unknown."""

T = TypeVar("T")


def precedence(record: TaskRecord) -> Precedence:
    """Return the sort key over all shapes: priority, depth, order of submission."""
    return sort_key(record), record.id


_id: Final[Callable[[TaskRecord], TaskId]] = attrgetter("id")


def _last_id(chunk: list[TaskRecord]) -> TaskId:
    return chunk[-1].id


class Bucket:
    """The waiting tasks of one program, shape and lane, in order of their ids.

    The tasks are in lists of about `CHUNK` tasks each. None of the lists is empty.

    Attributes:
        size: the number of waiting tasks.
        turn: the bucket's key in the group's heap: the key of its head or of an
            earlier head; None if the heap must not yield the bucket.
    """

    def __init__(self, shape: Shape, lane: Lane, group: Group) -> None:
        self.shape = shape
        self.lane = lane
        self.group = group
        self.size = 0
        self.turn: Precedence | None = None
        self._chunks: list[list[TaskRecord]] = []

    def __repr__(self) -> str:
        return f"<Bucket of {self.size} asking for {self.shape.request}>"

    def __lt__(self, other: Bucket) -> bool:
        return id(self) < id(other)

    def push(self, record: TaskRecord) -> None:
        """Add a task with an id above all others."""
        chunks = self._chunks
        if chunks and len(chunks[-1]) < CHUNK:
            chunks[-1].append(record)
        else:
            chunks.append([record])
        self.size += 1
        if self.turn is None:
            self.group.enter(self, (self.lane, record.id))

    def extend(self, records: list[TaskRecord]) -> None:
        """Add tasks with ids above all others, in order; the bucket is not empty."""
        room = max(CHUNK - len(self._chunks[-1]), 0)
        self._chunks[-1] += records[:room]
        for start in range(room, len(records), CHUNK):
            self._chunks.append(records[start : start + CHUNK])
        self.size += len(records)

    def push_back(self, record: TaskRecord) -> None:
        """Return a task to its place."""
        chunks = self._chunks
        if not chunks or record.id > _last_id(chunks[-1]):
            return self.push(record)
        place, index = self._find(record)
        chunk = chunks[place]
        chunk.insert(index, record)
        if len(chunk) > 2 * CHUNK:
            chunks[place : place + 1] = chunk[:CHUNK], chunk[CHUNK:]
        self.size += 1
        turn = self.lane, record.id
        if self.turn is None or turn < self.turn:
            self.group.enter(self, turn)
        return None

    def _find(self, record: TaskRecord) -> tuple[int, int]:
        """Return the list and the index where a task is, or where it belongs."""
        place = bisect_left(self._chunks, record.id, key=_last_id)
        return place, bisect_left(self._chunks[place], record.id, key=_id)

    def head(self) -> TaskRecord:
        """Return the first task; the bucket is not empty."""
        return self._chunks[0][0]

    def pop(self) -> None:
        """Remove the head."""
        chunk = self._chunks[0]
        del chunk[0]
        if not chunk:
            del self._chunks[0]
        self.size -= 1
        if not self.size:
            self.group.drop(self)

    def take(self, most: int) -> list[TaskRecord]:
        """Remove the head and up to `most` - 1 tasks of the same spec behind it."""
        chunk = self._chunks[0]
        spec = chunk[0].spec
        count = 1
        while count < len(chunk) and count < most and chunk[count].spec is spec:
            count += 1
        taken = chunk[:count]
        del chunk[:count]
        if not chunk:
            del self._chunks[0]
        self.size -= count
        if not self.size:
            self.group.drop(self)
        return taken

    def discard(self, record: TaskRecord) -> None:
        """Remove a task that no longer waits."""
        place, index = self._find(record)
        chunk = self._chunks[place]
        assert chunk[index] is record, record
        del chunk[index]
        if not chunk:
            del self._chunks[place]
        self.size -= 1
        if not self.size:
            self.group.drop(self)

    def position(self, record: TaskRecord) -> int:
        """Return how many tasks go before a task."""
        place, index = self._find(record)
        return sum(map(len, self._chunks[:place])) + index

    def __iter__(self) -> Iterator[TaskRecord]:
        return chain.from_iterable(self._chunks)


def _is_of_child(turn: Precedence) -> bool:
    (_, depth), _ = turn
    return depth != 0


class Group:
    """The buckets of one program with the same request, in a heap.

    A bucket's head is mostly replaced by a later task, so the bucket's entry in the
    heap is corrected only when it comes to the top. An earlier head gets a new entry;
    the old entry is dropped when it comes to the top.

    Attributes:
        key: the request, or the strategy and the bundles of placement groups.
        request: the request of the tasks, or of one of the placement groups.
        client: the program.
        size: the number of buckets.
        stuck: the first task, when the group last did not fit.
        reserve_at: when to reserve resources for `stuck`.
        is_warned: a stall of the group was reported (`scheduler.contention.shortage`).
        index: the index of the program's groups; None if it has few.
    """

    def __init__(
        self, queue: ReadyQueue, key: Hashable, request: Request, client: ClientId
    ) -> None:
        self.key = key
        self.request = request
        self.client = client
        self.size = 0
        self.stuck: TaskRecord | None = None
        self.reserve_at = 0.0
        self.is_warned = False
        self.index: GroupIndex[Group] | None = None
        self._queue = queue
        self._turns: list[tuple[Precedence, Bucket]] = []

    def enter(self, bucket: Bucket, turn: Precedence) -> None:
        """Add a bucket that is new or has an earlier head than before."""
        bucket.turn = turn
        heappush(self._turns, (turn, bucket))
        if self.index is not None:
            # The turn of the group's first task, perhaps of another bucket; or an
            # earlier turn, which the index corrects when it finds the group.
            self.index.note(self, self._turns[0][0], has_child=_is_of_child(turn))

    def note_in_index(self) -> None:
        """Let a new index find the group, unless it has no task."""
        first = self.first()
        if first is not None and self.index is not None:
            has_child = any(_is_of_child(turn) for turn, _ in self._turns)
            self.index.note(self, first[0], has_child=has_child)

    def drop(self, bucket: Bucket) -> None:
        """Forget an empty bucket, and the group with its last bucket."""
        bucket.turn = None
        queue, key = self._queue, (self.client, bucket.shape)
        del queue.by_shape[key][bucket.lane]
        if not queue.by_shape[key]:
            del queue.by_shape[key]
            if bucket.shape.request.alternatives:
                del queue.flexible[key]
        del queue.rotations[self.client][bucket]
        self.size -= 1
        if not self.size:
            groups = queue.of_client[self.client]
            del groups[self.key]
            if self.index is not None:
                self.index.discard(self)
            if not groups:
                queue.indexes.pop(self.client, None)
                del queue.of_client[self.client]
                del queue.rotations[self.client]

    def first(self) -> tuple[Precedence, TaskRecord, Bucket] | None:
        """Return the group's first task with key and bucket; None if it is empty."""
        turns = self._turns
        while turns:
            turn, bucket = turns[0]
            if bucket.turn is not turn:
                heappop(turns)
                continue
            head = bucket.head()
            if head.id == turn[1]:
                return turn, head, bucket
            bucket.turn = bucket.lane, head.id
            heapreplace(turns, (bucket.turn, bucket))
        return None


def _group_key(request: Request) -> Hashable:
    placement_group = request.placement_group
    if isinstance(placement_group, PlacementGroupSpec):
        return placement_group.strategy, placement_group.bundles
    return request


class Rotation(OrderedDict[Bucket, None]):
    """The buckets of one program in the order in which they have turns.

    Attributes:
        tree_begun: when a task that probably waits for children last had its turn.
    """

    tree_begun: float | None = None


class ReadyQueue:
    """All waiting tasks of the node.

    Attributes:
        by_shape: for each program and shape with waiting tasks, its buckets by lane;
            no bucket is empty.
        of_client: for each program with waiting tasks, its groups by key.
        rotations: for each such program, its buckets in the order in which they have
            turns; see `scheduler.turns`.
        indexes: for each program that has, or had, more than `FEW` groups since its
            queue was last empty, their index.
        clients: the programs that share the node; None if one program has it.
        flexible: the keys of `by_shape` whose tasks have several requests.
    """

    def __init__(self) -> None:
        self.flexible: dict[ShapeKey, None] = {}
        self.by_shape: dict[ShapeKey, dict[Lane, Bucket]] = {}
        self.of_client: dict[ClientId, dict[Hashable, Group]] = {}
        self.rotations: dict[ClientId, Rotation] = {}
        self.indexes: dict[ClientId, GroupIndex[Group]] = {}
        self.clients: Accounts | None = None

    def __len__(self) -> int:
        return sum(bucket.size for bucket in self.buckets())

    def __repr__(self) -> str:
        return f"<ReadyQueue {len(self)} tasks of {len(self.by_shape)} shapes>"

    def share(self, clients: Accounts) -> None:
        """Begin to take turns between programs."""
        self.clients = clients
        for id_ in self.of_client:
            clients.note_wish(clients.of(id_))

    def groups(self) -> Iterator[Group]:
        """Yield all groups, program by program."""
        for groups in self.of_client.values():
            yield from groups.values()

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets, shape by shape."""
        for lanes in self.by_shape.values():
            yield from lanes.values()

    def push(self, record: TaskRecord) -> None:
        """Add a new task behind the tasks of its program, shape and lane."""
        self._bucket_for(record).push(record)

    def push_back(self, record: TaskRecord) -> None:
        """Return a task that has left the queue to its old place."""
        self._bucket_for(record).push_back(record)

    def discard(self, record: TaskRecord) -> None:
        """Remove a task that no longer waits."""
        self._lanes_of(record)[sort_key(record)].discard(record)

    def has_group_for(self, record: TaskRecord) -> bool:
        """Return True if tasks of the group wait to which a new task belongs."""
        key = _group_key(record.spec.shape.request)
        return key in self.of_client.get(record.client, {})

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
            self.rotations[id_] = Rotation()
            if self.clients is not None:
                self.clients.note_wish(self.clients.of(id_))
        groups = self.of_client[id_]
        key: Hashable = shape.request
        if shape.request.placement_group is not None:
            key = _group_key(shape.request)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(self, key, shape.request, id_)
            if len(groups) > FEW or id_ in self.indexes:
                self._add_to_index(group, groups)
        group.size += 1
        bucket = Bucket(shape, lane, group)
        self.rotations[id_][bucket] = None
        self.by_shape.setdefault((id_, shape), {})[lane] = bucket
        if shape.request.alternatives:
            self.flexible[id_, shape] = None
        return bucket

    def _add_to_index(self, group: Group, groups: dict[Hashable, Group]) -> None:
        """Let the index find a new group once it has a task, and all others."""
        index = self.indexes.get(group.client)
        if index is None:
            # Imported late: few programs have so many different requests.
            from aiogpu.core.queue.group_index import GroupIndex

            index = self.indexes[group.client] = GroupIndex()
            for other in groups.values():
                other.index = index
                other.note_in_index()
        group.index = index

    def group_of(self, record: TaskRecord) -> Group:
        """Return the group in which a task waits."""
        return self._lanes_of(record)[sort_key(record)].group

    def position(self, record: TaskRecord) -> tuple[int, int]:
        """Return how many tasks of its program and shape go before a task, and wait."""
        mine, lanes = sort_key(record), self._lanes_of(record)
        before = sum(bucket.size for lane, bucket in lanes.items() if lane < mine)
        count = sum(bucket.size for bucket in lanes.values())
        return before + lanes[mine].position(record), count

    def is_first(
        self, bucket: Bucket, concerns: Callable[[Request], bool] = bool
    ) -> bool:
        """Return True if no other group's task goes before this bucket's head.

        Only groups of the same program count, and only if `concerns(request)` is true.
        """
        if len(self.by_shape) == 1:
            return True
        mine = bucket.lane, bucket.head().id
        for group in self.of_client[bucket.group.client].values():
            first = group.first()
            if first is not None and first[0] < mine and concerns(group.request):
                return False
        return True

    def heads_in_turn(self) -> Iterator[tuple[TaskRecord, Bucket]]:
        """Yield the first task of each bucket, with the bucket, in expected order."""
        return self._mix(self._heads(), itemgetter(0))

    def in_turn(self) -> Iterator[TaskRecord]:
        """Yield the waiting tasks in the order in which they will probably start."""
        tasks = {id_: tasks_in_turn(heads) for id_, heads in self._heads().items()}
        return self._mix(tasks, lambda record: record)

    def _heads(self) -> dict[ClientId, Iterator[tuple[TaskRecord, Bucket]]]:
        """Return, for each program, its buckets with their first tasks, in order."""
        heads_of: dict[ClientId, list[tuple[Precedence, TaskRecord, Bucket]]] = {}
        for bucket in self.buckets():
            head = bucket.head()
            entry = precedence(head), head, bucket
            heads_of.setdefault(bucket.group.client, []).append(entry)
        return {id_: _in_order(heads) for id_, heads in heads_of.items()}

    def _mix(
        self, lines: dict[ClientId, Iterator[T]], record_of: Callable[[T], TaskRecord]
    ) -> Iterator[T]:
        """Merge the programs' queues in the order in which turns will probably come.

        Assumes that each task takes its estimated duration.
        """
        clients = self.clients
        if clients is None:
            yield from chain.from_iterable(lines.values())
            return
        heap: list[tuple[int, float, int, T, Account, Iterator[T]]] = []
        for id_, line in lines.items():
            client = clients.of(id_)
            # A program that holds leases will have used more when others end.
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
        """Return any waiting task that is the first of its shape, or None."""
        for bucket in self.buckets():
            return bucket.head()
        return None

    def __iter__(self) -> Iterator[TaskRecord]:
        for bucket in self.buckets():
            yield from bucket


def _in_order(
    heads: list[tuple[Precedence, TaskRecord, Bucket]],
) -> Iterator[tuple[TaskRecord, Bucket]]:
    """Yield buckets by the precedence of their first tasks; sorts lazily."""
    heapify(heads)
    while heads:
        _, head, bucket = heappop(heads)
        yield head, bucket


def tasks_in_turn(heads: Iterator[tuple[TaskRecord, Bucket]]) -> Iterator[TaskRecord]:
    """Merge the tasks of buckets that come in the order of their heads."""
    upcoming = next(heads, None)
    heap: list[tuple[Precedence, TaskRecord, Iterator[TaskRecord]]] = []
    while upcoming or heap:
        if upcoming and (not heap or precedence(upcoming[0]) < heap[0][0]):
            tasks = iter(upcoming[1])
            upcoming = next(heads, None)
            record = next(tasks, None)
        else:
            _, first, tasks = heappop(heap)
            yield first
            record = next(tasks, None)
        if record is not None:
            heappush(heap, (precedence(record), record, tasks))
