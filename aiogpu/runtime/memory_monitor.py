"""Ends a task before the host's memory runs out for all.

It looks the more often the less memory is left, only while tasks run, and at single
workers only when the safe limit is passed. A thousand workers take 50 ms to weigh: that
is spread over turns of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import MEMORY, UNIT
from aiogpu.core.records import Memory, WorkerState
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.errors import OutOfMemoryError
from aiogpu.linux.procfs import MemoryBounds, Usage
from aiogpu.runtime.workers.death import Death, describe_out_of_memory

SOONEST: Final = 0.02
"""Seconds between two looks when there is no room left."""


LATEST: Final = 1.0
"""Seconds between two looks when there is plenty."""


RATE: Final = 4 << 30
"""Bytes a second that a few processes can fill, which decides when to look again."""


PATIENCE: Final = 2.0
"""Seconds that a worker to be ended gets before another look at who is to go."""


DEAREST: Final = 4
"""Pauses are at least so many times as long as the look before."""


SLICE: Final = 0.002
"""Seconds for which workers are weighed in one turn of the loop."""


WORTH: Final = 64
"""Who uses less than this part of the limit is not ended: it would not help."""


class Running(NamedTuple):
    """A worker with a task.

    Attributes:
        worker: its id.
        pid: its process.
        asked: bytes that its task has asked for by `memory=`, 0 for none.
    """

    worker: WorkerId
    pid: int
    asked: int


class Weighed(NamedTuple):
    """A worker and the bytes that it uses with all below it."""

    running: Running
    used: int


class MemoryGuard:
    """Watches over the memory of one node's tasks.

    Attributes:
        is_on: whether it does; otherwise it looks at nothing.
        usage: what was seen last, None before the first look.
        cost: seconds that the last look took of the loop's time, in all its turns.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pids: Callable[[], dict[int, int]],
        feed: Feed,
        bounds: MemoryBounds | None = None,
    ) -> None:
        """Prepare.

        Args:
            loop: runs the timer.
            scheduler: knows who has a task.
            pids: gives the processes of workers, by worker id.
            feed: is told of those who are to be ended.
            bounds: what limits memory, this process's limits unless given.
        """
        self.is_on = True
        self.usage: Usage | None = None
        self.cost = 0.0
        self._loop = loop
        self._scheduler = scheduler
        self._pids = pids
        self._feed = feed
        self._bounds = bounds or MemoryBounds()
        self._timer: asyncio.TimerHandle | None = None
        self._unweighed: deque[Running] = deque()
        self._weighed: list[Weighed] = []
        self._victim = 0
        self._told_at = 0.0
        self._ended: dict[int, tuple[int, int, int]] = {}

    def wake(self) -> None:
        """A worker has got a task: look from time to time, if that is not so yet."""
        if self._timer is None and self.is_on:
            self._timer = self._loop.call_later(SOONEST, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def explain(self, name: str, worker: int, death: Death) -> OutOfMemoryError | None:
        """The error of a task that this has ended, None for any other.

        Args:
            name: the task's.
            worker: that ran it.
            death: how the worker has ended.
        """
        ended = self._ended.get(worker)
        return None if ended is None else describe_out_of_memory(name, death, *ended)

    def forget(self, worker: int) -> None:
        """A worker is gone, and its tasks' owners were told."""
        self._ended.pop(worker, None)

    def _running(self) -> Iterator[Running]:
        pids = self._pids()
        for worker in self._scheduler.workers:
            if worker.state is WorkerState.BUSY and (pid := pids.get(worker.id)):
                scalars = worker.lease.request.scalars if worker.lease else ()
                asked = dict(scalars).get(MEMORY, 0) // UNIT
                yield Running(worker.id, pid, asked)

    def _look(self) -> None:
        self._timer = None
        running = list(self._running())
        if not running:
            return
        began = time.perf_counter()
        self.usage = usage = self._bounds.tightest()
        self._weighed.clear()
        self._unweighed.clear()
        if usage.room < 0 and not self._is_one_ending():
            self._unweighed.extend(running)
        self.cost = 0.0
        self._weigh(usage, began, is_first=True)

    def _weigh(self, usage: Usage, began: float, is_first: bool = False) -> None:
        """Weigh workers for a moment; go on in the next turn, or name who is to go."""
        while self._unweighed:
            running = self._unweighed.popleft()
            used = self._bounds.used_by((running.pid,))
            self._weighed.append(Weighed(running, used))
            if self._unweighed and time.perf_counter() - began >= SLICE:
                self.cost += time.perf_counter() - began
                self._timer = self._loop.call_later(0.0, self._weigh_on, usage)
                return
        victim = choose_victim(self._weighed, usage.limit)
        if victim is not None and not is_first:
            victim = self._weigh_again(victim)
        self._weighed.clear()
        self.cost += time.perf_counter() - began
        pause = max(pause_for(usage.room), DEAREST * self.cost)
        self._timer = self._loop.call_later(pause, self._look)
        if victim is not None:
            worker, self._victim, asked = victim.running
            self._told_at = self._loop.time()
            self._ended[worker] = asked, victim.used, usage.safe_limit()
            self._feed(Scheduler.kill_for_memory, worker, Memory.HOST)

    def _weigh_on(self, usage: Usage) -> None:
        self._weigh(usage, time.perf_counter())

    def _weigh_again(self, victim: Weighed) -> Weighed | None:
        """The same as it is now; None if it need not go any more.

        Since it was weighed its task may have ended, or memory may have become free.
        """
        self.usage = usage = self._bounds.tightest()
        if usage.room >= 0 or victim.running not in self._running():
            return None
        now = Weighed(victim.running, self._bounds.used_by((victim.running.pid,)))
        return choose_victim([now], usage.limit)

    def _is_one_ending(self) -> bool:
        """Whether the last victim has its memory still; it may have been spared."""
        is_fresh = self._loop.time() < self._told_at + PATIENCE
        return self._victim != 0 and is_fresh and self._bounds.has(self._victim)


def pause_for(room: int) -> float:
    """Seconds to the next look: half of what it takes to fill the room at `RATE`."""
    return min(LATEST, max(SOONEST, room / (2 * RATE)))


def choose_victim(weighed: Iterable[Weighed], limit: int) -> Weighed | None:
    """Who is to be ended: who uses most beyond what its task has asked for.

    Who keeps within what it asked for comes last. None if nobody's end would help.
    """
    worth = [each for each in weighed if each.used * WORTH >= limit]
    return max(worth, key=_excess, default=None)


def _excess(weighed: Weighed) -> tuple[int, int, int]:
    # Of equals the youngest, which has done the least.
    running = weighed.running
    return weighed.used - running.asked, weighed.used, running.worker
