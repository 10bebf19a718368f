"""What waits where several programs share a node: each has its own lines.

Inside a program the order is that of `ready`. Between programs it is made when it is
asked for (`fairness`), since it changes with all that they get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heapreplace
from heapq import heappop as pop_first
from typing import Final, TypeVar

from aiogpu.core.clients import Client, Clients
from aiogpu.core.ids import ClientId
from aiogpu.core.ready import (
    Bucket,
    Group,
    ReadyQueue,
    heads_in_turn,
    precedence,
    tasks_in_turn,
)
from aiogpu.core.records import TaskRecord, lane_of
from aiogpu.core.resources import Request

T = TypeVar("T")

EXPECTED: Final = 1e-3
"""Seconds that a task is thought to take at least, and of which nothing is known."""


class SharedQueue(ReadyQueue):
    """All waiting tasks of the node, each in a line of its program.

    Attributes:
        of_client: of each program that waits, its groups by what they ask for.
    """

    def __init__(self, clients: Clients, records: Iterable[TaskRecord]) -> None:
        super().__init__()
        self.of_client: dict[ClientId, dict[Request, Group]] = {}
        self._clients = clients
        for record in sorted(records, key=lambda record: record.id):
            self.push(record)

    def push(self, record: TaskRecord) -> None:
        """Add a new task behind those of its program, shape and lane."""
        self._line_of(record).push(record)

    def push_back(self, record: TaskRecord) -> None:
        """Give a task that has left the queue its old place again."""
        self._line_of(record).push_back(record)

    def _line_of(self, record: TaskRecord) -> Bucket:
        shape, id_ = record.spec.shape, record.client
        bucket = self.by_shape.get((id_, shape))
        if bucket is not None:
            return bucket
        groups = self.of_client.get(id_)
        if groups is None:
            groups = self.of_client[id_] = {}
            client = self._clients.of(id_)
            self._clients.note_wish(client)
            client.is_waiting = True
        group = groups.get(shape.request)
        if group is None:
            group = groups[shape.request] = Group(shape.request, id_)
            self.by_request[group.ask] = group
        group.size += 1
        bucket = self.by_shape[id_, shape] = Bucket(shape, group, (id_, shape))
        return bucket

    def bucket_of(self, record: TaskRecord) -> Bucket:
        """Where a waiting task stands."""
        return self.by_shape[record.client, record.spec.shape]

    def discard(self, record: TaskRecord) -> None:
        """Note that a task waits no longer; its state says so already."""
        bucket = self.bucket_of(record)
        bucket.discard(record)
        if bucket.size == 0:
            self._drop(bucket)

    def _drop(self, bucket: Bucket) -> None:
        super()._drop(bucket)
        group = bucket.group
        if group.size == 0:
            groups = self.of_client[group.client]
            del groups[group.request]
            if not groups:
                del self.of_client[group.client]
                self._clients.note_rest(group.client)

    def is_first(
        self, bucket: Bucket, concerns: Callable[[Request], bool] = bool
    ) -> bool:
        """Whether nothing of its program goes before this bucket's head."""
        head = bucket.head()
        assert head is not None, bucket
        mine = precedence(head)
        for group in self.of_client[bucket.group.client].values():
            first = self.first(group)
            if first is not None and first[0] < mine and concerns(group.request):
                return False
        return True

    def heads_in_turn(self) -> Iterator[tuple[TaskRecord, Bucket]]:
        """Each line with its first task, as their turns are likely to come."""
        heads = {
            id_: heads_in_turn(groups.values())
            for id_, groups in self.of_client.items()
        }
        return self._mixed(heads, lambda pair: pair[0])

    def in_turn(self) -> Iterator[TaskRecord]:
        """Tasks as their turns are likely to come; the first few cost little."""
        tasks = {
            id_: tasks_in_turn(heads_in_turn(groups.values()))
            for id_, groups in self.of_client.items()
        }
        return self._mixed(tasks, lambda record: record)

    def _mixed(
        self, lines: dict[ClientId, Iterator[T]], record_of: Callable[[T], TaskRecord]
    ) -> Iterator[T]:
        """Lines of programs as one, as if each task held as much as is thought."""
        heap: list[tuple[int, float, int, T, Client, Iterator[T]]] = []
        for id_, line in lines.items():
            client = self._clients.of(id_)
            # Who holds something is likely to have had more when others end.
            tag = client.tag + EXPECTED * self._clients.held_by(client) / client.weight
            entry = next(line)
            record = record_of(entry)
            heap.append((lane_of(record)[0], tag, record.id, entry, client, line))
        heapify(heap)
        while heap:
            _, tag, _, entry, client, line = heap[0]
            yield entry
            tag += self._expected(record_of(entry)) / client.weight
            following = next(line, None)
            if following is None:
                pop_first(heap)
            else:
                record = record_of(following)
                key = lane_of(record)[0], tag, record.id
                heapreplace(heap, (*key, following, client, line))

    def _expected(self, record: TaskRecord) -> float:
        """What a task is thought to cost."""
        mean = max(record.spec.pace.mean, EXPECTED)
        return mean * self._clients.portion_of(record.spec.shape.request).cost
