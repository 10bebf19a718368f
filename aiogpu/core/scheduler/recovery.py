"""Handles failed tasks and workers that are gone: retries, restarts, ends.

- A worker is gone: its tasks are retried or failed at once. Its lease ends when its
  devices are known to be free; until then the worker is `SETTLING`. It also is while a
  killed process of it has not ended: then it keeps all that it holds.
- A retry: the first is immediate, because most failures are temporary. The delay grows
  with each further retry, so that a permanent failure does not keep the node busy.
- An actor has died: if it had lived for a while, it restarts at once. If it dies
  repeatedly, the delay grows with each death; after several deaths in a row the actor
  is given up in spite of its `max_restarts`, because it would only hold its devices.
- Out of GPU memory: if its options allow, a task gets one more attempt with twice its
  share, and one with a whole device, each once, in addition to `max_retries`.
- A worker could not be started (an outage): tasks of its environment wait in the queue
  and hold nothing; live workers of the environment still serve them. After a pause one
  worker is started. If it fails too, the next pause is twice as long, up to a limit,
  for as long as tasks wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.core.effects import Fail, Failure, Forget, Settle
from aiogpu.core.model.config import STARTS_ALLOWED
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import DeviceSelector, Request, Shape, TaskSpec
from aiogpu.core.model.units import GPU, UNIT
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import Memory, TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.revocation import count_begun, return_task
from aiogpu.core.scheduler.state import Outage, Restarts, SchedulerState
from aiogpu.core.scheduler.task_tree import on_task_ended

if TYPE_CHECKING:
    from aiogpu.core.model.request import Environment


def note_outage(node: SchedulerState, environment: Environment, reason: str) -> None:
    """Note that a worker could not be started, and start no other for a while."""
    outage = node.outages.get(environment)
    if outage is None:
        outage = node.outages[environment] = Outage(reason, node.now)
    outage.reason = reason
    if outage.is_paused:
        return  # this worker belongs to an attempt that was counted already
    outage.failures += 1
    outage.is_paused = True
    outage.retry_at = node.now + node.config.start_retry_delay(outage.failures)
    node.timers.set(outage.retry_at, AlarmKind.OUTAGE, 0)


def retry_outages(node: SchedulerState) -> None:
    """Allow one worker for each environment whose pause is over.

    An outage for which no task waits is forgotten: the next task tries at once.
    """
    for environment, outage in list(node.outages.items()):
        if outage.is_paused and outage.retry_at <= node.now:
            outage.is_paused = False
            waiting = node.ready.by_shape
            if not any(shape.environment == environment for _, shape in waiting):
                del node.outages[environment]


def note_death(node: SchedulerState, record: TaskRecord) -> bool:
    """Count the death of an actor's worker; False if too many came in a row."""
    restarts = node.restarts.setdefault(record.id, Restarts())
    if node.now - restarts.began >= node.config.stable_after:
        restarts.in_a_row = 0
    restarts.in_a_row += 1
    return restarts.in_a_row <= node.config.restarts_in_a_row


def may_retry(record: TaskRecord) -> bool:
    """Use up one retry of the task; False if it has none left."""
    if record.retries_left == 0:
        return False
    record.retries += 1
    return True


def retry_later(node: SchedulerState, record: TaskRecord) -> None:
    """Queue a task without a lease again, at once or after a delay."""
    failures = record.retries
    if record.spec.is_endless:
        failures = node.restarts.setdefault(record.id, Restarts()).in_a_row
    delay = node.config.retry_delay(failures)
    # The task may have sent its result before the kill for memory took effect.
    record.killed_for = None
    if delay == 0:
        node.wait_again(record)
        return
    if node.exclusive.is_wanted:
        node.exclusive.leave(record)
    node.delay(record, node.now + delay, AlarmKind.RETRY)


def with_more_memory(spec: TaskSpec) -> list[TaskSpec]:
    """Return specs for the next attempt, of which the first that can run is taken.

    There is none if the spec has a whole GPU already, or allows no further attempt.
    """
    request, environment = spec.shape.request, spec.shape.environment
    amount = dict(request.devices).get(GPU, UNIT)
    if not spec.retries_oom or spec.is_endless or amount >= UNIT:
        return []
    shape = Shape(_whole(request), environment)
    specs = [replace(spec, shape=shape, retries_oom=False, doubles_share=False)]
    if spec.doubles_share and 2 * amount < UNIT:
        shape = Shape(_doubled(request), environment)
        specs.insert(0, replace(spec, shape=shape, doubles_share=False))
    return specs


