"""Watches busy workers, and takes back tasks that were sent ahead to slow ones.

A busy worker reads no messages, so the queue behind a long task is taken back without
its help. On `Revoke` the driver makes sure that the worker begins no more tasks of its
queue; `Scheduler.revoked` reports the last task that has begun.
"""

from __future__ import annotations

from aiogpu.core.effects import Forget, Kill, Revoke
from aiogpu.core.model.ids import TaskId
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.scheduler.state import SchedulerState


def watch(node: SchedulerState, worker: WorkerRecord, seconds: float) -> None:
    """Set an alarm to check a busy worker after so many seconds."""
    worker.look_at = node.now + seconds
    worker.watched, worker.watched_since = worker.task, node.now
    node.timers.set(worker.look_at, AlarmKind.LOOK, worker.id)


def check_progress(node: SchedulerState, worker: WorkerRecord, when: float) -> None:
    """Handle an alarm of `watch`: if the same task still runs, revoke the queue."""
    if worker.look_at != when:
        return  # another alarm is set
    worker.look_at = None
    record, config = worker.task, node.config
    if record is None or worker.state is not WorkerState.BUSY:
        return
    if record is not worker.watched:
        watch(
            node,
            worker,
            config.long_task if worker.queue else config.unresponsive_after,
        )
        return
    if worker.queue:
        record.spec.pace.note_long()
    revoke(node, worker)


def revoke(node: SchedulerState, worker: WorkerRecord) -> None:
    """Take back the tasks that a worker has not begun; `on_revoked` requeues them."""
    if not worker.is_revoking:
        worker.is_revoking = True
        worker.revocations += 1
        node.effects.append(Revoke(worker.id, worker.revocations))


def on_revoked(
    node: SchedulerState, worker: WorkerRecord, number: int, began: TaskId | None
) -> None:
    """Requeue, at their old places, the tasks that the worker has not begun."""
    if not worker.is_revoking or worker.revocations != number:
        return  # the worker has finished its queue in the meantime
    worker.is_revoking = False
    assert worker.task is not None, worker
    inflight = [worker.task, *worker.queue]
    begun = count_begun(inflight, began)
    for record in reversed(inflight[max(begun, 1) :]):
        worker.queue.pop()
        return_task(node, record)
    worker.refill_at = 0
    if begun == 0:
        _return_head(node, worker)


def spoil(node: SchedulerState, worker: WorkerRecord) -> None:
    """Requeue the queue of a worker that will exit after its current task."""
    worker.is_last = True
    while worker.queue:
        return_task(node, worker.queue.pop())


def count_begun(inflight: list[TaskRecord], began: int | None) -> int:
    """Return how many of a worker's tasks have begun, `began` being the last."""
    for number, record in enumerate(inflight, start=1):
        if record.id == began:
            return number
    return 0


def return_task(node: SchedulerState, record: TaskRecord) -> None:
    """Requeue a task that was sent but not begun, or end it if it was cancelled."""
    if record.state is TaskState.STOPPING:
        record.worker = None
        node.end(record)
        node.effects.append(Forget(record.id, record.since, False))
    else:
        node.wait_again(record)


def _return_head(node: SchedulerState, worker: WorkerRecord) -> None:
    record = worker.task
    assert record is not None, worker
    worker.task = None
    return_task(node, record)
    is_new = record is not worker.watched
    # The sum with which the alarm was set: a difference may be rounded below.
    is_responsive = (
        is_new or node.now < worker.watched_since + node.config.unresponsive_after
    )
    if is_responsive and not worker.is_killed:
        make_idle(node, worker)
        return
    # The worker hangs although it runs no task: no other task must wait for it.
    worker.is_last = True
    worker.move(WorkerState.ENDING)
    node.effects.append(Kill(worker.id))


def make_idle(node: SchedulerState, worker: WorkerRecord) -> None:
    """End the lease of a worker after its only task was taken back."""
    assert worker.lease is not None, worker
    node.ledger.give_back(worker.lease)
    worker.lease, worker.is_last = None, False
    # A `revoked` that is still to come concerns tasks that the worker no longer has.
    worker.is_revoking = False
    node.workers.put_idle(worker)


def on_skipped(node: SchedulerState, worker: WorkerRecord, record: TaskRecord) -> None:
    """Requeue a task that a worker skipped; the next in its queue becomes current."""
    if worker.task is not record:
        if record in worker.queue:
            worker.queue.remove(record)
            return_task(node, record)
        return
    worker.task = None
    return_task(node, record)
    if worker.queue:
        worker.task = worker.queue.popleft()
        if worker.task.state is TaskState.QUEUED:
            worker.task.state = TaskState.RUNNING
    elif not worker.is_killed:
        make_idle(node, worker)
    else:
        # The worker was killed because of an earlier task and is not gone yet.
        worker.is_last, worker.is_revoking = True, False
        worker.move(WorkerState.ENDING)
