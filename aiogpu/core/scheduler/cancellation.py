"""Stops tasks in any state, and retires idle workers."""

from __future__ import annotations

from typing import Final

from aiogpu.core.effects import Forget, Interrupt, Kill, Reclaim, Retire, Unclaim
from aiogpu.core.model.request import Environment
from aiogpu.core.model.text import span
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import Stop, TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.scheduler.revocation import revoke
from aiogpu.core.scheduler.state import SchedulerState

MIN_INTERRUPT_INTERVAL: Final = 1e-3
"""Least seconds between two interrupts of a task."""

SOON: Final = 1.0
"""Seconds until a retired worker is killed if its memory is needed."""

HAS_NOT_BEGUN: Final = (
    TaskState.WAITING,
    TaskState.DELAYED,
    TaskState.EXPECTING,
    TaskState.STARTING,
    TaskState.EVICTED,
)
"""In these states no code of the current attempt has run: the task ends at once."""


def withdraw(node: SchedulerState, record: TaskRecord) -> None:
    """Stop a task in any state; its owner no longer waits for it."""
    state = record.state
    if state is TaskState.STOPPING:
        return
    if record.spec.is_grouped:
        node.note_group(record)
    if state in HAS_NOT_BEGUN:
        if state is TaskState.DELAYED:
            del node.delayed[record.id]
        elif state is TaskState.EXPECTING:
            del node.expecting[record.id]
        elif state is TaskState.EVICTED:
            del node.evicted[record.id]
        elif state is TaskState.STARTING:
            unclaim(node, record)
        node.end(record)
        if state is TaskState.WAITING:
            node.ready.discard(record)
            node.ungranted.discard(record.id)
        node.effects.append(Forget(record.id, record.since, False))
        return
    worker = record.worker
    assert worker is not None, record
    record.move(TaskState.STOPPING)
    if state is TaskState.QUEUED:
        revoke(node, worker)
    elif not record.spec.is_lease:
        interrupt(node, record)
        if worker.queue:
            revoke(node, worker)
    elif not record.spec.is_grouped:
        # `lease_returned` follows when its processes have ended.
        node.effects.append(Reclaim(record.id, worker.id))


def describe_times(record: TaskRecord, now: float) -> str:
    """Describe how long a task has waited, for what, and how long it has run."""
    request = record.spec.shape.request
    has_amounts = request.scalars or request.devices
    purpose = f" for {request}" if has_amounts else ""
    if record.state is TaskState.EXPECTING:
        purpose = " for its arguments"
    ran, before = "did not begin", ""
    waited = now - record.since
    if record.began is not None:
        waited, ran = record.began - record.since, f"ran {span(now - record.began)}"
    if record.retries:
        before = f" (with {record.retries} earlier tries)"
    return f"it waited {span(waited)}{purpose}{before} and {ran}"


def unclaim(node: SchedulerState, record: TaskRecord) -> None:
    """Take a task and its lease from the worker that is being forked for the task."""
    worker = record.worker
    assert worker is not None, record
    assert worker.lease is not None, worker
    node.ledger.give_back(worker.lease)
    worker.lease = worker.task = record.worker = None
    node.workers.put_unclaimed(worker)
    node.effects.append(Unclaim(worker.id))


def interrupt(node: SchedulerState, record: TaskRecord) -> None:
    """Ask a task's worker to stop the task, and set a timer to ask again."""
    assert record.worker is not None, record
    if record.stop is None:
        delay = node.stop_grace_of(record) if record.spec.stop_grace else 0.0
        record.stop = Stop(node.now + delay + node.grace_of(record))
        if delay:
            node.timers.set(node.now + delay, AlarmKind.STOP, record.id)
            return
    stop = record.stop
    node.effects.append(Interrupt(record.id, record.worker.id, stop.interrupts))
    stop.interrupts += 1
    interval = max(node.config.interrupt_every, MIN_INTERRUPT_INTERVAL)
    again = min(node.now + interval, stop.kill_at)
    node.timers.set(again, AlarmKind.STOP, record.id)


def interrupt_again_or_kill(node: SchedulerState, record: TaskRecord) -> None:
    """Interrupt a task that has not stopped yet; kill its worker if time is up."""
    worker = record.worker
    assert record.stop is not None, record
    assert worker is not None, record
    if node.now < record.stop.kill_at:
        interrupt(node, record)
    elif worker.queue:
        # Wait until the queue has been taken back: its tasks must not die as well.
        again = node.now + node.config.long_task
        node.timers.set(again, AlarmKind.STOP, record.id)
    else:
        kill_worker(node, worker)


def kill_worker(node: SchedulerState, worker: WorkerRecord) -> None:
    """Kill a worker. Its replies may still arrive, but it gets no further task."""
    worker.is_last, worker.is_killed = not worker.queue, True
    node.effects.append(Kill(worker.id))


def retire_idle(node: SchedulerState) -> None:
    """Retire the least useful idle workers while there are too many."""
    while node.workers.idle > node.most_idle:
        worker = node.workers.pop_idle(node.spares)
        retire(node, worker)


def evict_idle_worker(node: SchedulerState) -> None:
    """Retire an idle worker for each waiting task that lacks only a worker."""
    limit = node.worker_limit
    while len(limit.leaving) < limit.refused and node.workers.idle:
        worker = node.workers.pop_idle()
        limit.leaving.add(worker.id)
        retire(node, worker)


def retire_spares(node: SchedulerState) -> None:
    """Retire the spares that were not used for long."""
    for environment in node.spares.pop_unused(node.now):
        retire_clean(node, environment)
    node.note_spares()


def retire_clean(node: SchedulerState, environment: Environment) -> None:
    """Retire an environment's workers without a first task, starting ones included."""
    for worker in node.workers.drop_unclaimed(environment):
        worker.is_stale = True
    for worker in node.workers.clean(environment):
        node.workers.leave_idle(worker)
        retire(node, worker)


def retire_bound(node: SchedulerState, kind: str, index: int) -> None:
    """Retire the workers bound to a device; busy ones after their task."""
    for worker in node.workers.bound_to(kind, index):
        if worker.state is WorkerState.BUSY:
            worker.is_stale = True
        else:
            node.workers.leave_idle(worker)
            retire(node, worker)


def retire(node: SchedulerState, worker: WorkerRecord) -> None:
    """Tell a worker without a task to exit."""
    let_end(node, worker)
    node.effects.append(Retire(worker.id))


def let_end(node: SchedulerState, worker: WorkerRecord) -> None:
    """Mark a worker as ending, and kill it if it takes too long."""
    worker.move(WorkerState.ENDING)
    node.timers.set(node.now + node.config.exit_grace, AlarmKind.END, worker.id)
