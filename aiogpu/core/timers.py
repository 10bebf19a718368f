"""Moments at which the scheduler wants to look again.

An alarm is a plain value; what it means is the scheduler's business. Alarms that
no longer matter are not removed but recognised when they ring, except that their
number is kept from growing without bound.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class AlarmKind(Enum):
    """What is to be looked at."""

    EXPIRE = "expire"
    """A task's `timeout` has passed."""
    STOP = "stop"
    """A task that is being stopped may need another interrupt, or a kill."""
    END = "end"
    """A worker that was told to exit has had its time."""
    LOOK = "look"
    """A worker is looked at: has it come any further?"""
    CLOSE = "close"
    """More of those that wait are to be told that the node closes."""

    __hash__ = object.__hash__


class Alarm(NamedTuple):
    """A moment, and whom it concerns: the id of a task or of a worker."""

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
        self._sequence = 0
        self._stale = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, when: float, kind: AlarmKind, subject: int) -> None:
        """Ask to be woken at `when`."""
        self._sequence += 1
        heappush(self._heap, Alarm(when, self._sequence, kind, subject))
        self._note_earliest()

    def _note_earliest(self) -> None:
        self.earliest = self._heap[0].when if self._heap else None

    def due(self, now: float) -> Iterator[Alarm]:
        """Remove and yield all alarms that ring at `now` or before."""
        while self._heap and self._heap[0].when <= now:
            alarm = heappop(self._heap)
            self._note_earliest()
            yield alarm

    def note_stale(self, kind: AlarmKind, alive: Container[int]) -> None:
        """Count an alarm of that kind as needless, and sweep when they abound.

        Args:
            kind: the kind of alarm whose subject has gone.
            alive: the subjects of that kind for which alarms still matter.
        """
        self._stale += 1
        if self._stale > 64 and 2 * self._stale > len(self._heap):
            self._stale = 0
            self._heap = [
                alarm
                for alarm in self._heap
                if alarm.kind is not kind or alarm.subject in alive
            ]
            heapify(self._heap)
            self._note_earliest()
