"""Placement groups from their submission to their last lease, and their tasks.

To the queue a placement group is a task like any other, held without end as a lease is.
Its tasks are set aside until it is granted. Once it is removed they end with it, and
what it held is free when the last of them has stopped; `advance_groups` sees to that.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.effects import Fail, Failure, Forget
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import PlacementGroupSpec
from aiogpu.core.records import TaskRecord, TaskState
from aiogpu.core.resources.placement_group import why_infeasible
from aiogpu.core.scheduler.state import (
    PlacementGroup,
    SchedulerState,
    await_results,
    resolve,
)
from aiogpu.core.scheduler.task_tree import stop

REMOVED: Final = "was removed"
UNKNOWN: Final = "was removed before, or never asked for on this node"
TWICE: Final = "it was asked for before"
GONE: Final = (TaskState.STOPPING, TaskState.ENDED)


def enter(
    node: SchedulerState, record: TaskRecord, needs: tuple[TaskId, ...] | None
) -> None:
    """Take in a new group, or a member of one that may have to wait for its grant."""
    placement_group = record.spec.shape.request.placement_group
    assert placement_group is not None, record
    known = node.placement_groups.get(placement_group.key)
    if isinstance(placement_group, PlacementGroupSpec):
        if known is not None:
            return _refuse(node, record, Failure.MISFIT, TWICE)
        known = PlacementGroup(record, placement_group)
        node.placement_groups[placement_group.key] = known
    elif known is None or known.record.state in GONE:
        return _refuse(node, record, Failure.EVICTED, UNKNOWN)
    elif reason := _why_misfit(node, known, record):
        return _refuse(node, record, Failure.MISFIT, reason)
    else:
        known.add(record)
        if not known.is_open:
            known.pending[record.id] = needs
            needs = (*(needs or ()), known.record.id)
    if needs is not None:
        return await_results(node, record, needs)
    return node.ready.push(record)


def _refuse(
    node: SchedulerState, record: TaskRecord, failure: Failure, reason: str
) -> None:
    node.end(record)
    node.effects += [
        Fail(record.id, failure, reason),
        Forget(record.id, record.since, False),
    ]


def _why_misfit(
    node: SchedulerState, known: PlacementGroup, record: TaskRecord
) -> str | None:
    """Return why a task can never run in its group; None if it may."""
    if not known.is_open:
        return None
    request = record.spec.shape.request
    if request not in known.misfits:
        known.misfits[request] = why_infeasible(node.ledger, request)
    return known.misfits[request]


def advance_groups(node: SchedulerState) -> bool:
    """Release members of granted groups, end those of removed ones.

    Returns:
        Whether any task may be placed now that could not before.
    """
    has_changed = False
    for key, known in list(node.placement_groups.items()):
        state = known.record.state
        if state is TaskState.RUNNING and not known.is_open:
            has_changed |= _open(node, known)
        elif state in GONE:
            _evict(node, known)
            has_changed |= _end(node, key, known)
    return has_changed


def _open(node: SchedulerState, known: PlacementGroup) -> bool:
    """Queue the members of a group that has just been granted."""
    known.is_open = True
    pending, known.pending = known.pending, {}
    for task, needs in pending.items():
        record = node.tasks.get(task)
        if record is None:
            continue
        if reason := _why_misfit(node, known, record):
            node.effects.append(Fail(task, Failure.MISFIT, reason))
            stop(node, record)
        elif needs is None:
            resolve(node, task)
        elif task in node.expecting:
            node.expecting[task] = needs
    return bool(pending)


def _evict(node: SchedulerState, known: PlacementGroup) -> None:
    """End the members of a removed group, with their children."""
    known.pending.clear()
    for record in known.living:
        if record.state not in GONE:
            node.effects.append(Fail(record.id, Failure.EVICTED, REMOVED))
            stop(node, record)


def _end(node: SchedulerState, key: str, known: PlacementGroup) -> bool:
    """Free what a removed group holds, once no member is left; whether it has been."""
    record = known.record
    if record.state is TaskState.STOPPING:
        if any(part.leases for part in node.ledger.placement_groups[key]):
            return False
        holder, record.worker = record.worker, None
        assert holder is not None, record
        assert holder.lease is not None, holder
        del node.granted[holder.id]
        node.ledger.give_back(holder.lease)
        node.end(record)
        node.effects.append(Forget(record.id, record.since))
    del node.placement_groups[key]
    return True
