"""A task that ran out of memory beside others gets one more try, alone.

It waits until nothing else runs, and meanwhile nothing else starts but what running
tasks wait for; both for a limited time, after which it is tried like any other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.records import TaskRecord, WorkerRecord, move_task
from aiogpu.core.timers import AlarmKind

if TYPE_CHECKING:
    from aiogpu.core.lease import Lease
    from aiogpu.core.node import Node


class Solitude:
    """Who is to run alone.

    Attributes:
        is_wanted: whether anybody is; then others are held up.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._waiting: deque[TaskRecord] = deque()
        self._current: TaskRecord | None = None

    def __repr__(self) -> str:
        return f"<Solitude for {self._current}, then {len(self._waiting)}>"

    def await_turn(self, node: Node, record: TaskRecord, now: float) -> None:
        """A task that holds nothing any more shall run alone."""
        record.is_alone = True
        record.worker = None
        move_task(record, TaskState.DELAYED)
        node.delayed[record.id] = record
        self._waiting.append(record)
        self.is_wanted = True
        node.timers.set(now + node.patience.alone_within, AlarmKind.ALONE, record.id)

    def bars(self, record: TaskRecord) -> bool:
        """Whether a task must not start now, so that another can run alone."""
        if not self.is_wanted or record is self._current:
            return False
        # Whoever waits for it runs already, and could not end without it.
        return record.kin is None or (
            record.kin.parent is None and record.kin.awaited_by is None
        )

    def begin(self, node: Node) -> tuple[TaskRecord, Lease] | None:
        """If nothing else runs, take what the first of those that wait needs."""
        if self._current is not None or not self._waiting or not _is_quiet(node):
            return None
        record = self._waiting[0]
        if node.clients is not None and node.clients.bars(record):
            return None
        from aiogpu.core.bundles import take_grouped  # it may be a gang's

        lease = take_grouped(node.ledger, record.spec.shape.request)
        if lease is None:
            return None
        if not node.has_worker(record, lease):
            node.ledger.give_back(lease)
            if not node.has_outage(record):
                node.room.refused = max(node.room.refused, 1)
            return None
        self._current = self._waiting.popleft()
        del node.delayed[record.id]
        return record, lease

    def give_up(self, node: Node, record: TaskRecord) -> None:
        """A task has waited for its turn for too long: it is tried like any other."""
        if record in self._waiting:
            self.leave(record)
            del node.delayed[record.id]
            node.wait_again(record)

    def leave(self, record: TaskRecord) -> None:
        """A task has ended or begins anew; if it ran alone, others may start again."""
        if record is self._current:
            self._current = None
        elif record in self._waiting:
            self._waiting.remove(record)
        self._note()

    def _note(self) -> None:
        self.is_wanted = self._current is not None or bool(self._waiting)


def _is_quiet(node: Node) -> bool:
    return not any(_uses_memory(worker) for worker in node.workers)


def _uses_memory(worker: WorkerRecord) -> bool:
    """Whether a worker runs something that will end, or has not ended itself."""
    if worker.state is WorkerState.SETTLING or worker.lease is None:
        return False
    record = worker.task
    if record is None:
        return True
    return not (record.spec.is_endless or record.state is TaskState.BLOCKED)
