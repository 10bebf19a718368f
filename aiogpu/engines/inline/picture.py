"""What `status()` shows of a node without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.snapshot import NodeStatus, snapshot
from aiogpu.engines.inline.job import Job


@dataclass(frozen=True, slots=True)
class Node:
    """The node as a picture is taken of it; see `core.snapshot.Sitter`."""

    ledger: Ledger
    tasks: Mapping[TaskId, TaskRecord]
    workers: Sequence[WorkerRecord]


def picture(
    ledger: Ledger, jobs: Mapping[TaskId, Job], running: Sequence[Job]
) -> NodeStatus:
    """Picture the node: every running job has a worker, and all are this process.

    One worker is there also when nothing runs.
    """
    tasks = {id_: job.record for id_, job in jobs.items()}
    workers = [job.record.worker for job in running if job.record.worker is not None]
    if not workers:
        workers = [WorkerRecord(WorkerId(1), WorkerState.IDLE)]
    pids: dict[int, int] = {worker.id: os.getpid() for worker in workers}
    status = snapshot(Node(ledger, tasks, workers), pids)
    in_turn = sorted(
        status.tasks, key=lambda task: (task.state == TaskState.WAITING.value, task.id)
    )
    return replace(status, tasks=tuple(in_turn))
