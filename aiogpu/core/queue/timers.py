"""The scheduler's alarms.

An alarm is a plain value; the scheduler gives it its meaning. A stale alarm is not
removed; the scheduler ignores it when it is due. If many are stale (there may be a
million), each further one removes a few others.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from heapq import heappop, heappush
from typing import Final, NamedTuple

FEW: Final = 64
"""Number of stale alarms from which on stale alarms are removed."""


AT_ONCE: Final = 500
"""The most alarms that `due` yields at once, so that the loop can do other things."""


SWEPT: Final = 4
"""Alarms that are examined for each alarm that becomes stale."""


class AlarmKind(Enum):
    """The kinds of alarms."""

    EXPIRE = "expire"
    """A task's `timeout` has passed."""
    OVERRUN = "overrun"
    """A task's `run_timeout` may have passed."""
    STOP = "stop"
    """A task that is being stopped may need another interrupt, or a kill."""
    END = "end"
    """The exit grace of a retired worker has passed, or the time of an evicted actor to
    leave."""
    LOOK = "look"
    """The progress of a busy worker must be checked."""
    RETRY = "retry"
    """A failed task is due for its retry."""
    REFILL = "refill"
    """Spares that were used must be replaced."""
    SPARES = "spares"
    """Some spares may not have been used for long."""
    ALONE = "alone"
    """A task that must run alone has waited too long."""
    WORKER_LIMIT = "worker limit"
    """The limit of workers may be raised."""
    OUTAGE = "outage"
    """The pause after a failed start of a worker has passed."""
    STALL = "stall"
    """Some tasks may have waited long for resources held without end."""
    DEADLOCK = "deadlock"
    """A search for deadlocks was put off."""
    EVICT = "evict"
    """Idle actors may have to leave for tasks that wait."""
    STOP_SOME = "stop some"
    """The next batch of many tasks must be stopped."""

    __hash__ = object.__hash__


class Alarm(NamedTuple):
    """A time, and the id of the task or worker that it concerns."""

    when: float
    sequence: int
    kind: AlarmKind
    subject: int


class Timers:
    """Alarms in order of time.

    Attributes:
        earliest: the time of the next alarm, or None.
    """

    def __init__(self) -> None:
        self.earliest: float | None = None
        self._heap: list[Alarm] = []
        # A heap whose alarms are moved to the other heap, unless they are stale. Only
        # its last leaf is removed each time, so it stays a heap.
        self._unswept: list[Alarm] = []
        self._sequence = 0
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._unswept)

    def set(self, when: float, kind: AlarmKind, subject: int) -> None:
        """Set an alarm for the time `when`."""
        self._sequence += 1
        heappush(self._heap, Alarm(when, self._sequence, kind, subject))
        if self.earliest is None or when < self.earliest:
            self.earliest = when

    def _first(self) -> list[Alarm]:
        """Return the heap with the next alarm."""
        heap, unswept = self._heap, self._unswept
        return unswept if unswept and not (heap and heap[0] < unswept[0]) else heap

    def _note_earliest(self) -> None:
        heap = self._first()
        self.earliest = heap[0].when if heap else None

    def due(self, now: float) -> Iterator[Alarm]:
        """Remove and yield the alarms for `now` or before, in order.

        Yields at most `AT_ONCE`; `earliest` shows that further ones are overdue.
        """
        for _ in range(AT_ONCE):
            if self.earliest is None or self.earliest > now:
                return
            alarm = heappop(self._first())
            self._note_earliest()
            yield alarm

    def note_stale(self, kind: AlarmKind, alive: Container[int]) -> None:
        """Count an alarm as stale, and remove a few stale alarms if there are many.

        Args:
            kind: the kind of the alarm whose subject is gone.
            alive: the subjects whose alarms of this kind are not stale.
        """
        self._stale += 1
        if not self._unswept:
            if self._stale <= FEW or 2 * self._stale <= len(self._heap):
                return
            self._heap, self._unswept = [], self._heap
            self._stale = 0
        for _ in range(min(SWEPT, len(self._unswept))):
            alarm = self._unswept.pop()
            if alarm.kind is not kind or alarm.subject in alive:
                heappush(self._heap, alarm)
        self._note_earliest()
