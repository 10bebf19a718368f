"""aiogpu's scheduler alone: paper workers, paper GPUs, a clock that is moved by hand.

Unlike `aiogpu.testing.World` it checks nothing: that would cost more than what is
measured. It holds for any scheduler that answers in effects: a worker may be sent
tasks ahead of need, and runs them in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from time import perf_counter_ns
from typing import Any, Final

from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import CPU, GPU, device_quantity, quantity
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.engines.local import WARM
from benchmarks.port import Need

EVENT_TAKES: Final = 10e-6
"""Seconds of paper time from one event to the next."""
TOOK: Final = 5e-6
"""Seconds that every task says it took: short enough to be queued behind."""


class AiogpuPaper:
    """A node on paper.

    Attributes:
        spent: nanoseconds inside `Scheduler.handle` so far.
    """

    def __init__(self, num_cpus: int, num_gpus: int) -> None:
        gpus = DeviceSet(GPU, [Device(index) for index in range(num_gpus)])
        ledger = Ledger({CPU: quantity("num_cpus", num_cpus)}, [gpus])
        config = SchedulerConfig(idle_workers=WARM + num_cpus)
        self.spent = 0
        self._scheduler = Scheduler(ledger, config)
        self._now = 0.0
        self._specs: dict[Need, TaskSpec] = {}
        self._needs: dict[TaskId, Need] = {}
        self._sent: dict[WorkerId, deque[TaskId]] = {}
        self._last: set[WorkerId] = set()
        self._busy: list[WorkerId] = []
        self._last_task = 0
        self._chance = Random(0)
        self._coming: deque[tuple[Any, ...]] = deque()

    @property
    def busy(self) -> int:
        """How many workers have a task."""
        return len(self._busy)

    def submit(self, need: Need) -> None:
        """Submit one task."""
        spec = self._specs.get(need)
        if spec is None:
            spec = self._specs[need] = TaskSpec(
                "noop",
                Shape(request_of(need)),
                function=len(self._specs),
                max_calls=1 if need.is_isolated else 0,
            )
        self._last_task += 1
        task = TaskId(self._last_task)
        self._needs[task] = need
        self._feed(Scheduler.submit, task, spec)

    def finish(self) -> Need:
        """End the task that some busy worker runs; tells what it needed."""
        busy = self._busy
        place = self._chance.randrange(len(busy))
        worker = busy[place]
        sent = self._sent[worker]
        ended = sent.popleft()
        if not sent:
            busy[place] = busy[-1]
            busy.pop()
        self._feed(Scheduler.finish, ended, worker, False, TOOK)
        if worker in self._last:
            self._last.remove(worker)
            self._feed(Scheduler.worker_gone, worker)
        return self._needs.pop(ended)

    def _feed(self, *event: Any) -> None:
        coming, scheduler = self._coming, self._scheduler
        coming.append(event)
        while coming:
            step, *args = coming.popleft()
            self._now += EVENT_TAKES
            start = perf_counter_ns()
            answer = step(scheduler, self._now, *args)
            deadline = scheduler.deadline()
            self.spent += perf_counter_ns() - start
            for effect in answer:
                self._apply(effect)
            if deadline is not None and deadline <= self._now:
                coming.append((Scheduler.wake,))

    def _apply(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Settle():
                pass
            case effects.Assign(task, worker, is_last=is_last):
                self._send(worker, [task])
                if is_last:
                    self._last.add(worker)
            case effects.Ahead(worker, tasks):
                self._send(worker, tasks)
            case effects.Revoke(worker, number):
                self._coming.append(self._revoke(worker, number))
            case effects.Spawn(worker):
                self._sent[worker] = deque()
                self._coming.append((Scheduler.worker_started, worker))
            case effects.Retire(worker):
                del self._sent[worker]
                self._coming.append((Scheduler.worker_gone, worker))
            case _:
                raise NotImplementedError(f"no worker on paper can answer {effect}")

    def _send(self, worker: WorkerId, tasks: Sequence[TaskId]) -> None:
        """A worker begins a task as soon as it is the first that it has."""
        sent = self._sent[worker]
        if not sent:
            self._busy.append(worker)
        sent.extend(tasks)

    def _revoke(self, worker: WorkerId, number: int) -> tuple[Any, ...]:
        sent = self._sent[worker]
        while len(sent) > 1:
            sent.pop()
        return Scheduler.revoked, worker, number, sent[0] if sent else None


def request_of(need: Need) -> Request:
    """What the core is asked for."""
    return Request.of(
        {CPU: quantity("num_cpus", need.num_cpus)},
        {GPU: device_quantity("num_gpus", need.num_gpus)},
    )
