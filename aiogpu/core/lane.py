"""One line of waiting tasks: first come, first served, and anybody may leave.

Who leaves is only counted, and skipped when his turn comes. Each leaving sweeps a
few out at the front, and where those who left outnumber the rest, further behind:
so memory does not grow with them, nor is any single step long, unless half of a
line leaves from the back to the front.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final

from aiogpu.core.ids import TaskId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.records import TaskRecord

SWEPT: Final = 4
"""Tasks that one leaving looks at."""
SEARCHED: Final = 4096
"""Tasks that are looked at one by one, for a position or for those near the front."""

_WAITING: Final = TaskState.WAITING


class WaitingLane:
    """Tasks in order of their ids. `_swept` goes before `_rest`."""

    def __init__(self) -> None:
        self._swept: deque[TaskRecord] = deque()
        self._rest: deque[TaskRecord] = deque()
        self._left = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._swept) + len(self._rest) - self._left

    def push(self, record: TaskRecord) -> None:
        """Add a task with an id above all others."""
        self._rest.append(record)

    def extend(self, records: Iterable[TaskRecord]) -> None:
        """Add tasks with ids above all others, in order of their ids."""
        self._rest.extend(records)

    def push_back(self, record: TaskRecord) -> None:
        """Add a task that has been first before; costs as many as go before it."""
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
        """One that stands here waits no longer."""
        self._left += 1
        front = self._swept or self._rest
        for _ in range(SWEPT):
            # Those who leave in order shall not be skipped all at once.
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
        """How many go before a task; those that left may count, far behind."""
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
