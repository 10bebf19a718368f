"""Starts tasks that list several requests with one that is not their first.

Such a task waits in the queue for its first request. What is free after a placement
fits no waiting task's first request, so a task may take it by another of its own, as a
new task would. The other requests are tried in order, at the head of each queue.
"""

from __future__ import annotations

from aiogpu.core.model.request import TaskSpec
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.dispatch import leave_queue, start
from aiogpu.core.scheduler.state import SchedulerState
from aiogpu.core.scheduler.task_tree import is_disowned


def start_alternatives(node: SchedulerState) -> None:
    """Start waiting tasks by another of their requests, as far as these are free."""
    by_shape = node.ready.by_shape
    for key in list(node.ready.flexible):
        while lanes := by_shape.get(key):
            bucket = lanes[min(lanes)]
            record = bucket.head()
            if node.disowned and is_disowned(record):
                break
            found = take_other(node, record)
            if found is None:
                break
            leave_queue(node, record, bucket)
            record.spec, lease = found
            start(node, record, lease)


def take_other(
    node: SchedulerState, record: TaskRecord
) -> tuple[TaskSpec, Lease] | None:
    """Take a lease for another request of a task; None if none is free.

    Tasks that wait for the same request alone go first.
    """
    first = record.spec
    for spec in first.alternatives:
        if (record.client, spec.shape) in node.ready.by_shape:
            continue
        record.spec = spec
        lease = node.take(record)
        record.spec = first
        if lease is not None:
            return spec, lease
    return None
