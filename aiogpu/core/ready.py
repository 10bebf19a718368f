"""The tasks that wait, by shape and priority, first come first served inside.

A bucket holds the tasks of one shape. Removing a task is O(1): it is only counted
here and skipped when its turn comes. This file knows the order, not what fits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from aiogpu.core.lifecycle import TaskState
from aiogpu.core.records import TaskRecord
from aiogpu.core.specs import Shape

Precedence = tuple[int, int]
"""Sorts what goes first: lower priority number negated, then task id."""


class Bucket:
    """The waiting tasks of one shape, in order of priority and submission."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.size = 0
        self._lanes: dict[int, deque[TaskRecord]] = {}
        self._order: list[int] = []

    def push(self, record: TaskRecord) -> None:
        """Add a task at the end of its priority's lane."""
        self._lane(record).append(record)
        self.size += 1

    def push_front(self, record: TaskRecord) -> None:
        """Add a task that has waited before, ahead of its lane."""
        self._lane(record).appendleft(record)
        self.size += 1

    def _lane(self, record: TaskRecord) -> deque[TaskRecord]:
        lane = self._lanes.get(-record.spec.priority)
        if lane is None:
            lane = self._lanes[-record.spec.priority] = deque()
            insort(self._order, -record.spec.priority)
        return lane

    def head(self) -> TaskRecord | None:
        """The task whose turn it is, None when nothing waits."""
        while self._order:
            lane = self._lanes[self._order[0]]
            while lane:
                if lane[0].state is TaskState.WAITING:
                    return lane[0]
                lane.popleft()
            del self._lanes[self._order.pop(0)]
        return None

    def pop(self) -> None:
        """Remove the head."""
        self._lanes[self._order[0]].popleft()
        self.size -= 1

    def __iter__(self) -> Iterator[TaskRecord]:
        for priority in self._order:
            for record in self._lanes[priority]:
                if record.state is TaskState.WAITING:
                    yield record

    def compact(self) -> None:
        """Forget the tasks that left; worth it when they outnumber the rest."""
        for priority, lane in self._lanes.items():
            self._lanes[priority] = deque(
                record for record in lane if record.state is TaskState.WAITING
            )


class ReadyQueue:
    """All waiting tasks of the node.

    Attributes:
        by_shape: the buckets that hold a task; empty when nothing waits.
    """

    def __init__(self) -> None:
        self.by_shape: dict[Shape, Bucket] = {}
        self._left = 0

    def __len__(self) -> int:
        return sum(bucket.size for bucket in self.by_shape.values())

    def __repr__(self) -> str:
        return f"<ReadyQueue {len(self)} tasks of {len(self.by_shape)} shapes>"

    def push(self, record: TaskRecord) -> None:
        """Add a new task behind those of its shape and priority."""
        self._bucket(record).push(record)

    def push_front(self, record: TaskRecord) -> None:
        """Add a task that is to be tried again ahead of its shape and priority."""
        self._bucket(record).push_front(record)

    def _bucket(self, record: TaskRecord) -> Bucket:
        shape = record.spec.shape
        bucket = self.by_shape.get(shape)
        if bucket is None:
            bucket = self.by_shape[shape] = Bucket(shape)
        return bucket

    def discard(self, record: TaskRecord) -> None:
        """Note that a task waits no longer; its state says so already."""
        bucket = self.by_shape[record.spec.shape]
        bucket.size -= 1
        self._left += 1
        if bucket.size == 0:
            del self.by_shape[bucket.shape]
        if self._left > 64 and self._left > len(self):
            self._left = 0
            for bucket in self.by_shape.values():
                bucket.compact()

    def buckets(self) -> list[Bucket]:
        """The buckets with waiting tasks, in no particular order."""
        return list(self.by_shape.values())

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket that has run empty."""
        del self.by_shape[bucket.shape]

    def __iter__(self) -> Iterator[TaskRecord]:
        for bucket in self.by_shape.values():
            yield from bucket


def precedence(record: TaskRecord) -> Precedence:
    """Sort key over all shapes: priority first, then order of submission."""
    return -record.spec.priority, record.id