def _doubled(request: Request) -> Request:
    devices = tuple(
        (kind, 2 * amount if kind == GPU else amount)
        for kind, amount in request.devices
    )
    memory = request.gpu_memory
    return replace(
        request, devices=devices, gpu_memory=2 * memory if memory > 0 else memory
    )


def _whole(request: Request) -> Request:
    devices = tuple(
        (kind, UNIT if kind == GPU else amount) for kind, amount in request.devices
    )
    where = request.where
    if request.gpu_memory > 0:
        # The new device must not be smaller than the reserved memory.
        least = max(request.gpu_memory, where.least_memory if where else 0)
        where = replace(where or DeviceSelector(), least_memory=least)
    return replace(request, devices=devices, where=where, gpu_memory=0)


def try_with_more_memory(node: SchedulerState, record: TaskRecord) -> bool:
    """Queue a task without a lease for twice its share, or for a device of its own.

    Returns:
        False if this is not allowed or the task would wait for ever; then nothing has
        changed.
    """
    before = record.spec
    for spec in with_more_memory(before):
        record.spec = spec
        if not (_is_beyond_limits(node, record) or _would_deadlock(node, record)):
            record.killed_for = None
            node.wait_again(record)
            return True
    record.spec = before
    return False


def _is_beyond_limits(node: SchedulerState, record: TaskRecord) -> bool:
    """Return True if the request of a task could not be granted within finite time."""
    # Imported late: most programs never run out of device memory.
    from aiogpu.core.scheduler.contention.reservation import is_held_for_good

    request, clients = record.spec.shape.request, node.clients
    if clients is not None and not clients.allows(record.client, request):
        return True
    return is_held_for_good(node, record)


def _would_deadlock(node: SchedulerState, record: TaskRecord) -> bool:
    """Return True if a task, queued again, would cause a deadlock."""
    if not node.blocked:
        return False
    from aiogpu.core.scheduler.contention.deadlock import (
        find_deadlocks,  # late: few tasks wait
    )

    state, record.state = record.state, TaskState.WAITING
    deadlocks = find_deadlocks(node, requeued=record)
    record.state = state
    return bool(deadlocks)


GIVEN_UP: Final = (
    "It died several times in a row, each time soon after a start, and is not "
    "restarted again."
)


class End(NamedTuple):
    """The end of a worker; see `Scheduler.worker_gone`."""

    began: TaskId | None
    settles: bool
    is_crowded: bool
    outage: str
    is_left: bool


def on_worker_gone(node: SchedulerState, worker: WorkerRecord, end: End) -> None:
    """Forget a worker whose processes have ended; retry or fail its tasks."""
    inflight = [worker.task, *worker.queue] if worker.task else []
    begun = count_begun(inflight, end.began)
    is_new = worker.state is WorkerState.STARTING
    if is_new and not inflight:
        node.spares.note_start(worker.environment, False)
    if is_new and (end.is_crowded or end.outage):
        _requeue_unstarted(node, worker, end.is_crowded, end.outage)
        return
    worker.task = None
    worker.queue.clear()
    if (end.settles or end.is_left) and worker.lease and not node.is_closing:
        worker.is_left = end.is_left
        if not end.is_left:
            node.ledger.keep_devices(worker.lease)
        elif node.ready.by_shape:
            node.expect_stalls()
        worker.move(WorkerState.SETTLING)
    else:
        _remove(node, worker)
    for record in reversed(inflight[max(begun, 1) :]):
        return_task(node, record)
    for number, record in enumerate(inflight[: max(begun, 1)]):
        record.worker = None
        has_run = not is_new and number < begun
        note = _try_again(node, record, has_run)
        if note is not None:
            _lose(node, record, worker.id, note)
        if record.kin is not None:
            on_task_ended(node, record)


def on_worker_ended(node: SchedulerState, worker: WorkerRecord, settles: bool) -> None:
    """End the lease of a worker whose processes have outlived it, or its scalars."""
    worker.is_left = False
    if settles and worker.lease is not None:
        node.ledger.keep_devices(worker.lease)
    else:
        _remove(node, worker)


