"""Whose turn it is: one after the other, a running task's own children first."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from aiogpu.core.ids import TaskId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.specs import Shape
from aiogpu.engines.inline.job import Job, running_job

COUNTED: Final = 4096
"""Jobs that are counted one by one for a position."""


class Turns:
    """The jobs that run and those that wait, in order of submission.

    More than one runs only where each of them is a child of the one before, which
    gives way to it. A child whose parent has ended is the program's.

    Attributes:
        running: the jobs that have begun, the last one in its turn.
        by_shape: the jobs that have not, in order of submission.
    """

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.by_shape: dict[Shape, dict[TaskId, Job]] = {}
        self._waiting: deque[Job] = deque()

    def __repr__(self) -> str:
        return f"<Turns {self.running!r}>"

    def add(self, job: Job) -> None:
        """Let a job wait, as the child of the running one whose code asks."""
        parent = running_job.get()
        is_child = parent is not None and parent in self.running
        (parent.children if is_child and parent else self._waiting).append(job)
        self.by_shape.setdefault(job.record.spec.shape, {})[job.id] = job

    def leave(self, job: Job) -> None:
        """Note that a job waits no longer; nothing if it has left before."""
        shape = job.record.spec.shape
        jobs = self.by_shape.get(shape)
        if jobs is not None:
            jobs.pop(job.id, None)
            if not jobs:
                del self.by_shape[shape]

    def take(self) -> Job | None:
        """Remove the job whose turn it is, None without one."""
        if self.running and self.running[-1].is_about_to_end:
            return None  # it is told of in a moment, and its children are no more its
        waiting = self.running[-1].children if self.running else self._waiting
        while waiting:
            job = waiting.popleft()
            if job.record.state is TaskState.WAITING:
                return job
        return None

    def __iter__(self) -> Iterator[Job]:
        """Those that wait, in the order of their turn."""
        for line in (*(job.children for job in reversed(self.running)), self._waiting):
            for job in line:
                if job.record.state is TaskState.WAITING:
                    yield job

    def position(self, job: Job) -> int:
        """How many go before a job; those that left may count, far behind."""
        before = 0
        for other in islice(self, COUNTED):
            if other is job:
                return before
            before += 1
        return max(before, bisect_left(self._waiting, job.id, key=lambda one: one.id))

    def pop_ended(self) -> list[Job]:
        """Remove the jobs that have ended and have nothing running above them."""
        popped: list[Job] = []
        while self.running and self.running[-1].record.state is TaskState.ENDED:
            job = self.running.pop()
            popped.append(job)
            if job.children:
                self._adopt(job.children)
        return popped

    def _adopt(self, orphans: deque[Job]) -> None:
        if self.running:
            self.running[-1].children.extend(orphans)
        else:
            self._waiting = deque(
                sorted([*self._waiting, *orphans], key=lambda job: job.id)
            )
        orphans.clear()
