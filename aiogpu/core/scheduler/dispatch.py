"""Finds a worker for a lease, and a worker's next task.

A worker that has finished a task passes its lease on to the next task of the same
shape, without the ledger, unless another shape's turn has come. While tasks are short,
some are sent ahead to the worker's queue, so that the worker never waits for the
driver.

A lease for code outside the workers (`aiogpu.lease`) is queued like a task. A record
stands for the processes that hold the lease. The scheduler cannot stop these processes:
it reclaims the lease, which is free when the driver reports that they have ended.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Lane
from aiogpu.core.queue.ready import Bucket
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import (
    Binding,
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    binding_of,
)
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.resources.placement_group import would_help
from aiogpu.core.scheduler.cancellation import interrupt, let_end, retire
from aiogpu.core.scheduler.placement import may_keep_lease
from aiogpu.core.scheduler.revocation import watch
from aiogpu.core.scheduler.state import Restarts, SchedulerState
from aiogpu.core.scheduler.task_tree import is_disowned
from aiogpu.core.scheduler.turns import give_turn


def grant(node: SchedulerState, record: TaskRecord, lease: Lease) -> None:
    """Give a lease to the program or process group that asked for it."""
    holder = node.workers.stand_in()
    record.move(TaskState.RUNNING)
    record.worker, holder.task, holder.lease = holder, record, lease
    lease.holder = holder.id
    holder.watched, holder.watched_since = record, node.now
    node.granted[holder.id] = holder
    node.ungranted.discard(record.id)
    if record.spec.is_grouped:
        node.note_group(record)
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
    """Start a task on an idle or a new worker; grant a lease to its holder."""
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
        binding = binding_of(spec, lease)
        worker = workers.take_bound(binding, spec.function) or _take_prepared(
            node, record, binding
        )
        if worker is not None:
            node.effects.append(assign(node, record, worker, lease))
            return
    worker = _take_spare(node, record)
    if worker is not None:
        node.effects.append(assign(node, record, worker, lease))
    else:
        worker = workers.take_unclaimed(environment)
        if worker is None:
            worker = workers.create(environment)
            node.effects.append(effects.Spawn(worker.id, environment, record.id))
            if node.outages and environment in node.outages:
                node.outages[environment].worker = worker.id
        record.move(TaskState.STARTING)
        record.worker, worker.task, worker.lease = worker, record, lease
        lease.holder = worker.id
    if node.spares.missing(environment, workers.spares(environment)):
        delay = node.config.refill_after
        if not delay:
            refill_spares(node)
        elif node.spares.await_refill():
            # Later, because forking would slow down the task that has just started.
            node.timers.set(node.now + delay, AlarmKind.REFILL, 0)


def _take_prepared(
    node: SchedulerState, record: TaskRecord, binding: Binding
) -> WorkerRecord | None:
    """Take the last used of the idle workers that are prepared for a task.

    Returns:
        None if a new worker is better than each of them: they stay, since users keep
        models and caches in them.
    """
    for worker in node.workers.idle_with(binding):
        if not node.is_unprepared(worker, record):
            node.workers.leave_idle(worker)
            worker.prepared[record.spec.function] = None
            return worker
    return None


def _take_spare(node: SchedulerState, record: TaskRecord) -> WorkerRecord | None:
    """Take a clean worker, unless a new worker need not import what this one must."""
    spare = node.workers.spare(record.spec.shape.environment)
    if spare is None:
        return None
    if (
        node.is_outdone is not None
        and node.is_outdone(spare.id, record.id)
        and node.has_room_for(record)
    ):
        return None
    node.workers.leave_idle(spare)
    return spare


def refill_spares(node: SchedulerState) -> None:
    """Fork clean workers until there are as many spares as wanted."""
    node.spares.note_refill()
    if node.worker_limit.refused and node.ready.by_shape:
        return
    for environment in node.spares.wanted:
        if environment in node.outages:
            continue
        present = node.workers.spares(environment)
        missing = node.spares.missing(environment, present)
        for _ in range(min(missing, node.worker_limit.now - len(node.workers))):
            spare = node.workers.create(environment)
            node.workers.put_unclaimed(spare)
            node.effects.append(effects.Spawn(spare.id, environment))


def on_worker_started(node: SchedulerState, worker: WorkerRecord) -> None:
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
        worker.prepared[spec.function] = None
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
        watch(node, worker, node.config.unresponsive_after)
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
    """Make the next task in a worker's queue its current task.

    If that task was cancelled in the queue, `revoked` decides what happens to it. If
    `revoked` has come and the task is still in the queue, the task has begun.
    """
    record = worker.task = worker.queue.popleft()
    if record.state is _QUEUED:
        record.state = _RUNNING
        if record.spec.is_timed and record.began is None:
            record.began = node.now
    elif not worker.is_revoking:
        # `revoked` came before the result of the previous task.
        interrupt(node, record)
    accepts_tasks = not (worker.is_revoking or worker.is_killed)
    if len(worker.queue) <= worker.refill_at and accepts_tasks:
        lanes = node.ready.by_shape.get((record.client, record.spec.shape))
        if lanes is not None and may_follow(node, worker, lanes[min(lanes)]):
            ahead: list[TaskId] = []
            refill(node, worker, lanes, ahead)
            if ahead:
                node.effects.append(effects.Ahead(worker.id, ahead))


def hand_over(
    node: SchedulerState, worker: WorkerRecord, lanes: dict[Lane, Bucket]
) -> bool:
    """Give a worker and its lease to the next task of the shape; False if not allowed.

    The lease stays as it is, so the ledger is not involved.
    """
    bucket = lanes[min(lanes)]
    record = bucket.head()
    if record.spec.max_calls or worker.is_last or worker.is_killed:
        return False
    if not may_follow(node, worker, bucket):
        return False
    if node.is_outdone is not None and record.spec.function not in worker.prepared:
        if node.is_unprepared(worker, record):
            return False
        worker.prepared[record.spec.function] = None
    leave_queue(node, record, bucket)
    record.state = _RUNNING
    record.worker, worker.task = worker, record
    if record.spec.is_timed:
        record.began = node.now
    ahead = [record.id]
    node.effects.append(effects.Ahead(worker.id, ahead))
    if lanes:
        refill(node, worker, lanes, ahead)
    if worker.look_at is None:
        watch(node, worker, node.config.unresponsive_after)
    return True


def may_follow(node: SchedulerState, worker: WorkerRecord, bucket: Bucket) -> bool:
    """Return True if a lease may pass to the next task of its shape directly."""
    ledger, plan, lease = node.ledger, node.reservation, worker.lease
    assert lease is not None, worker
    # A reservation for this very task is no obstacle: the lease fulfils it.
    if plan is not None and plan.record is not bucket.head() and plan.wants(lease):
        return False
    if node.exclusive.is_wanted:
        return False
    if node.disowned and is_disowned(bucket.head()):
        return False
    if worker.is_stale or (lease.shares and ledger.drains(lease)):
        return False
    # A task that stopped waiting took its CPUs back although others held them: tasks
    # that end must return CPUs first.
    if lease.home.is_overdrawn:
        return False
    clients = node.clients
    if clients is not None and not may_keep_lease(node, lease, bucket):
        return False
    if node.ready.indexes and bucket.group.index is not None:
        # Imported late: few programs have so many groups.
        from aiogpu.core.scheduler.contention.many_groups import is_first

        return is_first(node, bucket, None if node.worker_limit.refused else lease)
    if node.worker_limit.refused:
        # The first waiting task may need this worker's slot rather than its lease.
        return node.ready.is_first(bucket)
    return node.ready.is_first(bucket, lambda other: would_help(ledger, lease, other))


def leave_queue(node: SchedulerState, record: TaskRecord, bucket: Bucket) -> None:
    """Take the first task of a bucket out of the queue."""
    bucket.pop()
    if record.kin is not None:
        give_turn(node, record)
    if node.reservation is not None and node.reservation.record is record:
        node.reservation = None


def refill(
    node: SchedulerState,
    worker: WorkerRecord,
    lanes: dict[Lane, Bucket],
    ahead: list[TaskId],
) -> None:
    """Send short tasks ahead to a worker, at most its part of the shape's tasks."""
    queue = worker.queue
    count = sum([bucket.size for bucket in lanes.values()])
    fair = count // max(len(node.ledger.leases), 2)
    while True:  # at most half of the tasks are taken, so `lanes` never gets empty
        bucket = lanes[min(lanes)]
        record = bucket.head()
        if record.spec.max_calls:
            break
        room = min(record.spec.pace.depth, fair) - len(queue)
        if room <= 0:
            break
        if node.is_outdone is not None and record.spec.function not in worker.prepared:
            break  # handed over alone, if at all
        if record.kin is not None:
            if node.disowned and is_disowned(record):
                break
            room = 1
        reservation = node.reservation
        if reservation is not None:
            room = 1
            if reservation.record is record:
                node.reservation = None
        taken = bucket.take(room)
        if record.kin is not None:
            give_turn(node, record)
        for queued in taken:
            queued.state = _QUEUED
            queued.worker = worker
            ahead.append(queued.id)
        queue.extend(taken)
    worker.refill_at = len(queue) // 2
    if queue:
        soon = node.now + node.config.long_task
        if worker.look_at is None or worker.look_at > soon:
            watch(node, worker, node.config.long_task)
