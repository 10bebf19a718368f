"""What the scheduler knows of its node, and the few moves that all its parts make.

State without decisions: those are made in `dispatch`, `watch`, `stopping`,
`family`, `placement` and `reservation`, which all work on this.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final

from aiogpu.core.devices import COLD
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.lease import Lease
from aiogpu.core.ledger import Ledger
from aiogpu.core.lifecycle import TaskState, WorkerState
from aiogpu.core.policy import Patience
from aiogpu.core.ready import ReadyQueue
from aiogpu.core.records import (
    Kin,
    TaskRecord,
    WorkerRecord,
    binding_of,
    limit_of,
    move_task,
)
from aiogpu.core.restart import Restarts
from aiogpu.core.room import Room
from aiogpu.core.solitude import Solitude
from aiogpu.core.spares import Spares
from aiogpu.core.table import Table
from aiogpu.core.timers import AlarmKind, Timers
from aiogpu.core.workers import Workers

if TYPE_CHECKING:
    from aiogpu.core.clients import Clients
    from aiogpu.core.gangs import GangRecord
    from aiogpu.core.ids import ClientId
    from aiogpu.core.outage import Outage
    from aiogpu.core.reservation import Reservation
    from aiogpu.core.resources import Request
    from aiogpu.core.specs import Environment

_ENDED: Final = TaskState.ENDED


class Node:
    """The ledger, the queue and the records of one node.

    Attributes:
        delayed: tasks that have failed and will wait again some time later.
        expecting: tasks whose arguments are not all there yet, and whose results
            those are, as far as they are tasks of this node.
        gangs: those that are asked for or held, by key.
        granted: who stands for the holders of leases, by id; also of such as were
            given back, while their devices were not seen free.
        restarts: of what is endless.
        blocked: tasks that wait for others, and some that did so a moment ago.
        reservation: what is kept for a task that has waited long, None for none.
        solitude: who is to run alone.
        spares: how many clean workers are kept ready.
        outages: environments for which no worker can be started now.
        most_idle: workers that may wait for work.
        room: how many workers there may be.
        stalls_at: when those that wait are looked at next, None where none need be.
        clients: the programs that share the node, None while it is one's alone.
    """

    def __init__(self, ledger: Ledger, patience: Patience | None = None) -> None:
        self.ledger = ledger
        self.patience = patience or Patience()
        self.ready: ReadyQueue = ReadyQueue()
        self.workers = Workers()
        self.tasks: Table[TaskRecord] = Table()
        self.delayed: dict[TaskId, TaskRecord] = {}
        self.expecting: dict[TaskId, tuple[TaskId, ...]] = {}
        self.gangs: dict[str, GangRecord] = {}
        self.granted: dict[WorkerId, WorkerRecord] = {}
        self.timers = Timers()
        self.blocked: dict[TaskId, TaskRecord] = {}
        self.reservation: Reservation | None = None
        self.stalls_at: float | None = None
        self.is_closing = False
        self.clients: Clients | None = None
        self.restarts: dict[TaskId, Restarts] = {}
        self.solitude = Solitude()
        self.room = Room()
        self.outages: dict[Environment, Outage] = {}
        patient = self.patience
        self.spares = Spares(patient.spare_workers, patient.spares_for, self.timers)
        self.most_idle = patient.idle_workers + self.spares.target

    @property
    def holders(self) -> Iterable[WorkerRecord]:
        """All who may hold something: the workers, and who stands for others."""
        return chain(self.workers, self.granted.values())

    @property
    def holds_back(self) -> bool:
        """Whether something free may be kept from some of those that wait."""
        is_for_another = self.reservation is not None or self.solitude.is_wanted
        return is_for_another or self.room.refused > 0

    def admit(
        self, request: Request, client: ClientId, parent: TaskId | None = None
    ) -> None:
        """Let a program submit a task, or say why it may not; a child is its parent's.

        Raises:
            LimitError: the program has as many unfinished ones as it may.
            InfeasibleError: the task alone is more than the program may hold.
        """
        if self.clients is not None:
            starter = None if parent is None else self.tasks.get(parent)
            whose = client if starter is None else starter.client
            self.clients.admit(whose, request)

    def take(self, record: TaskRecord) -> Lease | None:
        """Take what a task asks for, unless it is kept for another.

        What no worker could be had for is not taken either.
        """
        lease = self._take(record)
        if lease is None or self.has_worker(record, lease):
            return lease
        self.ledger.give_back(lease)
        if self.outages and self.has_outage(record):
            self.ready.unserved.add(record.spec.shape)
        else:
            self.room.refused += 1
        return None

    def note_spares(self) -> None:
        """Spares are wanted for more environments than before, or for fewer."""
        self.most_idle = self.patience.idle_workers + self.spares.total

    def has_outage(self, record: TaskRecord) -> bool:
        """Whether no worker may be started for a task's environment now."""
        outage = self.outages.get(record.spec.shape.environment)
        return outage is not None and outage.bars and not record.spec.is_lease

    def fits(self, record: TaskRecord) -> bool:
        """Whether a task could take what it asks for now, had it a worker."""
        lease = self._take(record)
        if lease is None:
            return False
        if lease.parts:
            from aiogpu.core.bundles import give_back_gang

            give_back_gang(self.ledger, lease)
        else:
            self.ledger.give_back(lease)
        return True

    def _take(self, record: TaskRecord) -> Lease | None:
        if self.clients is not None and self.clients.bars(record):
            return None
        if self.solitude.is_wanted and self.solitude.bars(record):
            return None
        reservation = self.reservation
        spec = record.spec
        request = spec.shape.request
        warm = COLD
        if len(request.devices) == 1 and spec.max_calls != 1:
            limit = limit_of(request) if request.gpu_memory else 0
            key = spec.shape.environment, request.devices[0][0], limit
            warmth = self.workers.warmth
            warm = warmth.single(*key), warmth.several(*key)
        if spec.is_grouped:
            from aiogpu.core.bundles import take_grouped  # few programs have gangs

            if reservation is not None and reservation.lets_pass(record):
                reservation = None
            return take_grouped(self.ledger, request, reservation, warm)
        if reservation is None or reservation.lets_pass(record):
            return self.ledger.take(request, warm=warm)
        return self.ledger.take(request, reservation.barred, reservation.kept, warm)

    def has_worker(self, record: TaskRecord, lease: Lease) -> bool:
        """Whether there is a worker for a task with this lease, or room for one."""
        is_barred = bool(self.outages) and self.has_outage(record)
        if len(self.workers) < self.room.now and not is_barred:
            return True
        spec = record.spec
        if spec.is_lease:
            return True
        if self.workers.spares(spec.shape.environment):
            return True
        return spec.max_calls != 1 and self.workers.has_bound(binding_of(spec, lease))

    def note_crowded(self, reason: str, now: float) -> None:
        """There was no room for a worker: do with those that are there, for a while."""
        if self.room.shrink(len(self.workers), reason, now):
            self._grow_later(now)

    def grow(self, now: float) -> None:
        """Try whether there is room for a few more than lately."""
        starting = WorkerState.STARTING
        is_quiet = not any(worker.state is starting for worker in self.workers)
        if self.room.grow(is_quiet):
            self._grow_later(now)

    def _grow_later(self, now: float) -> None:
        room = self.room
        room.retry_at = now + self.patience.crowded_delay(room.failures)
        self.timers.set(room.retry_at, AlarmKind.ROOM, 0)

    def grace_of(self, record: TaskRecord) -> float:
        """Seconds from the first interrupt of a task to the kill of its worker.

        Who lives without end and is ended with the node has the node's own.
        """
        grace = record.spec.cancel_grace
        if self.is_closing and record.spec.is_endless:
            grace = None
        return self.patience.cancel_grace if grace is None else grace

    def end(self, record: TaskRecord) -> None:
        """A task's code has stopped, or will never run: forget it."""
        move_task(record, _ENDED)
        if self.tasks.young.pop(record.id, None) is None:
            self.tasks.pop(record.id)
        if self.clients is not None:
            self.clients.exit(record)
        if self.solitude.is_wanted:
            self.solitude.leave(record)
        if record.spec.timeout is not None:
            self.timers.note_stale(AlarmKind.EXPIRE, self.tasks)
        if self.restarts:
            self.restarts.pop(record.id, None)
        if record.kin is not None:
            self.blocked.pop(record.id, None)
            self._leave(record, record.kin)

    def _leave(self, record: TaskRecord, kin: Kin) -> None:
        """A task ends with nobody any more, and nobody waits for it."""
        parent, kin.parent = kin.parent, None
        if parent is not None:
            assert parent.kin is not None, parent
            parent.kin.children.pop(record.id, None)
        waiter, kin.awaited_by = kin.awaited_by, None
        if waiter is not None:
            assert waiter.kin is not None, waiter
            del waiter.kin.waits_for[record.id]
            if not waiter.kin.waits_for:
                self.go_on(waiter)

    def go_on(self, record: TaskRecord) -> None:
        """A task waits for nobody any more; it has its CPUs again at once."""
        if record.state is not TaskState.BLOCKED:
            return
        move_task(record, TaskState.RUNNING)
        worker = record.worker
        assert worker is not None, record
        assert worker.lease is not None, worker
        self.ledger.resume(worker.lease)

    def wait_again(self, record: TaskRecord) -> None:
        """Put a task that holds nothing any more where it stood in the queue."""
        record.worker = None
        if self.solitude.is_wanted:
            self.solitude.leave(record)
        move_task(record, TaskState.WAITING)
        self.ready.push_back(record)
