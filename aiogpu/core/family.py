"""Tasks that start tasks: who ends with whom, who waits for whom.

A task that waits gives its CPUs back, and takes them again at once when it goes on:
so one CPU serves a tree of any depth. Its devices and all else it keeps.
"""

from __future__ import annotations

from aiogpu.core.deadlock import find_deadlocks
from aiogpu.core.effects import Deadlock, Disown, Effect
from aiogpu.core.ids import TaskId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import Kin, TaskRecord, lane_of, move_task
from aiogpu.core.stopping import withdraw
from aiogpu.core.watch import revoke


def adopt(parent: TaskRecord, child: TaskRecord) -> None:
    """Tie a new task to the one that has started it."""
    if parent.kin is None:
        parent.kin = Kin(lane_of(parent))
    priority, depth = parent.kin.lane
    child.kin = Kin((min(-child.spec.priority, priority), depth - 1))
    if not child.spec.is_detached:
        child.kin.parent = parent
        parent.kin.children[child.id] = child


def part(node: Node, record: TaskRecord, now: float, effects: list[Effect]) -> None:
    """A task has ended, or begins anew: nothing that it has started goes on."""
    kin = record.kin
    assert kin is not None, record
    _wait_for(record, {})
    disown_children(node, record, now, effects)
    if record.state is not TaskState.ENDED:
        return
    if kin.parent is not None and kin.parent.kin is not None:
        kin.parent.kin.children.pop(record.id, None)
        kin.parent = None
    waiter, kin.awaited_by = kin.awaited_by, None
    if waiter is not None and waiter.kin is not None:
        waiter.kin.waits_for.pop(record.id, None)
        if not waiter.kin.waits_for:
            _go_on(node, waiter)


def part_ended(
    node: Node, records: list[TaskRecord], now: float, effects: list[Effect]
) -> None:
    """Part those that have ended when they were returned from a worker."""
    for record in records:
        if record.state is TaskState.ENDED and record.kin is not None:
            part(node, record, now, effects)


def disown_children(
    node: Node, record: TaskRecord, now: float, effects: list[Effect]
) -> None:
    """End what a task has started, with all that that has started."""
    kin = record.kin
    if kin is None:
        return
    children, kin.children = kin.children, {}
    for child in children.values():
        assert child.kin is not None, child
        child.kin.parent = None
        if child.state is not TaskState.STOPPING:
            effects.append(Disown(child.id))
        stop(node, child, now, effects)


def stop(node: Node, record: TaskRecord, now: float, effects: list[Effect]) -> None:
    """Stop a task and what it has started; its owner waits for nothing."""
    withdraw(node, record, now, effects)
    if record.kin is None:
        return
    if record.state is TaskState.ENDED:
        part(node, record, now, effects)
    else:
        disown_children(node, record, now, effects)


def on_waits(
    node: Node,
    record: TaskRecord,
    children: tuple[TaskId, ...],
    now: float,
    effects: list[Effect],
) -> None:
    """A task's code waits for others, or for none any more."""
    if record.state not in (TaskState.RUNNING, TaskState.BLOCKED):
        return
    found = [node.tasks.get(child) for child in children]
    awaited = {child.id: child for child in found if child and child.kin}
    _wait_for(record, awaited)
    if not awaited:
        _go_on(node, record)
        return
    worker = record.worker
    assert worker is not None, record
    assert worker.lease is not None, worker
    if record.state is TaskState.RUNNING:
        move_task(record, TaskState.BLOCKED)
        node.ledger.lend(worker.lease)
        if worker.queue:
            revoke(worker, effects)
    for child, reason in find_deadlocks(node):
        effects.append(Deadlock(child.id, reason))
        node.end(child)
        node.ready.discard(child)
        part(node, child, now, effects)


def _wait_for(record: TaskRecord, awaited: dict[TaskId, TaskRecord]) -> None:
    if record.kin is None:
        return
    for child in record.kin.waits_for.values():
        if child.kin is not None:
            child.kin.awaited_by = None
    record.kin.waits_for = awaited
    for child in awaited.values():
        if child.kin is not None:
            child.kin.awaited_by = record


def _go_on(node: Node, record: TaskRecord) -> None:
    if record.state is not TaskState.BLOCKED:
        return
    move_task(record, TaskState.RUNNING)
    worker = record.worker
    assert worker is not None, record
    assert worker.lease is not None, worker
    node.ledger.resume(worker.lease)
