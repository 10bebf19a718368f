"""What a simulation asks of a rule, and a queue for those that only pass over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

Place = Callable[[int, int], bool]
"""Takes what a task of a kind asks for, if it is free; says whether it was."""


class Rule(Protocol):
    """Decides which task begins when, and on which GPUs.

    Attributes:
        name: in the table.
        free: free parts of each GPU; others only read it.
    """

    @property
    def name(self) -> str: ...
    @property
    def free(self) -> Sequence[int]: ...

    def submit(self, task: int, size: int, now: float) -> Sequence[int]:
        """A task of a size has come; answer those that begin."""

    def end(self, task: int, now: float) -> Sequence[int]:
        """A task has ended; answer those that begin."""


class Line:
    """Those that wait, first come first served within a size.

    Who does not fit holds up those of its own size; all others go past it.
    """

    def __init__(self, sizes: int) -> None:
        self._waiting: list[deque[int]] = [deque() for _ in range(sizes)]

    def add(self, task: int, size: int, place: Place) -> list[int]:
        """A task has come: it begins if nobody of its size waits, and it fits."""
        waiting = self._waiting[size]
        if not waiting and place(task, size):
            return [task]
        waiting.append(task)
        return []

    def serve(self, place: Place) -> list[int]:
        """Something is free: begin what fits, in the order of submission."""
        begun: list[int] = []
        stuck: set[int] = set()
        while heads := [
            (waiting[0], size)
            for size, waiting in enumerate(self._waiting)
            if waiting and size not in stuck
        ]:
            task, size = min(heads)
            if place(task, size):
                self._waiting[size].popleft()
                begun.append(task)
            else:
                stuck.add(size)
        return begun
