"""Workers and tasks of paper: what an onlooker would see of the real ones."""

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
        news: "settled", or the `Failure` that the owner was told; None so far.
        is_cancelled: whether the owner has cancelled it, before any news.
        is_forgotten: whether what is kept for it may be dropped.
        interrupts: how often a worker was asked to stop it.
        gpus: the devices that it got when it was last sent.
        runs: how often a worker has begun it.
        reason: what the owner was told beside the news.
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
    """A worker process as an onlooker sees it.

    Attributes:
        environment: of the tasks that it was forked for.
        has_started: whether it has connected.
        is_ending: whether it gets no more work.
        is_stopped: whether it begins nothing, as under SIGSTOP.
        revoking: numbers of the `Revoke`s that are not answered.
        last_revoke: number of the latest one.
        sent: what it was sent and has neither answered nor been told to drop.
        void: what it was told to drop and has not been told of yet.
        task: what it has begun and not answered.
        began: what it has come to last, None if that is answered.
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
        """End the task that runs."""
        task = self.sent.popleft()
        assert task is self.task, (task, self.task)
        self.task = self.began = None
        return task

    def revoke(self, number: int) -> None:
        """Drop what is not begun."""
        self.revoking.append(number)
        self.last_revoke = number
        self.void.extend(self.sent)
        self.sent.clear()
        if self.task is not None:
            self.void.popleft()
            self.sent.append(self.task)

    def drop(self, task: SimulatedTask) -> None:
        """Note that this task was skipped."""
        if task in self.void:
            self.void.remove(task)

    def drop_queue(self) -> None:
        """Keep what runs alone."""
        self.void.clear()
        while len(self.sent) > 1:
            self.sent.pop()

    def forget_void(self, number: int) -> None:
        """Forget the dropped tasks; the skipped one is still to be reported."""
        if number == self.last_revoke:
            self.void = deque(task for task in self.void if task is self.began)

    def skip(self) -> SimulatedTask:
        """Come to a task's turn and find it revoked."""
        self.began = self.void[0]
        return self.began

    def know_revoked(self) -> Event:
        """Return the event that answers the earliest open revocation."""
        assert self.revoking, f"nothing is taken back from {self.id}"
        began = self.began.id if self.began else None
        return event(Scheduler.revoked, self.id, self.revoking.popleft(), began)

    def gone(self, settles: bool) -> Event:
        """Return the event of its end; `settles`: its devices must be seen free."""
        began = self.began.id if self.began else None
        settles = settles and self.binding is not None
        return event(Scheduler.worker_gone, self.id, began, settles)
