"""Placement groups, from their submission to their last lease, and their members.

In the queue a placement group is a task without end, like a lease. Its members wait
outside the queue until the group is granted. When the group is removed, its members
are stopped. Its resources are free when the last member has stopped; `advance_groups`
does these steps.
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
UNKNOWN: Final = "was removed before, or never requested on this node"
TWICE: Final = "it was requested before"
GONE: Final = (TaskState.STOPPING, TaskState.ENDED)


def enter(
    node: SchedulerState, record: TaskRecord, needs: tuple[TaskId, ...] | None
) -> bool:
    """Take in a new group, or a member that may have to wait for its group's grant.

    Returns:
        True if the task is to start or to queue now.
    """
    placement_group = record.spec.shape.request.placement_group
    assert placement_group is not None, record
    group = node.placement_groups.get(placement_group.key)
    if isinstance(placement_group, PlacementGroupSpec):
        if group is not None:
            return _refuse(node, record, Failure.MISFIT, TWICE)
        group = PlacementGroup(record, placement_group)
        node.placement_groups[placement_group.key] = group
    elif group is None or group.record.state in GONE:
        return _refuse(node, record, Failure.EVICTED, UNKNOWN)
    elif reason := _why_misfit(node, group, record):
        return _refuse(node, record, Failure.MISFIT, reason)
    else:
        group.add(record)
        if not group.is_open:
            group.pending[record.id] = needs
            needs = (*(needs or ()), group.record.id)
    if needs is not None:
        await_results(node, record, needs)
    return needs is None


def _refuse(
    node: SchedulerState, record: TaskRecord, failure: Failure, reason: str
) -> bool:
    node.end(record)
    node.effects += [
        Fail(record.id, failure, reason),
        Forget(record.id, record.since, False),
    ]
    return False


def _why_misfit(
    node: SchedulerState, group: PlacementGroup, record: TaskRecord
) -> str | None:
    """Return why a task can never run in its group; None if it can or if unknown."""
    if not group.is_open:
        return None
    request = record.spec.shape.request
    if request not in group.misfits:
        group.misfits[request] = why_infeasible(node.ledger, request)
    return group.misfits[request]


def advance_groups(node: SchedulerState) -> bool:
    """Queue members of granted groups, end members of removed groups.

    Returns:
        True if this may allow other tasks to be placed.
    """
    has_changed = False
    changed, node.changed_groups = node.changed_groups, {}
    for key in changed:
        group = node.placement_groups.get(key)
        if group is None:
            continue
        state = group.record.state
        if state is TaskState.RUNNING and not group.is_open:
            has_changed |= _open(node, group)
        elif state in GONE:
            _evict(node, group)
            if _end(node, key, group):
                has_changed |= state is TaskState.STOPPING  # else it held nothing
            else:
                node.changed_groups[key] = None
    return has_changed


def _open(node: SchedulerState, group: PlacementGroup) -> bool:
    """Queue the members of a group that has just been granted; False if none waited."""
    group.is_open = True
    pending, group.pending = group.pending, {}
    for task, needs in pending.items():
        record = node.tasks.get(task)
        if record is None:
            continue
        if reason := _why_misfit(node, group, record):
            node.effects.append(Fail(task, Failure.MISFIT, reason))
            stop(node, record)
        elif needs is None:
            resolve(node, task)
        elif task in node.expecting:
            node.expecting[task] = needs
    return bool(pending)


def _evict(node: SchedulerState, group: PlacementGroup) -> None:
    """Stop the members of a removed group, with their children."""
    group.pending.clear()
    for record in group.living:
        if record.state not in GONE:
            node.effects.append(Fail(record.id, Failure.EVICTED, REMOVED))
            stop(node, record)


def _end(node: SchedulerState, key: str, group: PlacementGroup) -> bool:
    """Free the lease of a removed group; False while members still hold leases."""
    record = group.record
    if record.state is TaskState.STOPPING:
        if any(bundle.leases for bundle in node.ledger.placement_groups[key]):
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
