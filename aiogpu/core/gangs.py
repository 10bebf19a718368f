"""The gangs of a node, and who runs in them: from the first wish to the last lease.

To the queue a gang is a task like any other, held without end as a lease is. Its
members are set aside until it is granted; once it is removed, they end with it, and
what it held is free when the last of them has stopped. `tend` sees to that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from aiogpu.core.bundles import give_back_gang, parts_for, why_never
from aiogpu.core.effects import Effect, Evict, Forget, Misfit
from aiogpu.core.expecting import expect, supply
from aiogpu.core.family import stop
from aiogpu.core.gang import Gang, Within
from aiogpu.core.ids import TaskId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources import Request

REMOVED: Final = "was removed"
UNKNOWN: Final = "was removed before, or never asked for on this node"
TWICE: Final = "it was asked for before"
GONE: Final = (TaskState.STOPPING, TaskState.ENDED)
REMEMBERED: Final = 64
"""Members beyond twice those that live that are remembered."""


@dataclass(slots=True, eq=False)
class GangRecord:
    """One gang.

    Attributes:
        record: it, as the queue has it.
        members: those that were given it; also some that have ended.
        pending: those that wait for its grant, and whose results each expects as well.
        is_open: whether they were let go on, since it is granted.
        most: members that are remembered until some are forgotten.
        misfits: why those with a request can never run in it, None if they can.
    """

    record: TaskRecord
    gang: Gang
    members: dict[TaskId, TaskRecord] = field(default_factory=dict)
    pending: dict[TaskId, tuple[TaskId, ...] | None] = field(default_factory=dict)
    is_open: bool = False
    most: int = REMEMBERED
    misfits: dict[Request, str | None] = field(default_factory=dict)

    @property
    def living(self) -> list[TaskRecord]:
        """The members that have not ended."""
        ended = TaskState.ENDED
        return [one for one in self.members.values() if one.state is not ended]

    def add(self, record: TaskRecord) -> None:
        """Remember one more member."""
        self.members[record.id] = record
        if len(self.members) > self.most:
            self.members = {one.id: one for one in self.living}
            self.most = 2 * len(self.members) + REMEMBERED


def enter(
    node: Node, record: TaskRecord, needs: tuple[TaskId, ...] | None
) -> list[Effect]:
    """Take in a new gang, or a member of one that may have to wait for its grant."""
    gang = record.spec.shape.request.gang
    assert gang is not None, record
    known = node.gangs.get(gang.key)
    if isinstance(gang, Gang):
        if known is not None:
            return _refuse(node, record, Misfit(record.id, TWICE))
        node.gangs[gang.key] = GangRecord(record, gang)
    elif known is None or known.record.state in GONE:
        return _refuse(node, record, Evict(record.id, gang.name, UNKNOWN))
    elif reason := _why_misfit(node, known, record):
        return _refuse(node, record, Misfit(record.id, reason))
    else:
        known.add(record)
        if not known.is_open:
            known.pending[record.id] = needs
            needs = (*(needs or ()), known.record.id)
    if needs is None:
        node.ready.push(record)
    else:
        expect(node, record, needs)
    return []


def _refuse(node: Node, record: TaskRecord, why: Effect) -> list[Effect]:
    node.end(record)
    return [why, Forget(record.id)]


def _why_misfit(node: Node, known: GangRecord, record: TaskRecord) -> str | None:
    """Why it can never run in its gang, as far as that is known yet."""
    if not known.is_open:
        return None
    request = record.spec.shape.request
    if request not in known.misfits:
        known.misfits[request] = why_never(node.ledger, request)
    return known.misfits[request]


def tend(node: Node, now: float, effects: list[Effect]) -> bool:
    """Let members go on, or end with their gang; whether any may be placed now."""
    has_changed = False
    for key, known in list(node.gangs.items()):
        state = known.record.state
        if state is TaskState.RUNNING and not known.is_open:
            has_changed |= _open(node, known, now, effects)
        elif state in GONE:
            _evict(node, known, now, effects)
            has_changed |= _end(node, key, known, effects)
    return has_changed


def _open(node: Node, known: GangRecord, now: float, effects: list[Effect]) -> bool:
    """It is granted: its members wait for their turn in its bundles."""
    known.is_open = True
    pending, known.pending = known.pending, {}
    for task, needs in pending.items():
        record = node.tasks.get(task)
        if record is None:
            continue
        if reason := _why_misfit(node, known, record):
            effects.append(Misfit(task, reason))
            stop(node, record, now, effects)
        elif needs is None:
            supply(node, task)
        elif task in node.expecting:
            node.expecting[task] = needs
    return bool(pending)


def _evict(node: Node, known: GangRecord, now: float, effects: list[Effect]) -> None:
    """It is none any more: so are its members, and what these have started."""
    known.pending.clear()
    for record in known.living:
        if record.state not in GONE:
            effects.append(Evict(record.id, known.gang.name, REMOVED))
            stop(node, record, now, effects)


def _end(node: Node, key: str, known: GangRecord, effects: list[Effect]) -> bool:
    """Give back what it holds once nobody is left in it; whether that has been done."""
    record = known.record
    if record.state is TaskState.STOPPING:
        if not all(part.is_idle for part in parts_for(node.ledger, Within(key, ""))):
            return False
        holder, record.worker = record.worker, None
        assert holder is not None, record
        assert holder.lease is not None, holder
        del node.granted[holder.id]
        give_back_gang(node.ledger, holder.lease)
        node.end(record)
        effects.append(Forget(record.id))
    del node.gangs[key]
    return True
