"""Stops tasks in whichever state they are, and retires workers that idle."""

from __future__ import annotations

from typing import Final

from aiogpu.core.effects import Forget, Interrupt, Kill, Reclaim, Retire
from aiogpu.core.model.request import Environment
from aiogpu.core.model.text import span
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import Stop, TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.scheduler.revocation import revoke
from aiogpu.core.scheduler.state import SchedulerState

MOMENT: Final = 1e-3
"""Seconds that pass between two interrupts at least."""

HAS_NOT_BEGUN: Final = (
    TaskState.WAITING,
    TaskState.DELAYED,
    TaskState.EXPECTING,
    TaskState.STARTING,
)
"""No code of a task in these has run, or of its last try: it ends at once."""


def withdraw(node: SchedulerState, record: TaskRecord) -> None:
    """Stop a task in whichever state it is; its owner waits for nothing."""
    state = record.state
    if state is TaskState.STOPPING:
        return
    if state in HAS_NOT_BEGUN:
        if state is TaskState.DELAYED:
            del node.delayed[record.id]
        elif state is TaskState.EXPECTING:
            del node.expecting[record.id]
        elif state is TaskState.STARTING:
            unclaim(node, record)
        node.end(record)
        if state is TaskState.WAITING:
            node.ready.discard(record)
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
        # It is `lease_returned` when nobody holds it any more.
        node.effects.append(Reclaim(record.id, worker.id))


def lapse(record: TaskRecord, now: float) -> str:
    """Say how long a task has waited so far, for what, and how long it has run."""
    request = record.spec.shape.request
    has_amounts = request.scalars or request.devices
    told = f" for {request}" if has_amounts else ""
    if record.state is TaskState.EXPECTING:
        told = " for its arguments"
    ran, before = "did not begin", ""
    waited = now - record.since
    if record.began is not None:
        waited, ran = record.began - record.since, f"ran {span(now - record.began)}"
    if record.retries:
        before = f" (with {record.retries} earlier tries)"
    return f"it waited {span(waited)}{told}{before} and {ran}"


def unclaim(node: SchedulerState, record: TaskRecord) -> None:
    """Take a task from the worker that is being forked for it, with its lease."""
    worker = record.worker
    assert worker is not None, record
    assert worker.lease is not None, worker
    node.ledger.give_back(worker.lease)
    worker.lease = worker.task = record.worker = None
    node.workers.put_unclaimed(worker)


def interrupt(node: SchedulerState, record: TaskRecord) -> None:
    """Ask a task's worker to stop it, once more if need be."""
    assert record.worker is not None, record
    if record.stop is None:
        left = node.stop_grace_of(record) if record.spec.stop_grace else 0.0
        record.stop = Stop(node.now + left + node.grace_of(record))
        if left:
            node.timers.set(node.now + left, AlarmKind.STOP, record.id)
            return
    stop = record.stop
    node.effects.append(Interrupt(record.id, record.worker.id, stop.interrupts))
    stop.interrupts += 1
    again = min(node.now + max(node.config.interrupt_every, MOMENT), stop.kill_at)
    node.timers.set(again, AlarmKind.STOP, record.id)


def go_on_stopping(node: SchedulerState, record: TaskRecord) -> None:
    """Interrupt a task that has not stopped yet again, or kill its worker."""
    worker = record.worker
    assert record.stop is not None, record
    assert worker is not None, record
    if node.now < record.stop.kill_at:
        interrupt(node, record)
    elif worker.queue:
        # Being taken back; what is queued shall not die with it.
        again = node.now + node.config.long
        node.timers.set(again, AlarmKind.STOP, record.id)
    else:
        kill_worker(node, worker)


def kill_worker(node: SchedulerState, worker: WorkerRecord) -> None:
    """Kill a worker. Its answer may still arrive, but it gets no further task."""
    worker.is_last, worker.is_killed = not worker.queue, True
    node.effects.append(Kill(worker.id))


def retire_idle(node: SchedulerState) -> None:
    """Retire the workers that have been idle longest, if there are too many."""
    while node.workers.idle > node.most_idle:
        worker = node.workers.pop_idle(node.spares)
        retire(node, worker)


def evict_idle_worker(node: SchedulerState) -> None:
    """Retire an idle worker for each task that lacks nothing but a worker."""
    limit = node.worker_limit
    while len(limit.leaving) < limit.refused and node.workers.idle:
        worker = node.workers.pop_idle()
        limit.leaving.add(worker.id)
        retire(node, worker)


def retire_spares(node: SchedulerState) -> None:
    """Retire the spares of environments that were not used for long."""
    for environment in node.spares.unwanted(node.now):
        retire_clean(node, environment)
    node.note_spares()


def retire_clean(node: SchedulerState, environment: Environment) -> None:
    """Retire the workers that wait for their first task, those that start included."""
    for worker in node.workers.drop_unclaimed(environment):
        worker.is_stale = True
    for worker in node.workers.clean(environment):
        node.workers.leave_idle(worker)
        retire(node, worker)


def retire_bound(node: SchedulerState, kind: str, index: int) -> None:
    """Retire the workers that have a device open; busy ones after their task."""
    for worker in node.workers.bound_to(kind, index):
        if worker.state is WorkerState.BUSY:
            worker.is_stale = True
        else:
            node.workers.leave_idle(worker)
            retire(node, worker)


def retire(node: SchedulerState, worker: WorkerRecord) -> None:
    """Tell a worker without a task to end."""
    let_end(node, worker)
    node.effects.append(Retire(worker.id))


def let_end(node: SchedulerState, worker: WorkerRecord) -> None:
    """Mark a worker as ending, and kill it if it takes too long."""
    worker.move(WorkerState.ENDING)
    node.timers.set(node.now + node.config.exit_grace, AlarmKind.END, worker.id)
