"""aiogpu's own scheduler in simulated time, with simulated workers.

A worker starts and ends in no time. The scheduler gets all events that a node would
send, so the time spent in the scheduler is the same as on a node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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

CPUS_PER_GPU: Final = 16
"""CPUs are never scarce."""

Started = list[tuple[TaskId, WorkerId]]
"""Tasks that start, each with its worker."""


def task_spec(gpu_amount: int, function: int = 0, max_calls: int = 0) -> TaskSpec:
    """Describe tasks that need one CPU and this amount of GPU."""
    shape = Shape(Request.of({CPU: UNIT}, {GPU: gpu_amount}))
    return TaskSpec("noop", shape, function=function, max_calls=max_calls)


class SimulatedNode:
    """The scheduler of one node, with workers that answer at once.

    Attributes:
        running: the tasks of each worker, which runs the first one.
        spent: nanoseconds inside the scheduler.
        events: number of calls of the scheduler.
        longest: nanoseconds of the longest call.
    """

    def __init__(
        self,
        cpus: int,
        gpus: int,
        config: SchedulerConfig | None = None,
        clock: Callable[[], int] = thread_time_ns,
    ) -> None:
        devices = DeviceSet(GPU, [Device(index) for index in range(gpus)])
        self.scheduler = Scheduler(
            Ledger({CPU: cpus * UNIT}, [devices]), config or SchedulerConfig()
        )
        self.free: Sequence[int] = devices.free
        self.running: dict[WorkerId, deque[TaskId]] = {}
        self.spent = self.events = self.longest = 0
        self._clock = clock
        self._last_call: set[WorkerId] = set()

    def submit(self, task: TaskId, spec: TaskSpec, now: float) -> Started:
        """Submit a task; return the tasks that start."""
        started = self._advance(now)
        return started + self._call(Scheduler.submit, now, task, spec)

    def finish(self, worker: WorkerId, now: float, *details: Any) -> Started:
        """End the task that a worker runs; return the tasks that start."""
        started = self._advance(now)
        tasks = self.running[worker]
        ended = tasks.popleft()
        if tasks:
            started.append((tasks[0], worker))
        started += self._call(Scheduler.finish, now, ended, worker, *details)
        if worker in self._last_call:
            self._last_call.remove(worker)
            del self.running[worker]
            started += self._call(Scheduler.worker_gone, now, worker)
        return started

    def _advance(self, now: float) -> Started:
        """Fire the timers that are due."""
        started: Started = []
        while (deadline := self.scheduler.deadline()) is not None and deadline <= now:
            started += self._call(Scheduler.wake, deadline)
        return started

    def _call(self, method: Callable[..., Any], now: float, *args: Any) -> Started:
        """Call a method of the scheduler and carry out its effects."""
        started: Started = []
        calls: deque[tuple[Any, ...]] = deque([(method, *args)])
        while calls:
            step, *rest = calls.popleft()
            start = self._clock()
            answer = step(self.scheduler, now, *rest)
            took = self._clock() - start
            self.spent += took
            self.events += 1
            self.longest = max(self.longest, took)
            for effect in answer:
                match effect:
                    case effects.Settle():
                        pass
                    case effects.Assign(task, worker, is_last=is_last):
                        started += self._send(worker, [task])
                        if is_last:
                            self._last_call.add(worker)
                    case effects.Ahead(worker, tasks):
                        started += self._send(worker, tasks)
                    case effects.Revoke(worker, number):
                        kept = self._take_back(worker)
                        calls.append((Scheduler.revoked, worker, number, kept))
                    case effects.Spawn(worker):
                        self.running[worker] = deque()
                        calls.append((Scheduler.worker_started, worker))
                    case effects.Retire(worker):
                        del self.running[worker]
                        calls.append((Scheduler.worker_gone, worker))
                    case _:
                        raise NotImplementedError(f"no simulated worker can {effect}")
        return started

    def _send(self, worker: WorkerId, tasks: Sequence[TaskId]) -> Started:
        queue = self.running[worker]
        is_idle = not queue
        queue.extend(tasks)
        return [(queue[0], worker)] if is_idle else []

    def _take_back(self, worker: WorkerId) -> TaskId | None:
        queue = self.running[worker]
        while len(queue) > 1:
            queue.pop()
        return queue[0] if queue else None


class AiogpuPolicy:
    """The scheduler's policy: one node with all GPUs.

    Every task runs in a process of its own, as tasks with GPUs do by default.
    """

    name = "aiogpu"

    def __init__(self, trace: Trace) -> None:
        self.node = SimulatedNode(CPUS_PER_GPU * trace.gpus, trace.gpus)
        self.free = self.node.free
        self._specs = [
            task_spec(each.amount, function=number, max_calls=1)
            for number, each in enumerate(trace.classes)
        ]
        self._workers: dict[int, WorkerId] = {}

    def submit(self, task: int, size: int, now: float) -> list[int]:
        """Submit a task; return the tasks that start."""
        # The scheduler's ids count from 1.
        return self._note(self.node.submit(TaskId(task + 1), self._specs[size], now))

    def end(self, task: int, now: float) -> list[int]:
        """End a task and its process; return the tasks that start."""
        return self._note(self.node.finish(self._workers.pop(task), now))

    def _note(self, started: Started) -> list[int]:
        for task, worker in started:
            self._workers[task - 1] = worker
        return [task - 1 for task, _ in started]
