"""Checks the scheduler's invariants, which hold between any two events."""

from __future__ import annotations

from collections import Counter
from typing import Final

from aiogpu.core.model.ids import ClientId
from aiogpu.core.model.units import CPU
from aiogpu.core.queue.fair_share import usage_of
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.state import SchedulerState

WITHOUT_WORKER: Final = (
    TaskState.WAITING,
    TaskState.EXPECTING,
    TaskState.DELAYED,
    TaskState.EVICTED,
)


def check(node: SchedulerState) -> None:
    """Assert that all records of the node agree. Costs O(everything)."""
    node.ledger.check()
    node.workers.check()
    _check_clients(node)
    leases = [holder.lease for holder in node.holders if holder.lease is not None]
    held = [lease.id for lease in leases if lease.home is node.ledger]
    assert sorted(held) == sorted(node.ledger.leases), (held, node.ledger)
    _check_placement_groups(node, leases)
    records = list(node.tasks.values())
    waiting = [record for record in records if record.state is TaskState.WAITING]
    assert sorted(r.id for r in node.ready) == sorted(r.id for r in waiting)
    assert len(node.ready) == len(waiting), node.ready
    assert node.ungranted == {r.id for r in waiting if r.spec.is_lease}
    delayed = [record for record in records if record.state is TaskState.DELAYED]
    assert sorted(r.id for r in delayed) == sorted(node.delayed), node.delayed
    evicted = [r.id for r in records if r.state is TaskState.EVICTED]
    assert sorted(evicted) == sorted(node.evicted), node.evicted
    assert all(id_ in node.tasks for id_ in (*node.resting, *node.evicting)), node
    expecting = [r.id for r in records if r.state is TaskState.EXPECTING]
    assert sorted(expecting) == sorted(node.expecting), node.expecting
    blocked = {r.id for r in records if r.state is TaskState.BLOCKED}
    assert blocked <= node.blocked.keys(), node.blocked
    assert all(id_ in node.tasks for id_ in node.blocked), node.blocked
    for record in records:
        _check_task(record)
        _check_kin(node, record)
    for worker in node.workers:
        _check_worker(worker)
    for holder in node.granted.values():
        assert node.workers.get(holder.id) is None, holder.id
        task, is_settling = holder.task, holder.state is WorkerState.SETTLING
        assert (task is None) == is_settling, holder.id
        if task is not None:
            assert task.worker is holder, holder.id
            assert task.spec.is_lease, holder.id


def _check_placement_groups(node: SchedulerState, leases: list[Lease]) -> None:
    """Check members against their bundles, and that granted groups have bundles."""
    bundles = [
        bundle
        for placement_group in node.ledger.placement_groups.values()
        for bundle in placement_group
    ]
    for bundle in bundles:
        held = [lease.id for lease in leases if lease.home is bundle]
        assert sorted(held) == sorted(bundle.leases), (bundle, held)
    if node.is_closing:
        return
    homes = {id(lease.home) for lease in leases if lease.home is not node.ledger}
    assert homes <= {id(bundle) for bundle in bundles}, homes
    assert node.ledger.placement_groups.keys() <= node.placement_groups.keys(), (
        node.placement_groups
    )
    for key, group in node.placement_groups.items():
        state = group.record.state
        assert node.tasks.get(group.record.id) is group.record, key
        assert (key in node.ledger.placement_groups) is (
            state is not TaskState.WAITING
        ), key
        assert group.is_open or state is not TaskState.RUNNING, key
        assert all(member.id in node.tasks for member in group.living), key


def _check_clients(node: SchedulerState) -> None:
    """Check what each program holds against its leases, and its unfinished tasks."""
    clients = node.clients
    if clients is None:
        return
    held: Counter[tuple[ClientId, str]] = Counter()
    for worker in node.holders:
        lease = worker.lease
        usage = None if lease is None else usage_of(lease)
        if lease is None or usage is None:
            continue
        for name, parts in clients.amounts_of(lease.request):
            if name != CPU or not lease.is_lent:
                held[usage.client.id, name] += parts
        assert worker.task is None or worker.task.client == usage.client.id
    recorded = {
        (c.id, name): amount for c in clients for name, amount in c.held.items()
    }
    assert recorded == {key: n for key, n in held.items() if n}, (recorded, held)
    unfinished = Counter(record.client for record in node.tasks.values())
    assert unfinished == {c.id: c.unfinished for c in clients if c.unfinished}
    assert node.ready.clients is clients, node


def _check_task(record: TaskRecord) -> None:
    assert record.state is not TaskState.ENDED, record
    worker = record.worker
    assert (worker is None) == (record.state in WITHOUT_WORKER), record.id
    if worker is None:
        return
    is_starting = record.state is TaskState.STARTING
    expected = WorkerState.STARTING if is_starting else WorkerState.BUSY
    assert worker.state is expected, (record.id, worker.id)
    assert worker.lease is not None, worker.id
    assert worker.lease.request == record.spec.shape.request, worker.id
    if record.state is TaskState.QUEUED:
        assert record in worker.queue, record.id
    elif record.state is TaskState.STOPPING:
        assert record is worker.task or record in worker.queue, record.id
    else:
        assert worker.task is record, record.id
    is_blocked = record.state is TaskState.BLOCKED
    assert not is_blocked or worker.lease.is_lent, worker.id


def _check_worker(worker: WorkerRecord) -> None:
    for record in worker.queue:
        assert record.worker is worker, worker.id
        assert record.state in (TaskState.QUEUED, TaskState.STOPPING), record.id
        assert not record.spec.max_calls, record.id
        assert not worker.is_last, worker.id
    if worker.queue:
        assert worker.task is not None, worker.id
    if worker.task is not None:
        assert worker.task.worker is worker, worker.id
    if worker.lease is not None and worker.lease.is_lent:
        task = worker.task
        if task is None:
            ends = (WorkerState.ENDING, WorkerState.SETTLING)
            assert worker.state in ends, worker.id
        elif not task.spec.is_endless:
            assert task.state in (TaskState.BLOCKED, TaskState.STOPPING), worker.id


def _check_kin(node: SchedulerState, record: TaskRecord) -> None:
    kin = record.kin
    if kin is None:
        return
    for child in kin.children.values():
        assert node.tasks.get(child.id) is child, (record.id, child.id)
        assert child.kin is not None, child.id
        assert child.kin.parent is record, child.id
    for child in kin.waits_for.values():
        assert node.tasks.get(child.id) is child, (record.id, child.id)
        assert child.kin is not None, child.id
        assert child.kin.awaited_by is record, child.id
    assert not kin.waits_for or record.state in (
        TaskState.BLOCKED,
        TaskState.STOPPING,
    ), record.id
    if kin.is_disowned(record.id):
        assert node.disowned, record.id
        assert record.state in WITHOUT_WORKER, record.id
    elif kin.parent is not None:
        assert node.tasks.get(kin.parent.id) is kin.parent, record.id
