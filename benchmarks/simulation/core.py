"""The node's own rule: `aiogpu.core.scheduler.scheduler`, told what happens and when.

Processes are of paper: one starts and ends in no time. Every task asks for a CPU
beside its GPUs, has a process of its own, as tasks with GPUs have by default, and
runs for longer than a moment, so that the node looks after it and takes back what it
might have been sent ahead. All of that is part of what is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import thread_time_ns
from typing import Any, Final

from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import CPU, GPU, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from benchmarks.simulation.trace import Trace

CPUS: Final = 16
"""For each GPU: never what is short."""


class Core:
    """One node with all GPUs.

    Attributes:
        spent: nanoseconds of a core inside the scheduler.
        told: events that it was told.
        longest: nanoseconds of the one that took longest.
    """

    name = "aiogpu"

    def __init__(self, trace: Trace) -> None:
        gpus = DeviceSet(GPU, [Device(index) for index in range(trace.gpus)])
        ledger = Ledger({CPU: CPUS * trace.gpus * UNIT}, [gpus])
        self.scheduler = Scheduler(ledger, SchedulerConfig())
        self.free: Sequence[int] = gpus.free
        self.spent = self.told = self.longest = 0
        self._specs = [
            TaskSpec(
                kind.name,
                Shape(Request.of({CPU: UNIT}, {GPU: kind.amount})),
                function=number,
                max_calls=1,
            )
            for number, kind in enumerate(trace.kinds)
        ]
        self._workers: dict[TaskId, WorkerId] = {}
        self._running: dict[WorkerId, TaskId] = {}

    def submit(self, task: int, size: int, now: float) -> list[int]:
        """A task of a size has come; answer those that begin."""
        begun = self._pass_time(now)
        # Ids count from 1.
        event = (Scheduler.submit, TaskId(task + 1), self._specs[size])
        return [*begun, *self._feed(event, now)]

    def end(self, task: int, now: float) -> list[int]:
        """A task has ended, and its process with it; answer those that begin."""
        begun = self._pass_time(now)
        id_ = TaskId(task + 1)
        worker = self._workers.pop(id_)
        del self._running[worker]
        begun += self._feed((Scheduler.finish, id_, worker), now)
        return begun + self._feed((Scheduler.worker_gone, worker), now)

    def _pass_time(self, now: float) -> list[int]:
        begun: list[int] = []
        while (deadline := self.scheduler.deadline()) is not None and deadline <= now:
            begun += self._feed((Scheduler.wake,), deadline)
        return begun

    def _feed(self, event: tuple[Any, ...], now: float) -> list[int]:
        """Tell the scheduler what happened, and what follows from its answer."""
        begun: list[int] = []
        coming = deque([event])
        while coming:
            step, *args = coming.popleft()
            start = thread_time_ns()
            answer = step(self.scheduler, now, *args)
            took = thread_time_ns() - start
            self.spent += took
            self.told += 1
            self.longest = max(self.longest, took)
            for effect in answer:
                match effect:
                    case effects.Settle():
                        pass
                    case effects.Assign(task, worker):
                        self._workers[task] = worker
                        self._running[worker] = task
                        begun.append(task - 1)
                    case effects.Spawn(worker):
                        coming.append((Scheduler.worker_started, worker))
                    case effects.Revoke(worker, number):
                        at = self._running[worker]
                        coming.append((Scheduler.revoked, worker, number, at))
                    case _:
                        raise NotImplementedError(f"nobody here can answer {effect}")
        return begun
