"""What happened, as the scheduler is told: one small class each, past tense."""

from __future__ import annotations

from dataclasses import dataclass

from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.specs import TaskSpec


@dataclass(slots=True)
class Submitted:
    """A new task is to run. Ids count up."""

    task: TaskId
    spec: TaskSpec


@dataclass(slots=True)
class Cancelled:
    """Nobody wants the task's result any more."""

    task: TaskId


@dataclass(slots=True)
class WorkerStarted:
    """A worker that was asked for has connected."""

    worker: WorkerId


@dataclass(slots=True)
class TaskFinished:
    """A worker has answered: the task's code has stopped.

    `retry` says that it failed with an exception for which it is to be tried
    again, should it have retries left.
    """

    task: TaskId
    worker: WorkerId
    retry: bool = False


@dataclass(slots=True)
class WorkerGone:
    """A worker's process and all that it started have ended."""

    worker: WorkerId


@dataclass(slots=True)
class TimePassed:
    """The moment named by `Scheduler.deadline()` has come."""


@dataclass(slots=True)
class Closing:
    """The node is shutting down: nothing new starts, all that runs is stopped."""


Event = (
    Submitted
    | Cancelled
    | WorkerStarted
    | TaskFinished
    | WorkerGone
    | TimePassed
    | Closing
)