def _try_again(node: SchedulerState, record: TaskRecord, has_run: bool) -> str | None:
    """Retry a task after the end of its worker; else return the reason to report."""
    is_wanted, is_endless = (
        record.state is not TaskState.STOPPING,
        record.spec.is_endless,
    )
    if not has_run:
        record.starts_failed += 1
        if not is_wanted or record.starts_failed >= STARTS_ALLOWED:
            return ""
        record.killed_for = None
        node.wait_again(record)
        return None
    if node.evicting and _leaves_for_others(node, record):
        return None
    may_go_on = is_wanted and not node.is_closing
    if record.killed_for is Memory.DEVICE and not is_endless:
        # The task would exceed its reservation again, so it gets a larger one.
        return None if may_go_on and try_with_more_memory(node, record) else ""
    may_restart = is_endless and is_wanted and record.retries_left != 0
    if may_restart and not note_death(node, record):
        return GIVEN_UP
    if record.killed_for is Memory.HOST and record.is_alone:
        return ""  # the task does not even fit alone
    if not (may_go_on and may_retry(record)):
        return ""
    if record.killed_for is Memory.HOST and not is_endless:
        record.killed_for = None
        node.exclusive.await_turn(node, record)
    else:
        retry_later(node, record)
    return None


def _leaves_for_others(node: SchedulerState, record: TaskRecord) -> bool:
    """Keep an actor that was told to leave and has left; False for other tasks."""
    # Imported late: few programs have actors that may be evicted.
    from aiogpu.core.scheduler.contention.eviction import park

    return park(node, record)


def _requeue_unstarted(
    node: SchedulerState, worker: WorkerRecord, is_crowded: bool, outage: str
) -> None:
    """Requeue the task of a worker that could not be started; no retry is used."""
    record, worker.task = worker.task, None
    _remove(node, worker)
    if is_crowded:
        node.note_crowded(outage)
    else:
        note_outage(node, worker.environment, outage)
    if record is not None:
        node.wait_again(record)


def _remove(node: SchedulerState, worker: WorkerRecord) -> Lease | None:
    lease, worker.lease = worker.lease, None
    if lease is not None:
        node.ledger.give_back(lease)
    if node.worker_limit.failures and worker.state is not WorkerState.STARTING:
        node.worker_limit.note_change()
    if node.outages:
        outage = node.outages.get(worker.environment)
        if outage is not None and outage.worker == worker.id:
            outage.worker = None
    if node.granted.pop(worker.id, None) is None:
        node.workers.remove(worker)
    node.worker_limit.leaving.discard(worker.id)
    return lease


def _lose(
    node: SchedulerState, record: TaskRecord, worker: WorkerId, note: str
) -> None:
    was_wanted = record.state is not TaskState.STOPPING
    node.end(record)
    if was_wanted:
        node.effects.append(Fail(record.id, Failure.LOST, note, worker))
    node.effects.append(Forget(record.id, record.since))


def returned_devices(
    node: SchedulerState, worker_id: WorkerId
) -> list[tuple[DeviceSet, int]]:
    """End the lease of a `SETTLING` worker; return its devices, by set and index."""
    worker = node.workers.get(worker_id) or node.granted.get(worker_id)
    if worker is None or worker.state is not WorkerState.SETTLING:
        return []
    lease = _remove(node, worker)
    assert lease is not None, worker
    sets = node.ledger.device_sets
    return [(sets[kind], index) for kind, (index, _), _ in lease.held()]


def settle_all(node: SchedulerState) -> None:
    """Forget all `SETTLING` workers, because the node closes."""
    for worker in list(node.holders):
        if worker.state is WorkerState.SETTLING:
            _remove(node, worker)


def end_or_retry(
    node: SchedulerState, record: TaskRecord, retry: bool, ran_out: bool
) -> None:
    """End or retry a task that failed, was cancelled, or has children."""
    was_wanted = record.state is not TaskState.STOPPING
    may_go_on = was_wanted and not node.is_closing
    if (node.evicting and _leaves_for_others(node, record)) or (
        may_go_on and ran_out and try_with_more_memory(node, record)
    ):
        pass
    elif may_go_on and retry and may_retry(record):
        retry_later(node, record)
    else:
        node.end(record)
        ended = Settle if was_wanted else Forget
        node.effects.append(ended(record.id, record.since))
    if record.kin is not None:
        on_task_ended(node, record)
