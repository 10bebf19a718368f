"""Moments at which the scheduler wants to look again.

An alarm is a plain value; what it means is the scheduler's business. Alarms that no
longer matter are not removed but recognised when they ring. Where they abound, each
further one removes a few of them: there may be a million.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from heapq import heappop, heappush
from typing import Final, NamedTuple

FEW: Final = 64
"""Needless alarms that are left to ring."""


AT_ONCE: Final = 500
"""Alarms that ring in one go, so that the loop may do other things in between."""


SWEPT: Final = 4
"""Alarms that are looked at for each that has become needless."""


class AlarmKind(Enum):
    """The kinds of alarms."""

    EXPIRE = "expire"
    """A task's `timeout` has passed."""
    OVERRUN = "overrun"
    """A task's `run_timeout` may have passed."""
    STOP = "stop"
    """A task that is being stopped may need another interrupt, or a kill."""
    END = "end"
    """A worker that was told to exit has had its time."""
    LOOK = "look"
    """A worker is looked at: has it come any further?"""
    RETRY = "retry"
    """A task that has failed is to be tried again."""
    REFILL = "refill"
    """Spares that were taken are to be replaced."""
    SPARES = "spares"
    """Spares may not have been used for a while."""
    ALONE = "alone"
    """A task that is to run alone has waited for long enough."""
    WORKER_LIMIT = "worker limit"
    """There may be room for more workers than lately."""
    OUTAGE = "outage"
    """Workers may be tried again for an environment for which they could not start."""
    STALL = "stall"
    """Somebody may have waited for long for what is held without end."""
    CLOSE = "close"
    """More of those that wait are to be told that the node closes."""

    __hash__ = object.__hash__


class Alarm(NamedTuple):
    """A moment, and the id of the task or of the worker that it concerns."""

    when: float
    sequence: int
    kind: AlarmKind
    subject: int


class Timers:
    """Alarms in order of time.

    Attributes:
        earliest: when the next alarm rings, None without one.
    """

    def __init__(self) -> None:
        self.earliest: float | None = None
        self._heap: list[Alarm] = []
        # A heap that is being swept into the other. It loses its last leaf each
        # time, and so stays a heap.
        self._unswept: list[Alarm] = []
        self._sequence = 0
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap) + len(self._unswept)

    def set(self, when: float, kind: AlarmKind, subject: int) -> None:
        """Ask to be woken at `when`."""
        self._sequence += 1
        heappush(self._heap, Alarm(when, self._sequence, kind, subject))
        if self.earliest is None or when < self.earliest:
            self.earliest = when

    def _first(self) -> list[Alarm]:
        """The heap on which the next alarm is."""
        heap, unswept = self._heap, self._unswept
        return unswept if unswept and not (heap and heap[0] < unswept[0]) else heap

    def _note_earliest(self) -> None:
        heap = self._first()
        self.earliest = heap[0].when if heap else None

    def due(self, now: float) -> Iterator[Alarm]:
        """Remove and yield the alarms that ring at `now` or before, in order.

        Of very many the rest is left; `earliest` says that they are overdue.
        """
        for _ in range(AT_ONCE):
            if self.earliest is None or self.earliest > now:
                return
            alarm = heappop(self._first())
            self._note_earliest()
            yield alarm

    def note_stale(self, kind: AlarmKind, alive: Container[int]) -> None:
        """Count an alarm of that kind as needless, and sweep a few when they abound.

        Args:
            kind: the kind of alarm whose subject has gone.
            alive: the subjects of that kind for which alarms still matter.
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
