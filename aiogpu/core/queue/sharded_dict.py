"""A dictionary by task id, in shards: growing copies only one shard.

A plain dict of a million entries copies all of them when it grows, which blocks the
event loop for 50 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, count
from typing import Any, Final, Generic, TypeVar, cast

from aiogpu.core.model.ids import TaskId

T = TypeVar("T")

BITS: Final = 12
"""Ids that differ only in their last `BITS` bits share a shard."""

_NOTHING: Final[dict[TaskId, Any]] = {}


class ShardedDict(Generic[T]):
    """A mapping from task ids, which are assigned in order.

    Attributes:
        young: the shard of the latest ids. Callers that look there first save a call
            for short tasks.
    """

    def __init__(self) -> None:
        self.young: dict[TaskId, T] = {}
        self._latest = 0
        self._shards = {0: self.young}

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def __bool__(self) -> bool:
        return len(self._shards) > 1 or bool(self.young)

    def __iter__(self) -> Iterator[TaskId]:
        return chain.from_iterable(self._shards.values())

    def __contains__(self, task: object) -> bool:
        return isinstance(task, int) and self.get(TaskId(task)) is not None

    def __getitem__(self, task: TaskId) -> T:
        return self._shards[task >> BITS][task]

    def __setitem__(self, task: TaskId, value: T) -> None:
        number = task >> BITS
        if number != self._latest:
            self._open(number)
        self.young[task] = value

    def _open(self, number: int) -> None:
        """Begin a new shard; drop the previous one if it is empty."""
        if not self.young:
            del self._shards[self._latest]
        self._latest = number
        self.young = self._shards.setdefault(number, {})

    def extend(self, first: TaskId, values: Sequence[T]) -> None:
        """Add values with consecutive ids."""
        start = 0
        while start < len(values):
            task = first + start
            number = task >> BITS
            if number != self._latest:
                self._open(number)
            end = start + ((number + 1) << BITS) - task
            ids = cast("Iterator[TaskId]", count(task))
            self._shards[number].update(zip(ids, values[start:end], strict=False))
            start = end

    def __delitem__(self, task: TaskId) -> None:
        self.pop(task)

    def get(self, task: TaskId) -> T | None:
        """Return the value of an id, or None."""
        shard = self._shards.get(task >> BITS)
        return None if shard is None else shard.get(task)

    def some(self, tasks: Collection[TaskId]) -> list[T | None]:
        """Return the value of each id, or None."""
        values = [*map(self.young.get, tasks)]
        if None not in values:
            return values
        shards = self._shards
        return [shards.get(task >> BITS, _NOTHING).get(task) for task in tasks]

    def pop_some(self, tasks: Collection[TaskId]) -> None:
        """Remove the values of some ids.

        Raises:
            KeyError: an id has no value.
        """
        shards = self._shards
        for task in tasks:
            del shards[task >> BITS][task]
        for number in {task >> BITS for task in tasks}:
            if not shards[number] and number != self._latest:
                del shards[number]

    def pop(self, task: TaskId) -> T:
        """Remove and return the value of an id.

        Raises:
            KeyError: the id has no value.
        """
        number = task >> BITS
        shard = self._shards[number]
        value = shard.pop(task)
        if not shard and number != self._latest:
            del self._shards[number]
        return value

    def pieces(self) -> Iterator[list[T]]:
        """Yield the present values in pieces; the dictionary may change between them.

        Values that are removed meanwhile are left out, and so are later shards.
        """
        for number in list(self._shards):
            yield list(self._shards.get(number, _NOTHING).values())

    def values(self) -> Iterator[T]:
        """Yield all values, shard by shard."""
        for shard in self._shards.values():
            yield from shard.values()
