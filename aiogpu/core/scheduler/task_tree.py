"""Parents and children of tasks: which end together, and which wait for which.

A task that waits for its children returns its CPUs, and takes them back at once when it
continues. So one CPU serves a tree of any depth. A waiting task keeps its devices and
other resources.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.effects import Fail, Failure, Forget
from aiogpu.core.model.ids import TaskId
from aiogpu.core.records import Kin, TaskRecord, TaskState, sort_key
from aiogpu.core.scheduler.cancellation import withdraw
from aiogpu.core.scheduler.revocation import revoke
from aiogpu.core.scheduler.state import SchedulerState

STOPPED_AT_ONCE: Final = 128
"""The most tasks without code that are stopped in one batch. The event loop can do
other things between two batches: to tell an owner may take 0.1 ms a task."""


def adopt(parent: TaskRecord, child: TaskRecord) -> None:
    """Link a new task to its parent.

    Args:
        parent: the parent.
        child: the new task.
    """
    if parent.kin is None:
        parent.kin = Kin(sort_key(parent), 0)
    child.client = parent.client
    # An actor does not end when its children end: it is of no use that they go first.
    depth = 0 if parent.spec.is_endless else parent.kin.depth - 1
    priority = min(-child.spec.priority, parent.kin.lane[0])
    child.kin = Kin((priority, depth), depth)
    if not child.spec.is_detached:
        child.kin.parent = parent
        parent.kin.children[child.id] = child


def detach(child: TaskRecord | None) -> None:
    """Let a task outlive its parent."""
    kin = None if child is None else child.kin
    if child is None or kin is None or kin.parent is None or kin.is_disowned(child.id):
        return
    assert kin.parent.kin is not None, kin.parent
    del kin.parent.kin.children[child.id]
    kin.parent = None


def on_task_ended(node: SchedulerState, record: TaskRecord) -> None:
    """End the children of a task that has ended or is retried."""
    _wait_for(record, {})
    disown_children(node, record)


def disown_children(node: SchedulerState, record: TaskRecord) -> None:
    """End all descendants of a task.

    Many are ended in batches (`next_disowned`): first those whose code may run, and the
    other ones, which have no children, do not start any more.
    """
    kin = record.kin
    assert kin is not None, record
    children, kin.children = kin.children, {}
    if len(children) <= STOPPED_AT_ONCE:
        for child in children.values():
            disown(node, child)
        return
    node.disowned.append(iter(children.values()))
    node.stop_some_later()
    for holder in list(node.holders):
        for sent in (holder.task, *holder.queue):
            if sent is not None and is_disowned(sent):
                disown(node, sent)
    plan = node.reservation
    if plan is not None and is_disowned(plan.record):
        node.reservation = None


def is_disowned(child: TaskRecord) -> bool:
    """Return True if a task has yet to be ended, because its parent has ended."""
    return child.kin is not None and child.kin.is_disowned(child.id)


def next_disowned(node: SchedulerState) -> TaskRecord | None:
    """Return the next task that must be ended because its parent has ended."""
    while node.disowned:
        for child in node.disowned[0]:
            if is_disowned(child):
                return child
        node.disowned.popleft()
    return None


def disown(node: SchedulerState, child: TaskRecord) -> None:
    """End a task whose parent has ended, and its children."""
    assert child.kin is not None, child
    child.kin.parent = None
    if child.state is not TaskState.STOPPING:
        node.effects.append(Fail(child.id, Failure.DISOWNED))
    stop(node, child)


def stop(node: SchedulerState, record: TaskRecord) -> None:
    """Stop a task and its children; its owner no longer waits."""
    withdraw(node, record)
    if record.kin is None:
        return
    if record.state is TaskState.ENDED:
        on_task_ended(node, record)
    else:
        disown_children(node, record)


def on_waits(
    node: SchedulerState,
    record: TaskRecord,
    children: tuple[TaskId, ...],
    elsewhere: bool,
    is_more: bool,
) -> None:
    """Note which tasks a task's code waits for; without `children` it has stopped.

    A task without children of its own keeps its CPUs while it waits. So does a task
    that waits only for tasks with another waiter: each task has at most one waiter.
    `is_more`: earlier waits go on; a task that waits for thousands of children, and
    each time for one more, must not cost a step for each of them each time.
    """
    if record.kin is None:
        if not elsewhere:
            return
        record.kin = Kin(sort_key(record), 0)
    worker = record.worker
    if record.state not in (TaskState.RUNNING, TaskState.BLOCKED):
        return
    assert worker is not None, record
    assert worker.lease is not None, worker
    if record.state is TaskState.RUNNING and worker.lease.is_lent:
        return  # an actor's CPUs were returned when its constructor ended
    records = [node.tasks.get(child) for child in children]
    awaited = {
        child.id: child
        for child in records
        if child and child.kin and child.kin.awaited_by in (None, record)
    }
    if is_more:
        _wait_also_for(record, awaited)
    else:
        _wait_for(record, awaited)
    if not record.kin.waits_for and not elsewhere:
        node.unblock(record)
        return
    if awaited:
        record.spec.pace.waits = True
    if record.state is TaskState.RUNNING:
        record.move(TaskState.BLOCKED)
        node.blocked[record.id] = record
        node.ledger.lend(worker.lease)
        if worker.queue:
            revoke(node, worker)
    end_deadlocks(node)


def end_deadlocks(node: SchedulerState) -> None:
    """Fail the awaited tasks that can never run."""
    if not (node.blocked and node.search.is_affordable(node)):
        return
    from aiogpu.core.scheduler.contention.deadlock import FAILED_AT_ONCE, find_deadlocks

    failed = find_deadlocks(node)
    if len(failed) == FAILED_AT_ONCE:
        node.search.put_off(node)
    for child, reason in failed:
        node.effects.append(Fail(child.id, Failure.DEADLOCKED, reason))
        node.effects.append(Forget(child.id, child.since, False))
        node.end(child)
        node.ready.discard(child)
        node.ungranted.discard(child.id)
        if child.kin is not None:
            on_task_ended(node, child)


def _wait_for(record: TaskRecord, awaited: dict[TaskId, TaskRecord]) -> None:
    assert record.kin is not None, record
    for child in record.kin.waits_for.values():
        assert child.kin is not None, child
        child.kin.awaited_by = None
    record.kin.waits_for = {}
    _wait_also_for(record, awaited)


def _wait_also_for(record: TaskRecord, awaited: dict[TaskId, TaskRecord]) -> None:
    assert record.kin is not None, record
    record.kin.waits_for |= awaited
    for child in awaited.values():
        assert child.kin is not None, child
        child.kin.awaited_by = record
