"""Where a task and a worker can be, and the legal moves between.

One table per machine. A state says where something *is*, never how it got there;
a move that the table does not hold is a bug of ours and raises. The diagrams in
`docs/architecture.md` are these tables.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class TaskState(Enum):
    """Where a task is."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    EXPECTING = "expecting"
    """Results of others are its arguments, and not there yet; holds nothing."""
    STARTING = "starting"
    """Holds a lease; its worker is being forked. No code of it has run."""
    QUEUED = "queued"
    """Sent ahead to a worker that runs another; no code of it has run."""
    RUNNING = "running"
    """Sent to a worker; its code may be running."""
    BLOCKED = "blocked"
    """Its code waits for tasks that it has started; it holds no CPU meanwhile."""
    DELAYED = "delayed"
    """It has failed and will wait again, some time later; holds nothing."""
    STOPPING = "stopping"
    """Nobody wants its result any more; its code may still be running."""
    ENDED = "ended"
    """Its code has stopped, or never ran."""

    __hash__ = object.__hash__


class WorkerState(Enum):
    """Where a worker is."""

    STARTING = "starting"
    """Asked for; not connected yet."""
    IDLE = "idle"
    """Connected; runs nothing."""
    BUSY = "busy"
    """Runs one task; others of its shape may be queued behind it."""
    ENDING = "ending"
    """Gets no more work; its process has not ended yet."""
    SETTLING = "settling"
    """All its processes have ended; its devices were not seen free of them yet."""
    GONE = "gone"
    """Its process and all that it started have ended."""

    __hash__ = object.__hash__


TASK_LEADS_TO: Final = {
    TaskState.WAITING: (
        TaskState.EXPECTING,
        TaskState.STARTING,
        TaskState.QUEUED,
        TaskState.RUNNING,
        TaskState.ENDED,
    ),
    TaskState.EXPECTING: (TaskState.WAITING, TaskState.ENDED),
    TaskState.STARTING: (TaskState.RUNNING, TaskState.WAITING, TaskState.ENDED),
    TaskState.QUEUED: (
        TaskState.RUNNING,
        TaskState.WAITING,
        TaskState.STOPPING,
        TaskState.ENDED,
    ),
    TaskState.RUNNING: (
        TaskState.BLOCKED,
        TaskState.STOPPING,
        TaskState.WAITING,
        TaskState.DELAYED,
        TaskState.ENDED,
    ),
    TaskState.BLOCKED: (
        TaskState.RUNNING,
        TaskState.STOPPING,
        TaskState.WAITING,
        TaskState.DELAYED,
        TaskState.ENDED,
    ),
    TaskState.DELAYED: (
        TaskState.STARTING,
        TaskState.RUNNING,
        TaskState.WAITING,
        TaskState.ENDED,
    ),
    TaskState.STOPPING: (TaskState.ENDED,),
    TaskState.ENDED: (),
}

WORKER_LEADS_TO: Final = {
    WorkerState.STARTING: (
        WorkerState.IDLE,
        WorkerState.BUSY,
        WorkerState.ENDING,
        WorkerState.GONE,
    ),
    WorkerState.IDLE: (WorkerState.BUSY, WorkerState.ENDING, WorkerState.GONE),
    WorkerState.BUSY: (
        WorkerState.IDLE,
        WorkerState.ENDING,
        WorkerState.SETTLING,
        WorkerState.GONE,
    ),
    WorkerState.ENDING: (WorkerState.SETTLING, WorkerState.GONE),
    WorkerState.SETTLING: (WorkerState.GONE,),
    WorkerState.GONE: (),
}
