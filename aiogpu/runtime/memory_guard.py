"""Ends a task before memory runs out for all: where the watch meets the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import MEMORY, UNIT
from aiogpu.core.records import WorkerRecord, WorkerState
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.errors import OutOfMemoryError
from aiogpu.runtime.death import Death, describe_out_of_memory
from aiogpu.runtime.memory_watch import MemoryWatch, Running


class MemoryGuard:
    """Watches over the memory of one node's tasks.

    Attributes:
        is_on: whether it does; otherwise it looks at nothing.
        watch: its eyes.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pids: Callable[[], dict[int, int]],
        feed: Feed,
    ) -> None:
        self.is_on = True
        self.watch = MemoryWatch(loop, self._running, self._on_over)
        self._scheduler = scheduler
        self._pids = pids
        self._feed = feed
        self._ended: dict[int, tuple[int, int, int]] = {}

    def __repr__(self) -> str:
        return f"<MemoryGuard {self.watch!r}>"

    def wake(self) -> None:
        """A worker has got a task."""
        if self.is_on:
            self.watch.wake()

    def close(self) -> None:
        """Look no more."""
        self.watch.close()

    def _running(self) -> Iterator[Running]:
        pids = self._pids()
        for worker in self._scheduler.workers:
            if worker.state is WorkerState.BUSY and (pid := pids.get(worker.id)):
                yield Running(worker.id, (pid,), _asked(worker))

    def _on_over(self, worker: int, used: int, limit: int) -> None:
        record = self._scheduler.workers.get(WorkerId(worker))
        if record is not None:
            self._ended[worker] = _asked(record), used, limit
            self._feed(Scheduler.memory_short, WorkerId(worker))

    def explain(self, name: str, worker: int, death: Death) -> OutOfMemoryError | None:
        """The error of a task that this has ended, None for any other.

        Args:
            name: the task's.
            worker: that ran it.
            death: how the worker has ended.
        """
        ended = self._ended.get(worker)
        if ended is None:
            return None
        return describe_out_of_memory(name, death, *ended)

    def forget(self, worker: int) -> None:
        """A worker is gone, and its tasks' owners were told."""
        self._ended.pop(worker, None)


def _asked(worker: WorkerRecord) -> int:
    if worker.lease is None:
        return 0
    return dict(worker.lease.request.scalars).get(MEMORY, 0) // UNIT
