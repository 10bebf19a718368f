"""Why the code of a task does not run that has a worker or holds a lease."""

from __future__ import annotations

from collections.abc import Mapping

from aiogpu.core.lifecycle import TaskState
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.wording import listing


def why_not_running(
    record: TaskRecord, worker: WorkerRecord, pids: Mapping[int, int]
) -> str | None:
    """In one line what it waits for; None where its code may run."""
    if record.spec.is_lease and record.state is TaskState.STOPPING:
        return "is given back; processes that it was for have not ended yet"
    if record.state is TaskState.STARTING:
        return "a worker is being forked for it"
    if record.state is TaskState.QUEUED:
        before = worker.task.spec.name if worker.task else ""
        return f"sent ahead to pid {pids.get(worker.id, 0)}, behind {before}"
    if record.state is TaskState.BLOCKED and record.kin is not None:
        children = record.kin.waits_for.values()
        if not children:
            return "waits for an actor"
        names = (child.spec.name for child in children)
        return f"waits for its children: {listing(names, len(children))}"
    return None
