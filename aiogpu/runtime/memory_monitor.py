"""Ends an idle worker, or else a task, before the memory of the host runs out.

Idle workers go first, because nobody misses what they keep; then memory is read again.
Spare workers do not count: their pages are those of their zygote, and others would be
forked in their place.

Memory is checked only while tasks run, and more often if less is free. Single workers
are measured only above the safe limit. To measure a thousand workers takes 50 ms, so
the work is spread over several turns of the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import MEMORY, UNIT, size
from aiogpu.core.records import Memory, WorkerState
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.errors import OutOfMemoryError
from aiogpu.linux.procfs import MemoryBounds, Usage
from aiogpu.runtime.workers.death import Death, describe_out_of_memory
from aiogpu.runtime.workers.slots import LiveWorker

_log: Final = logging.getLogger(__name__)


SOONEST: Final = 0.02
"""Seconds between two checks when no memory is free."""


LATEST: Final = 1.0
"""Seconds between two checks when plenty of memory is free."""


RATE: Final = 4 << 30
"""Bytes that a few processes can fill per second; determines the next check."""


PATIENCE: Final = 2.0
"""Seconds that a worker has to end before another victim is chosen."""


DEAREST: Final = 4
"""A pause is at least this many times as long as the check before."""


SLICE: Final = 0.002
"""Seconds that one turn of the loop spends on measuring workers."""


WORTH: Final = 64
"""A worker that uses less than 1/`WORTH` of the limit is not ended, since that would
not help."""


KEPT: Final = 16
"""Ended idle workers that are remembered for the status."""


class Running(NamedTuple):
    """A worker with a task, or an idle one that has had tasks.

    Attributes:
        worker: the id of the worker.
        pid: the process id of the worker.
        asked: bytes that its task requested by `memory=`, 0 for none.
        is_idle: it has no task.
    """

    worker: WorkerId
    pid: int
    asked: int
    is_idle: bool = False


class Weighed(NamedTuple):
    """A worker and the bytes that it uses, with all its descendants."""

    running: Running
    used: int


class MemoryGuard:
    """Ends workers of one node before host memory runs out.

    Attributes:
        is_on: False if the guard is switched off.
        usage: the last memory usage, None before the first check.
        cost: seconds of the loop's time that the last check took, in all its turns.
        timer: the timer of the next check; None if no check is due, and `wake` is
            needed.
        ended_idle: the last idle workers that were ended: loop time, id, process id and
            the bytes that each used.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        workers: Mapping[int, LiveWorker],
        feed: Feed,
        bounds: MemoryBounds | None = None,
    ) -> None:
        """Prepare.

        Args:
            loop: runs the timer.
            scheduler: knows which workers have a task.
            workers: the live workers, by id.
            feed: tells the core of a worker that must be ended.
            bounds: the limits on memory; default: those of this process.
        """
        self.is_on = True
        self.usage: Usage | None = None
        self.cost = 0.0
        self._loop = loop
        self._scheduler = scheduler
        self._workers = workers
        self._feed = feed
        self._bounds = bounds or MemoryBounds()
        self.timer: asyncio.TimerHandle | None = None
        self._unweighed: deque[Running] = deque()
        self._weighed: list[Weighed] = []
        self._victim = 0
        self._told_at = 0.0
        self._ended: dict[int, tuple[int, int, int]] = {}
        self.ended_idle: deque[tuple[float, int, int, int]] = deque(maxlen=KEPT)

    def wake(self) -> None:
        """Start checking, because a worker has got a task."""
        if self.timer is None and self.is_on:
            self.timer = self._loop.call_later(SOONEST, self._look)

    def close(self) -> None:
        """Stop checking."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def explain(self, name: str, worker: int, death: Death) -> OutOfMemoryError | None:
        """Return the error of a task that the guard has ended, None for other tasks.

        Args:
            name: the name of the task.
            worker: the worker that ran the task.
            death: the end of the worker.
        """
        ended = self._ended.get(worker)
        return None if ended is None else describe_out_of_memory(name, death, *ended)

    def forget(self, worker: int) -> None:
        """Forget an ended worker, after its tasks were settled."""
        self._ended.pop(worker, None)

    def _running(self) -> Iterator[Running]:
        for worker in self._scheduler.workers:
            live = self._workers.get(worker.id)
            if worker.state is WorkerState.BUSY and live is not None and live.pid:
                scalars = worker.lease.request.scalars if worker.lease else ()
                asked = dict(scalars).get(MEMORY, 0) // UNIT
                yield Running(worker.id, live.pid, asked)

    def _idle(self) -> Iterator[Running]:
        for worker in self._scheduler.workers:
            live = self._workers.get(worker.id)
            if worker.state is WorkerState.IDLE and worker.binding and live is not None:
                yield Running(worker.id, live.pid, 0, is_idle=True)

    def _look(self) -> None:
        self.timer = None
        running = list(self._running())
        if not running:
            return
        began = time.perf_counter()
        self.usage = usage = self._bounds.tightest()
        self._weighed.clear()
        self._unweighed.clear()
        if usage.room < 0 and not self._is_one_ending():
            self._unweighed.extend((*self._idle(), *running))
        self.cost = 0.0
        self._weigh(usage, began, is_first=True)

    def _weigh(self, usage: Usage, began: float, is_first: bool = False) -> None:
        """Measure workers for `SLICE` seconds; then continue later or end a victim."""
        while self._unweighed:
            running = self._unweighed.popleft()
            used = self._bounds.used_by((running.pid,))
            self._weighed.append(Weighed(running, used))
            if self._unweighed and time.perf_counter() - began >= SLICE:
                self.cost += time.perf_counter() - began
                self.timer = self._loop.call_later(0.0, self._weigh_on, usage)
                return
        victim = choose_victim(self._weighed, usage.limit)
        if victim is not None and not is_first:
            victim = self._weigh_again(victim)
        self._weighed.clear()
        self.cost += time.perf_counter() - began
        pause = max(pause_for(usage.room), DEAREST * self.cost)
        self.timer = self._loop.call_later(pause, self._look)
        if victim is not None:
            self._end(victim, usage)

    def _end(self, victim: Weighed, usage: Usage) -> None:
        worker, self._victim, asked, is_idle = victim.running
        self._told_at = self._loop.time()
        if is_idle:
            self.ended_idle.appendleft(
                (self._told_at, worker, self._victim, victim.used)
            )
            _log.warning(
                "! idle worker %d (process %d) is ended: it keeps %s of memory, and "
                "all processes together use %s of %s",
                worker,
                self._victim,
                size(victim.used),
                size(usage.used),
                size(usage.limit),
            )
            self._feed(Scheduler.end_idle, worker)
        else:
            self._ended[worker] = asked, victim.used, usage.safe_limit()
            self._feed(Scheduler.kill_for_memory, worker, Memory.HOST)

    def _weigh_on(self, usage: Usage) -> None:
        self._weigh(usage, time.perf_counter())

    def _weigh_again(self, victim: Weighed) -> Weighed | None:
        """Measure the victim again; return None if it need not be ended.

        Its task may have ended meanwhile, or memory may have become free.
        """
        self.usage = usage = self._bounds.tightest()
        present = self._idle() if victim.running.is_idle else self._running()
        if usage.room >= 0 or victim.running not in present:
            return None
        now = Weighed(victim.running, self._bounds.used_by((victim.running.pid,)))
        return choose_victim([now], usage.limit)

    def _is_one_ending(self) -> bool:
        """Return True if the last victim may still occupy its memory."""
        is_fresh = self._loop.time() < self._told_at + PATIENCE
        return self._victim != 0 and is_fresh and self._bounds.has(self._victim)


def pause_for(room: int) -> float:
    """Return the seconds to the next check: half the time to fill `room` at `RATE`."""
    return min(LATEST, max(SOONEST, room / (2 * RATE)))


def choose_victim(weighed: Iterable[Weighed], limit: int) -> Weighed | None:
    """Return the worker to end: an idle one, the largest first.

    If there is none, the worker that exceeds its task's request the most; workers
    within their requests come last. None if ending no worker would help.
    """
    candidates = [worker for worker in weighed if worker.used * WORTH >= limit]
    return max(candidates, key=_excess, default=None)


def _excess(weighed: Weighed) -> tuple[bool, int, int, int]:
    # Among equals choose the youngest, which has done the least work.
    running = weighed.running
    excess = weighed.used - running.asked
    return running.is_idle, excess, weighed.used, running.worker
