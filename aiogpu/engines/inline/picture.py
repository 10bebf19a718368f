"""What `status()` and `why()` show of a node without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice

from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.records import WorkerRecord
from aiogpu.core.snapshot import (
    LISTED,
    NodeStatus,
    Queue,
    ShapeStatus,
    picture,
    shape_status,
)
from aiogpu.core.why import Why
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.turns import Turns


def picture_inline(ledger: Ledger, turns: Turns, now: float) -> NodeStatus:
    """Picture the node: every running job has a worker, and all are this process.

    One worker is there also when nothing runs.
    """
    workers = [job.record.worker for job in turns.running if job.record.worker]
    if not workers:
        workers = [WorkerRecord(WorkerId(1), state=WorkerState.IDLE)]
    queue = Queue(
        count=sum(len(jobs) for jobs in turns.by_shape.values()),
        first=[
            (job.record, f"waits for its turn: {before} before it")
            for before, job in enumerate(islice(turns, LISTED))
        ],
        shapes=[
            _shape(jobs, turns, now) for jobs in islice(turns.by_shape.values(), LISTED)
        ],
        shape_count=len(turns.by_shape),
    )
    pids: dict[int, int] = {worker.id: os.getpid() for worker in workers}
    return picture(ledger, workers, queue, pids, now)


def _shape(jobs: Mapping[TaskId, Job], turns: Turns, now: float) -> ShapeStatus:
    first = next(iter(jobs.values()))
    reason = f"waits for its turn: {turns.position(first)} before it"
    return shape_status(first.record, len(jobs), now - first.record.since, reason)


def why_inline(job: Job, turns: Turns, now: float) -> Why:
    """Say whose turn comes before a job's, or that it runs."""
    record = job.record
    waits = record.state is TaskState.WAITING
    return Why(
        name=job.name,
        task=job.id,
        state=record.state.value,
        seconds=now - record.since,
        request=record.spec.shape.request.as_numbers(),
        position=turns.position(job) + 1 if waits else None,
        of=sum(len(jobs) for jobs in turns.by_shape.values()) if waits else 0,
        worker=record.worker.id if record.worker else None,
        pid=0 if waits else os.getpid(),
    )
