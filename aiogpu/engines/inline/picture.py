"""What `status()` and `why()` show of a node without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice

from aiogpu.core.ids import TaskId, WorkerId
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
from aiogpu.engines.inline.node import InlineNode
from aiogpu.engines.inline.turns import Turns


def picture_inline(node: InlineNode, now: float) -> NodeStatus:
    """Picture the node: all that run and all actors have workers, this process each.

    One worker is there also when nothing runs.
    """
    turns = node.turns
    workers = [job.record.worker for job in turns.running if job.record.worker]
    records = [one.record for one in node.actors.living() if one.record]
    workers += [record.worker for record in records if record.worker]
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
    return picture(node.ledger, workers, queue, pids, now)


def _shape(jobs: Mapping[TaskId, Job], turns: Turns, now: float) -> ShapeStatus:
    first = next(iter(jobs.values()))
    reason = f"waits for its turn: {turns.position(first)} before it"
    return shape_status(first.record, len(jobs), now - first.record.since, reason)


def why_inline(node: InlineNode, task: int, now: float) -> Why | None:
    """Say whose turn comes before a task's, or that it runs; None if it has ended."""
    turns, job = node.turns, node.jobs.get(TaskId(task))
    actor = node.actors.get(task)
    record = job.record if job else actor.record if actor else None
    if record is None:
        return None
    waits = job is not None and record.state is TaskState.WAITING
    return Why(
        name=record.spec.name,
        task=task,
        state=record.state.value,
        seconds=now - record.since,
        request=record.spec.shape.request.as_numbers(),
        position=turns.position(job) + 1 if waits and job else None,
        of=sum(len(jobs) for jobs in turns.by_shape.values()) if waits else 0,
        worker=record.worker.id if record.worker else None,
        pid=0 if waits else os.getpid(),
    )
