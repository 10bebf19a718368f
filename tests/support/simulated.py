"""Simulated workers and tasks: the state that an observer of real ones would see."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Environment, TaskSpec
from aiogpu.core.records import Binding
from aiogpu.core.scheduler.scheduler import Scheduler, Step


class Event(NamedTuple):
    """An event: a method of `Scheduler` with its arguments."""

    step: Step
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def event(step: Step, *args: Any, **kwargs: Any) -> Event:
    """Make an event: `event(Scheduler.cancel, task)`."""
    return Event(step, args, kwargs)


@dataclass(slots=True, eq=False)
class SimulatedTask:
    """A task as its owner sees it.

    Attributes:
        news: "settled", or the `Failure` reported to the owner; None before.
        is_cancelled: the owner has cancelled it, before any news.
        is_forgotten: its data may be dropped.
        interrupts: number of requests to a worker to stop it.
        gpus: the devices that it got when it was last sent.
        runs: number of times that a worker has begun it.
        reason: the text reported to the owner with the news.
    """

    id: TaskId
    spec: TaskSpec
    news: str | None = None
    is_cancelled: bool = False
    is_forgotten: bool = False
    interrupts: int = 0
    gpus: tuple[int, ...] = ()
    runs: int = 0
    reason: str = ""


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A worker process as an observer sees it.

    Attributes:
        environment: environment of the tasks for which it was forked.
        has_started: it has connected.
        is_ending: it gets no more work.
        is_stopped: it begins no task, as under SIGSTOP.
        revoking: numbers of unanswered `Revoke`s.
        last_revoke: number of the latest `Revoke`.
        sent: tasks that it was sent and has not answered, without revoked tasks.
        void: revoked tasks whose revocation it has not answered.
        task: the task that it has begun and not answered.
        began: the task that it reached last; None if it has answered.
        binding: environment and devices of the first task that it was sent.
    """

    id: WorkerId
    environment: Environment = ()
    has_started: bool = False
    is_ending: bool = False
    is_stopped: bool = False
    revoking: deque[int] = field(default_factory=deque)
    last_revoke: int = 0
    sent: deque[SimulatedTask] = field(default_factory=deque)
    void: deque[SimulatedTask] = field(default_factory=deque)
    task: SimulatedTask | None = None
    began: SimulatedTask | None = None
    binding: Binding | None = None

    def begin(self) -> None:
        """Begin the next task, unless one runs or it is stopped."""
        if self.task is None and self.sent and not self.is_stopped:
            self.task = self.began = self.sent[0]
            self.task.runs += 1

    def answer(self) -> SimulatedTask:
        """End the running task."""
        task = self.sent.popleft()
        assert task is self.task, (task, self.task)
        self.task = self.began = None
        return task

    def revoke(self, number: int) -> None:
        """Revoke the tasks that have not begun."""
        self.revoking.append(number)
        self.last_revoke = number
        self.void.extend(self.sent)
        self.sent.clear()
        if self.task is not None:
            self.void.popleft()
            self.sent.append(self.task)

    def drop(self, task: SimulatedTask) -> None:
        """Record that a revoked task was skipped."""
        if task in self.void:
            self.void.remove(task)

    def drop_queue(self) -> None:
        """Keep only the running task."""
        self.void.clear()
        while len(self.sent) > 1:
            self.sent.pop()

    def forget_void(self, number: int) -> None:
        """Forget the revoked tasks, except a skipped task that is not yet reported."""
        if number == self.last_revoke:
            self.void = deque(task for task in self.void if task is self.began)

    def skip(self) -> SimulatedTask:
        """Reach a revoked task, and skip it."""
        self.began = self.void[0]
        return self.began

    def know_revoked(self) -> Event:
        """Return the event that answers the earliest open revocation."""
        assert self.revoking, f"nothing is taken back from {self.id}"
        began = self.began.id if self.began else None
        return event(Scheduler.revoked, self.id, self.revoking.popleft(), began)

    def gone(self, settles: bool) -> Event:
        """Return the event of its end; `settles`: its devices must be observed free."""
        began = self.began.id if self.began else None
        settles = settles and self.binding is not None
        return event(Scheduler.worker_gone, self.id, began, settles)
