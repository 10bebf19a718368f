"""From a lease to a worker, and from one task of a worker to its next.

A worker that has ended a task takes the next one of the same shape over with its lease,
without the ledger, as long as no other shape's turn has come. While tasks are short, it
is sent some ahead, so that it never waits for an answer.

A lease for code that no worker runs (`aiogpu.lease`) is queued like a task. Instead of
a worker, a record stands for the processes that others start and end. The scheduler
cannot stop these: what nobody may hold any more is reclaimed, and is free when it is
reported that they have gone.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Lane
from aiogpu.core.queue.ready import Bucket
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import (
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    binding_of,
)
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.resources.placement_group import would_help
from aiogpu.core.scheduler.cancellation import interrupt, let_end, retire
from aiogpu.core.scheduler.placement import may_go_on
from aiogpu.core.scheduler.revocation import watch
from aiogpu.core.scheduler.state import Restarts, SchedulerState


def grant(node: SchedulerState, record: TaskRecord, lease: Lease) -> None:
    """Give a lease to the program or process group that asked for it."""
    holder = node.workers.stand_in()
    record.move(TaskState.RUNNING)
    record.worker, holder.task, holder.lease = holder, record, lease
    lease.holder = holder.id
    holder.watched, holder.watched_since = record, node.now
    node.granted[holder.id] = holder
    if node.ready.by_shape:
        node.expect_stalls()
    node.effects.append(effects.Granted(record.id, holder.id, lease))


def return_lease(node: SchedulerState, holder_id: WorkerId, settles: bool) -> None:
    """End a granted lease, once the processes that used it have ended."""
    holder = node.granted.get(holder_id)
    if holder is None or holder.task is None:
        return
    record, lease = holder.task, holder.lease
    assert lease is not None, holder
    record.worker = holder.task = None
    if settles and not node.is_closing:
        node.ledger.keep_devices(lease)
        holder.move(WorkerState.SETTLING)
    else:
        del node.granted[holder.id]
        node.ledger.give_back(lease)
    node.end(record)
    node.effects.append(effects.Forget(record.id, record.since))


def end_leases(node: SchedulerState) -> None:
    """End all granted leases as the node closes; their processes may go on."""
    for holder in list(node.granted.values()):
        assert holder.task is not None, holder
        if holder.task.state is TaskState.RUNNING:
            node.effects.append(effects.Fail(holder.task.id, effects.Failure.ABANDONED))
        return_lease(node, holder.id, False)


_QUEUED: Final = TaskState.QUEUED
_RUNNING: Final = TaskState.RUNNING


def start(node: SchedulerState, record: TaskRecord, lease: Lease) -> None:
    """Find a worker for a task, an idle one that fits or a new one; grant a lease."""
    if node.clients is not None:
        node.clients.begin(record, lease)
    if record.spec.is_lease:
        grant(node, record, lease)
    else:
        _find_worker(node, record, lease)


def _find_worker(node: SchedulerState, record: TaskRecord, lease: Lease) -> None:
    spec, workers = record.spec, node.workers
    environment = spec.shape.environment
    if spec.max_calls and node.spares.want(environment, node.now):
        node.note_spares()
    if spec.max_calls != 1:
        worker = workers.take_bound(binding_of(spec, lease))
        if worker is not None:
            node.effects.append(assign(node, record, worker, lease))
            return
    worker = workers.take_clean(environment)
    if worker is not None:
        node.effects.append(assign(node, record, worker, lease))
    else:
        worker = workers.take_unclaimed(environment)
        if worker is None:
            worker = workers.create(environment)
            node.effects.append(effects.Spawn(worker.id, environment))
            if node.outages and environment in node.outages:
                node.outages[environment].worker = worker.id
        record.move(TaskState.STARTING)
        record.worker, worker.task, worker.lease = worker, record, lease
        lease.holder = worker.id
    if node.spares.missing(environment, workers.spares(environment)):
        later = node.config.refill_after
        if not later:
            refill_spares(node)
        elif node.spares.await_refill():
            # Not beside the task that has just begun: forking would slow it down.
            node.timers.set(node.now + later, AlarmKind.REFILL, 0)


def refill_spares(node: SchedulerState) -> None:
    """Fork clean workers until there are as many spares as wanted."""
    node.spares.note_refill()
    if node.worker_limit.refused and node.ready.by_shape:
        return
    for environment in node.spares.wanted:
        if environment in node.outages:
            continue
        there = node.workers.spares(environment)
        missing = node.spares.missing(environment, there)
        for _ in range(min(missing, node.worker_limit.now - len(node.workers))):
            spare = node.workers.create(environment)
            node.workers.put_unclaimed(spare)
            node.effects.append(effects.Spawn(spare.id, environment))


def welcome(node: SchedulerState, worker: WorkerRecord) -> None:
    """Give a worker that has just connected its task, or make it idle."""
    node.spares.note_start(worker.environment, True)
    if node.worker_limit.failures:
        node.worker_limit.note_change()
    record, lease = worker.task, worker.lease
    if record is not None and lease is not None:
        record.starts_failed = 0
        node.effects.append(assign(node, record, worker, lease))
    elif worker.is_stale:
        retire(node, worker)
    else:
        node.workers.put_idle(worker)


def assign(
    node: SchedulerState, record: TaskRecord, worker: WorkerRecord, lease: Lease
) -> effects.Assign:
    """Assign a task to a connected worker that has none."""
    spec = record.spec
    is_first = worker.binding is None
    if is_first:
        worker.binding = binding_of(spec, lease)
    if spec.max_calls:
        calls = worker.calls.get(spec.function, 0) + 1
        worker.is_last = calls >= spec.max_calls
        if spec.is_endless:
            node.restarts.setdefault(record.id, Restarts()).began = node.now
    if spec.is_endless and node.ready.by_shape:
        node.expect_stalls()
    record.move(_RUNNING)
    worker.move(WorkerState.BUSY)
    record.worker, worker.task, worker.lease = worker, record, lease
    if spec.is_timed:
        record.began = node.now
    lease.holder = worker.id
    if worker.look_at is None:
        watch(node, worker, node.config.unheard)
    return effects.Assign(record.id, worker.id, lease, is_first, worker.is_last)


def release(node: SchedulerState, worker: WorkerRecord) -> bool:
    """End the lease of a worker without a task; False if the worker exits first."""
    if worker.is_last or worker.is_killed:
        let_end(node, worker)
        return False
    if worker.is_stale:
        retire(node, worker)
        return False
    assert worker.lease is not None, worker
    node.ledger.give_back(worker.lease)
    worker.lease = None
    node.workers.put_idle(worker)
    return True


def take_turn(node: SchedulerState, worker: WorkerRecord) -> None:
    """Make the next task that a worker was sent ahead its present one.

    One that was cancelled there is decided about when its queue is `Revoked`; if it
    was before, and the task is still here, it has begun.
    """
    record = worker.task = worker.queue.popleft()
    if record.state is _QUEUED:
        record.state = _RUNNING
        if record.spec.is_timed and record.began is None:
            record.began = node.now
    elif not worker.is_revoking:
        # It was known to have begun before the answer of the one before it came.
        interrupt(node, record)
    is_taken_from = worker.is_revoking or worker.is_killed
    if len(worker.queue) <= worker.refill_at and not is_taken_from:
        lanes = node.ready.by_shape.get((record.client, record.spec.shape))
        if lanes is not None and may_follow(node, worker, lanes[min(lanes)]):
            ahead: list[TaskId] = []
            refill(node, worker, lanes, ahead)
            if ahead:
                node.effects.append(effects.Ahead(worker.id, ahead))


def hand_over(
    node: SchedulerState, worker: WorkerRecord, lanes: dict[Lane, Bucket]
) -> bool:
    """Give a worker and its lease to the next task of that shape; False if none may.

    Whatever its last task held is held on, so the ledger need not know.
    """
    bucket = lanes[min(lanes)]
    record = bucket.head()
    assert record is not None, bucket
    if record.spec.max_calls or worker.is_last or worker.is_killed:
        return False
    if not may_follow(node, worker, bucket):
        return False
    _leave_queue(node, record, bucket)
    record.state = _RUNNING
    record.worker, worker.task = worker, record
    if record.spec.is_timed:
        record.began = node.now
    ahead = [record.id]
    node.effects.append(effects.Ahead(worker.id, ahead))
    if lanes:
        refill(node, worker, lanes, ahead)
    if worker.look_at is None:
        watch(node, worker, node.config.unheard)
    return True


def may_follow(node: SchedulerState, worker: WorkerRecord, bucket: Bucket) -> bool:
    """Return whether a lease may pass to the next task of its shape directly."""
    ledger, kept, lease = node.ledger, node.reservation, worker.lease
    assert lease is not None, worker
    # What is kept for this very shape's first task is what the lease would give it.
    if kept is not None and kept.record is not bucket.head() and kept.wants(lease):
        return False
    if node.exclusive.is_wanted:
        return False
    if worker.is_stale or (lease.shares and ledger.drains(lease)):
        return False
    # A task that has waited took its CPUs again although others had them: those that
    # end make up for it.
    if lease.home.is_overdrawn:
        return False
    clients = node.clients
    if clients is not None and not may_go_on(node, lease, bucket):
        return False
    if node.worker_limit.refused:
        # Whoever comes first may need this worker's place, whatever it holds.
        return node.ready.is_first(bucket)
    return node.ready.is_first(bucket, lambda other: would_help(ledger, lease, other))


def _leave_queue(node: SchedulerState, record: TaskRecord, bucket: Bucket) -> None:
    bucket.pop()
    if node.reservation is not None and node.reservation.record is record:
        node.reservation = None


def refill(
    node: SchedulerState,
    worker: WorkerRecord,
    lanes: dict[Lane, Bucket],
    ahead: list[TaskId],
) -> None:
    """Send short tasks ahead to a worker, at most its fair part of those of a shape."""
    queue = worker.queue
    count = sum([bucket.size for bucket in lanes.values()])
    fair = count // max(len(node.ledger.leases), 2)
    while True:  # as at most half of them are taken, some are always left
        bucket = lanes[min(lanes)]
        record = bucket.head()
        if record is None or record.spec.max_calls:
            break
        room = min(record.spec.pace.depth, fair) - len(queue)
        if room <= 0:
            break
        kept = node.reservation
        if kept is not None:
            room = 1
            if kept.record is record:
                node.reservation = None
        taken = bucket.take(room)
        for each in taken:
            each.state = _QUEUED
            each.worker = worker
            ahead.append(each.id)
        queue.extend(taken)
    worker.refill_at = len(queue) // 2
    if queue:
        soon = node.now + node.config.long
        if worker.look_at is None or worker.look_at > soon:
            watch(node, worker, node.config.long)
