"""What becomes of a worker that has gone: of its tasks, and of what they held.

Its tasks are decided about at once. Its lease is given back when its devices are
seen free; until then the worker is `SETTLING`, a name without a process.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.devices import DeviceSet
from aiogpu.core.effects import Effect, Forget, Lose
from aiogpu.core.events import SetAside, Settled, WorkerGone
from aiogpu.core.family import part
from aiogpu.core.ids import WorkerId
from aiogpu.core.lease import Lease
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.node import Node
from aiogpu.core.policy import STARTS_ALLOWED
from aiogpu.core.records import TaskRecord, WorkerRecord, move_worker
from aiogpu.core.restart import note_death
from aiogpu.core.retry import may_retry, retry
from aiogpu.core.stopping import doom
from aiogpu.core.watch import count_begun, return_task

GIVEN_UP: Final = (
    "It has died again and again, soon after it had begun anew, and is not begun anew "
    "any more."
)


def depart(
    node: Node,
    worker: WorkerRecord,
    event: WorkerGone,
    now: float,
    effects: list[Effect],
) -> None:
    """Take a worker whose processes have ended off the books."""
    inflight = [worker.task, *worker.queue] if worker.task else []
    begun = count_begun(inflight, event.began)
    is_new = worker.state is WorkerState.STARTING
    if is_new and not inflight:
        node.spares.note_start(worker.environment, False)
    if is_new and (event.is_crowded or event.outage):
        _stand_back(node, worker, event, now)
        return
    worker.task = None
    worker.queue.clear()
    if event.settles and worker.lease is not None and not node.is_closing:
        node.ledger.keep_devices(worker.lease)
        move_worker(worker, WorkerState.SETTLING)
    else:
        _remove(node, worker)
    for record in reversed(inflight[max(begun, 1) :]):
        return_task(node, record, effects)
    for number, record in enumerate(inflight[: max(begun, 1)]):
        record.worker = None
        has_run = not is_new and number < begun
        note = ""
        if record.is_outgrown and has_run and not record.spec.is_endless:
            is_kept = _has_exclusive_run(node, record)
        else:
            note = GIVEN_UP if _is_given_up(node, record, has_run, now) else ""
            is_kept = not note and _try_again(node, record, has_run, now)
        if not is_kept:
            _lose(node, record, worker.id, effects, note)
        if record.kin is not None:
            part(node, record, now, effects)


def _try_again(node: Node, record: TaskRecord, has_run: bool, now: float) -> bool:
    """Try a task again whose worker has gone; False if it may not be."""
    if not (_has_another_run if has_run else _has_another_start)(node, record):
        return False
    if record.is_starved and not record.spec.is_endless:
        record.is_starved = False
        node.solitude.await_turn(node, record, now)
    elif has_run:
        retry(node, record, now)
    else:
        record.is_outgrown = False
        node.wait_again(record)
    return True


def _has_exclusive_run(node: Node, record: TaskRecord) -> bool:
    """What used more than it had reserved would do so again, but alone."""
    from aiogpu.core.exclusive import try_exclusively

    is_wanted = record.state is not TaskState.STOPPING and not node.is_closing
    return is_wanted and try_exclusively(node, record)


def _stand_back(
    node: Node, worker: WorkerRecord, event: WorkerGone, now: float
) -> None:
    """A worker could not be started: its task waits again, which is no failure."""
    record, worker.task = worker.task, None
    _remove(node, worker)
    if event.is_crowded:
        node.note_crowded(event.outage, now)
    else:
        from aiogpu.core.outage import note_outage  # few nodes have any

        note_outage(node, worker.environment, event.outage, now)
    if record is not None:
        node.wait_again(record)


def _remove(node: Node, worker: WorkerRecord) -> Lease | None:
    lease, worker.lease = worker.lease, None
    if lease is not None:
        node.ledger.give_back(lease)
    if worker.state is not WorkerState.STARTING:
        node.room.note_change()
    if node.outages:
        outage = node.outages.get(worker.environment)
        if outage is not None and outage.worker == worker.id:
            outage.worker = None
    if node.granted.pop(worker.id, None) is None:
        node.workers.remove(worker)
    node.room.leaving.discard(worker.id)
    return lease


def _has_another_start(_: Node, record: TaskRecord) -> bool:
    """Whether a task whose worker ended before it had begun gets another one."""
    record.starts_failed += 1
    is_wanted = record.state is not TaskState.STOPPING
    return is_wanted and record.starts_failed < STARTS_ALLOWED


def _has_another_run(node: Node, record: TaskRecord) -> bool:
    """Whether a task that its worker's end has hit is tried again."""
    is_wanted = record.state is not TaskState.STOPPING
    if record.is_starved and record.is_alone:
        return False  # it does not even fit alone
    return is_wanted and not node.is_closing and may_retry(record)


def _is_given_up(node: Node, record: TaskRecord, has_run: bool, now: float) -> bool:
    """Whether what should never end has died too often in a row."""
    is_wanted = record.state is not TaskState.STOPPING and record.retries_left != 0
    if not (has_run and record.spec.is_endless and is_wanted):
        return False
    return not note_death(node, record, now)


def _lose(
    node: Node,
    record: TaskRecord,
    worker: WorkerId,
    effects: list[Effect],
    note: str,
) -> None:
    was_wanted = record.state is not TaskState.STOPPING
    node.end(record)
    effects.append(Lose(record.id, worker, note) if was_wanted else Forget(record.id))


def starve(worker: WorkerRecord, effects: list[Effect]) -> None:
    """End a worker whose task uses more memory than there is."""
    assert worker.task is not None, worker
    worker.task.is_starved = True
    doom(worker, effects)


def outgrow(worker: WorkerRecord, effects: list[Effect]) -> None:
    """End a worker whose task uses more device memory than it has reserved."""
    assert worker.task is not None, worker
    worker.task.is_outgrown = True
    doom(worker, effects)


def _devices_returned(node: Node, worker_id: WorkerId) -> list[tuple[DeviceSet, int]]:
    """End the lease of a worker that settles; the devices that it was for, by index."""
    worker = node.workers.get(worker_id) or node.granted.get(worker_id)
    if worker is None or worker.state is not WorkerState.SETTLING:
        return []
    lease = _remove(node, worker)
    assert lease is not None, worker
    held = zip(lease.request.devices, lease.shares, strict=True)
    return [
        (node.ledger.device_sets[kind], index)
        for (kind, _), shares in held
        for index, _ in shares
    ]


def settle(node: Node, event: Settled) -> None:
    """Give back what a worker held whose devices are free."""
    for devices, index in _devices_returned(node, event.worker):
        if event.is_verified:
            devices.unverified.discard(index)
        else:
            devices.unverified.add(index)


def set_aside(node: Node, event: SetAside) -> None:
    """Give nobody the devices that a worker held and that do not become free."""
    for devices, index in _devices_returned(node, event.worker):
        devices.set_aside(index, event.reason)


def settle_all(node: Node) -> None:
    """The node closes: nobody will ask for what is still unsettled."""
    for worker in list(node.holders):
        if worker.state is WorkerState.SETTLING:
            _remove(node, worker)
