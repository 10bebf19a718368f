"""When a task that has failed is tried again.

The first time at once: most failures are of the moment. Then later and later, so
that what fails for good does not keep the node busy with it.
"""

from __future__ import annotations

from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord, move_task
from aiogpu.core.restart import pause_of
from aiogpu.core.specs import UNLIMITED
from aiogpu.core.timers import AlarmKind


def may_retry(record: TaskRecord) -> bool:
    """Use up one retry of the task; False if it has none left."""
    if record.retries_left == 0:
        return False
    if record.retries_left != UNLIMITED:
        record.retries_left -= 1
    record.retries += 1
    return True


def retry(node: Node, record: TaskRecord, now: float) -> None:
    """Have a task wait again, at once or after a while; it holds nothing any more."""
    if record.spec.is_endless:
        delay = pause_of(node, record)
    else:
        delay = node.patience.retry_delay(record.retries)
    # It may have answered before the kill that was to make room.
    record.is_starved = record.is_outgrown = False
    if delay == 0:
        node.wait_again(record)
        return
    record.worker = None
    if node.solitude.is_wanted:
        node.solitude.leave(record)
    move_task(record, TaskState.DELAYED)
    node.delayed[record.id] = record
    node.timers.set(now + delay, AlarmKind.RETRY, record.id)


def go_on_waiting(node: Node, record: TaskRecord) -> None:
    """A task has been delayed for long enough."""
    del node.delayed[record.id]
    node.wait_again(record)
