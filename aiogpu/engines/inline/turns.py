"""Whose turn it is: one after the other, a running task's own children first."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Shape
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
        urgent: those of them that run on top of whatever runs, since it may wait for
            them: makings of actors, and what the methods of actors start.
    """

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.by_shape: dict[Shape, dict[TaskId, Job]] = {}
        self.urgent: deque[Job] = deque()
        self._waiting: deque[Job] = deque()

    def __repr__(self) -> str:
        return f"<Turns {self.running!r}>"

    def parent(self) -> Job | None:
        """The running job whose code asks, None if it is the program's."""
        job = running_job.get()
        if job is None or job.has_ended or job not in self.running:
            return None
        return job

    def add(self, job: Job) -> None:
        """Let a job wait."""
        if job.is_urgent:
            self.urgent.append(job)
        else:
            (job.parent.children if job.parent else self._waiting).append(job)
        self.by_shape.setdefault(job.record.spec.shape, {})[job.id] = job

    def leave(self, job: Job) -> None:
        """Note that a job waits no longer; nothing if it has left before."""
        shape = job.record.spec.shape
        jobs = self.by_shape.get(shape)
        if jobs is not None:
            jobs.pop(job.id, None)
            if not jobs:
                del self.by_shape[shape]

    def waiting(self) -> Iterator[Job]:
        """The jobs of which one may begin now, in their order; some have ended."""
        if self.running and self.running[-1].is_about_to_end:
            return iter(())  # it is told of in a moment, and its children no more its
        for waiting in (self.urgent, self._queue()):
            while waiting and not waiting[0].is_waiting:
                waiting.popleft()
        return chain(self.urgent, self._queue())

    def begin(self, job: Job) -> None:
        """A job that waited has its turn."""
        (self.urgent if job.is_urgent else self._queue()).remove(job)
        self.leave(job)
        self.running.append(job)

    def __iter__(self) -> Iterator[Job]:
        """Those that wait, in the order of their turn."""
        children = (job.children for job in reversed(self.running))
        for line in (self.urgent, *children, self._waiting):
            for job in line:
                if job.is_waiting:
                    yield job

    def position(self, job: Job) -> int:
        """Return how many go before a job; those that left may count, far behind."""
        before = 0
        for other in islice(self, COUNTED):
            if other is job:
                return before
            before += 1
        return max(before, bisect_left(self._waiting, job.id, key=lambda one: one.id))

    def pop_ended(self) -> list[Job]:
        """Remove the jobs that have ended and have nothing running above them."""
        popped: list[Job] = []
        while self.running and self.running[-1].has_ended:
            job = self.running.pop()
            popped.append(job)
            self.let_go(job)
        return popped

    def let_go(self, job: Job) -> None:
        """Give what waits on top of a job, and is not its own, to what is below."""
        orphans = [child for child in job.children if child.is_waiting]
        job.children.clear()
        running = self.running
        below = running[: running.index(job)] if job in running else running
        if below:
            below[-1].children.extend(orphans)
        elif orphans:
            merged = sorted([*self._waiting, *orphans], key=lambda job: job.id)
            self._waiting = deque(merged)

    def bring_up(self, job: Job, above: Job) -> None:
        """Have a job that waits run on top of another, whose code waits for it."""
        for line in (self._waiting, *(below.children for below in self.running)):
            if line is not above.children and job in line:
                line.remove(job)
                above.children.append(job)
                return

    def set_aside(self, job: Job) -> None:
        """Have what runs above a job pause: the job's own code goes on."""
        place = self.running.index(job) + 1
        job.aside = self.running[place:]
        del self.running[place:]
        for above in reversed(job.aside):
            assert above.surroundings is not None, above
            above.surroundings.take_off()

    def resume(self, job: Job) -> None:
        """Have what pauses above a job go on."""
        for above in job.aside:
            assert above.surroundings is not None, above
            above.surroundings.put_on()
        self.running.extend(job.aside)
        job.aside = []

    def abandon(self) -> None:
        """Give the process its own variables back; there is nothing else."""
        for job in reversed(self.running):
            assert job.surroundings is not None, job
            job.surroundings.take_off()
        self.running.clear()

    def _queue(self) -> deque[Job]:
        return self.running[-1].children if self.running else self._waiting
