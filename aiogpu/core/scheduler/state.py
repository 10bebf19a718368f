"""All that the scheduler knows of its node, and the small moves that its parts share.

There are no decisions here; `dispatch`, `placement`, `reservation`, `revocation`,
`cancellation`, `task_tree` and `recovery` make them. Tasks whose arguments are results
that are not there yet wait here in no queue and hold nothing. `ExclusiveRetries` are
tasks that ran out of memory beside others: each gets one more try, alone. Meanwhile
nothing else starts but what running tasks wait for, for a limited time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final

from aiogpu.core.effects import Effect
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import PlacementGroupSpec, Request
from aiogpu.core.queue.ready import ReadyQueue, precedence
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.queue.timers import AlarmKind, Timers
from aiogpu.core.records import (
    Kin,
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
    binding_of,
    limit_of,
    sort_key,
)
from aiogpu.core.resources.devices import COLD
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import Withheld, take_grouped
from aiogpu.core.scheduler.workers import Spares, WorkerLimit, Workers

if TYPE_CHECKING:
    from aiogpu.core.model.ids import ClientId
    from aiogpu.core.model.request import Environment
    from aiogpu.core.queue.fair_share import Clients


class ExclusiveRetries:
    """The tasks that must run alone.

    A reservation of all CPUs would not do: it is never made while an actor holds one
    without end, and tasks that ask for no CPU start beside the reserved one.

    Attributes:
        is_wanted: whether anybody is; then others are held up.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._waiting: deque[TaskRecord] = deque()
        self._current: TaskRecord | None = None

    def __repr__(self) -> str:
        return f"<Solitude for {self._current}, then {len(self._waiting)}>"

    def await_turn(self, node: SchedulerState, record: TaskRecord) -> None:
        """Queue a task without a lease to run alone."""
        record.is_alone = True
        node.delay(record, node.now + node.config.alone_within, AlarmKind.ALONE)
        self._waiting.append(record)
        self.is_wanted = True

    def bars(self, record: TaskRecord) -> bool:
        """Return whether a task must not start now, so that another can run alone."""
        if not self.is_wanted or record is self._current:
            return False
        # Whoever waits for it runs already, and could not end without it.
        return record.kin is None or (
            record.kin.parent is None and record.kin.awaited_by is None
        )

    def begin(self, node: SchedulerState) -> tuple[TaskRecord, Lease] | None:
        """If nothing else runs, take what the first of those that wait needs."""
        if self._current is not None or not self._waiting or not _is_quiet(node):
            return None
        record = self._waiting[0]
        if node.clients is not None and node.clients.bars(record):
            return None
        lease = take_grouped(node.ledger, record.spec.shape.request)
        if lease is None:
            return None
        if not node.has_worker(record, lease):
            node.ledger.give_back(lease)
            if not node.has_outage(record):
                node.worker_limit.refused = max(node.worker_limit.refused, 1)
            return None
        self._current = self._waiting.popleft()
        del node.delayed[record.id]
        return record, lease

    def give_up(self, node: SchedulerState, record: TaskRecord) -> None:
        """A task has waited for its turn for too long: it is tried like any other."""
        if record in self._waiting:
            node.wait_again(record)

    def leave(self, record: TaskRecord) -> None:
        """Note that a task has ended or restarts; if it ran alone, let others start."""
        if record is self._current:
            self._current = None
        elif record in self._waiting:
            self._waiting.remove(record)
        self._note()

    def _note(self) -> None:
        self.is_wanted = self._current is not None or bool(self._waiting)


REMEMBERED: Final = 64
"""Members beyond twice those that live that are remembered."""


@dataclass(slots=True, eq=False)
class Outage:
    """The failed starts of workers for one environment, since one last succeeded.

    Attributes:
        reason: of the last failure.
        since: when the first start failed.
        failures: failed tries in a row; workers that fail together count as one.
        retry_at: when the next worker is tried.
        is_paused: that moment has not come yet.
        worker: the one that is being tried.
    """

    reason: str
    since: float
    failures: int = 0
    retry_at: float = 0.0
    is_paused: bool = False
    worker: WorkerId | None = None

    @property
    def bars(self) -> bool:
        """True if no worker may be forked for this environment now."""
        return self.is_paused or self.worker is not None


@dataclass(slots=True, eq=False)
class PlacementGroup:
    """One placement group.

    Attributes:
        record: it, as the queue has it.
        members: those that were given it; also some that have ended.
        pending: those that wait for its grant, and whose results each expects as well.
        is_open: whether they were let go on, since it is granted.
        most: members that are remembered until some are forgotten.
        misfits: why those with a request can never run in it, None if they can.
    """

    record: TaskRecord
    placement_group: PlacementGroupSpec
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


@dataclass(slots=True)
class Restarts:
    """The restarts of one task.

    Attributes:
        began: when it was begun last.
        in_a_row: how often it was begun anew after it had lived for a short time.
    """

    began: float = 0.0
    in_a_row: int = 0


def goes_before(record: TaskRecord, other: TaskRecord) -> bool:
    """Return whether a task goes before one for which something is kept.

    Between programs only the priority counts: whose turn it is among them changes.
    """
    if record.client != other.client:
        return sort_key(record)[0] < sort_key(other)[0]
    return precedence(record) < precedence(other)


@dataclass(slots=True, eq=False)
class Reservation(Withheld):
    """Resources that are kept for a task which has waited for long.

    Attributes:
        record: the task; tasks that go before it may take anything.
        until: when the task can begin at the latest, infinite where that is unknown.
        planned_at: when this was planned.
        seen: how many leases had ended, and which devices were set aside.
    """

    record: TaskRecord
    until: float
    planned_at: float
    seen: tuple[int, ...]

    def wants(self, lease: Lease) -> bool:
        """Return whether a lease holds something of what is kept."""
        if lease.home is not self.home:
            return False
        if any(name in self.kept for name, _ in lease.request.scalars):
            return True
        return any(self.barred.get(kind, 0) & mask for kind, mask in lease.masks())

    def lets_pass(self, node: SchedulerState, record: TaskRecord) -> bool:
        """Return whether a task may take what is kept, or takes none of that."""
        if self.home not in node.ledger.homes(record.spec.shape.request):
            return True
        if record is self.record or goes_before(record, self.record):
            return True
        kin = record.kin
        if kin is not None and (kin.parent is not None or kin.awaited_by is not None):
            # Its parent may be one of those that are waited for.
            return True
        timeout = record.spec.timeout
        if timeout is None or self.until == inf:
            return False
        return record.since + timeout + node.grace_of(record) <= self.until


_ENDED: Final = TaskState.ENDED


class SchedulerState:
    """The ledger, the queue and the records of one node.

    Attributes:
        now: when the latest event was, in seconds.
        effects: what is to be done because of it.
        delayed: tasks that have failed and will wait again some time later.
        expecting: tasks whose arguments are not all there yet, and whose results
            those are, as far as they are tasks of this node.
        placement_groups: those that are asked for or held, by key.
        granted: who stands for the holders of leases, by id; also of such as were
            given back, while their devices were not seen free.
        restarts: of what is endless.
        blocked: tasks that wait for others, and some that did so a moment ago.
        reservation: what is kept for a task that has waited long, None for none.
        exclusive: who is to run alone.
        spares: how many clean workers are kept ready.
        outages: environments for which no worker can be started now.
        most_idle: workers that may wait for work.
        worker_limit: how many workers there may be.
        stalls_at: when those that wait are looked at next, None where none need be.
        stall_turn: the group that is looked at first then.
        clients: the programs that share the node, None while it is one's alone.
        stops_since: when it was said that the node stops; None before.
    """

    def __init__(self, ledger: Ledger, config: SchedulerConfig | None = None) -> None:
        self.now = 0.0
        self.effects: list[Effect] = []
        self.ledger = ledger
        self.config = config or SchedulerConfig()
        self.ready: ReadyQueue = ReadyQueue()
        self.workers = Workers()
        self.tasks: ShardedDict[TaskRecord] = ShardedDict()
        self.delayed: dict[TaskId, TaskRecord] = {}
        self.expecting: dict[TaskId, tuple[TaskId, ...]] = {}
        self.placement_groups: dict[str, PlacementGroup] = {}
        self.granted: dict[WorkerId, WorkerRecord] = {}
        self.timers = Timers()
        self.blocked: dict[TaskId, TaskRecord] = {}
        self.reservation: Reservation | None = None
        self.stalls_at: float | None = None
        self.stall_turn = 0
        self.is_closing = False
        self.stops_since: float | None = None
        self.clients: Clients | None = None
        self.restarts: dict[TaskId, Restarts] = {}
        self.exclusive = ExclusiveRetries()
        self.worker_limit = WorkerLimit()
        self.outages: dict[Environment, Outage] = {}
        patient = self.config
        self.spares = Spares(patient.spare_workers, patient.spares_for, self.timers)
        self.most_idle = patient.idle_workers + self.spares.target

    @property
    def holders(self) -> Iterable[WorkerRecord]:
        """All who may hold something: the workers, and who stands for others."""
        return chain(self.workers, self.granted.values())

    @property
    def holds_back(self) -> bool:
        """True if something free may be kept from some of those that wait."""
        is_for_another = self.reservation is not None or self.exclusive.is_wanted
        return is_for_another or self.worker_limit.refused > 0

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
        if not (self.outages and self.has_outage(record)):
            self.worker_limit.refused += 1
        return None

    def expect_stalls(self) -> None:
        """Look in a while whether tasks wait for what is held without end."""
        if self.stalls_at is None:
            self.stalls_at = self.now + self.config.warn_after
            self.timers.set(self.stalls_at, AlarmKind.STALL, 0)

    def note_spares(self) -> None:
        """Spares are wanted for more environments than before, or for fewer."""
        self.most_idle = self.config.idle_workers + self.spares.total

    def has_outage(self, record: TaskRecord) -> bool:
        """Return whether no worker may be started for a task's environment now."""
        outage = self.outages.get(record.spec.shape.environment)
        return outage is not None and outage.bars and not record.spec.is_lease

    def fits(self, record: TaskRecord) -> bool:
        """Return whether a task could take what it asks for now, had it a worker."""
        lease = self._take(record)
        if lease is None:
            return False
        self.ledger.give_back(lease)
        return True

    def _take(self, record: TaskRecord) -> Lease | None:
        if self.clients is not None and self.clients.bars(record):
            return None
        if self.exclusive.is_wanted and self.exclusive.bars(record):
            return None
        reservation = self.reservation
        spec = record.spec
        request = spec.shape.request
        warm = COLD
        if len(request.devices) == 1 and spec.max_calls != 1:
            limit = limit_of(request) if request.gpu_memory else 0
            kind = request.devices[0][0]
            warm = self.workers.affinity(spec.shape.environment, kind, limit)
        if spec.is_grouped:
            if reservation is not None and reservation.lets_pass(self, record):
                reservation = None
            return take_grouped(self.ledger, request, reservation, warm)
        if reservation is None or reservation.lets_pass(self, record):
            return self.ledger.take(request, warm=warm)
        return self.ledger.take(request, reservation.barred, reservation.kept, warm)

    def has_worker(self, record: TaskRecord, lease: Lease) -> bool:
        """Return whether a task with this lease has a worker, or room for one."""
        is_barred = bool(self.outages) and self.has_outage(record)
        if len(self.workers.by_id) < self.worker_limit.now and not is_barred:
            return True
        spec = record.spec
        if spec.is_lease:
            return True
        if self.workers.spares(spec.shape.environment):
            return True
        return spec.max_calls != 1 and self.workers.has_bound(binding_of(spec, lease))

    def note_crowded(self, reason: str) -> None:
        """There was no room for a worker: do with those that are there, for a while."""
        if self.worker_limit.shrink(len(self.workers), reason, self.now):
            self._grow_later()

    def grow(self) -> None:
        """Try whether there is room for a few more than lately."""
        starting = WorkerState.STARTING
        is_quiet = not any(worker.state is starting for worker in self.workers)
        if self.worker_limit.grow(is_quiet):
            self._grow_later()

    def _grow_later(self) -> None:
        limit = self.worker_limit
        limit.retry_at = self.now + self.config.crowded_delay(limit.failures)
        self.timers.set(limit.retry_at, AlarmKind.WORKER_LIMIT, 0)

    def grace_of(self, record: TaskRecord) -> float:
        """Seconds from the first interrupt of a task to the kill of its worker.

        Who lives without end and is ended with the node has the node's own.
        """
        grace = record.spec.cancel_grace
        if self.is_closing and record.spec.is_endless:
            grace = None
        return self.config.cancel_grace if grace is None else grace

    def stop_grace_of(self, record: TaskRecord) -> float:
        """Seconds until a task is interrupted that is to stop now.

        Only one whose program or node stops has any, from where that was announced.
        """
        since, grace = self.stops_since, record.spec.stop_grace
        if since is None and self.clients is not None:
            since = self.clients.of(record.client).stops_since
        return 0.0 if since is None else max(0.0, since + grace - self.now)

    def end(self, record: TaskRecord) -> None:
        """A task's code has stopped, or will never run: forget it."""
        record.state = _ENDED  # as it may from any state
        if self.tasks.young.pop(record.id, None) is None:
            self.tasks.pop(record.id)
        if self.clients is not None:
            self.clients.exit(record)
        if self.exclusive.is_wanted:
            self.exclusive.leave(record)
        if record.spec.is_timed:
            if record.spec.timeout is not None:
                self.timers.note_stale(AlarmKind.EXPIRE, self.tasks)
            if record.run_until != inf:
                self.timers.note_stale(AlarmKind.OVERRUN, self.tasks)
        if self.restarts:
            self.restarts.pop(record.id, None)
        if record.kin is not None:
            self.blocked.pop(record.id, None)
            self._leave(record, record.kin)

    def _leave(self, record: TaskRecord, kin: Kin) -> None:
        """Remove a task from the links to its parent and waiters."""
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
        """Note that a task no longer waits; it gets its CPUs back at once."""
        if record.state is not TaskState.BLOCKED:
            return
        record.move(TaskState.RUNNING)
        worker = record.worker
        assert worker is not None, record
        assert worker.lease is not None, worker
        self.ledger.resume(worker.lease)

    def delay(self, record: TaskRecord, until: float, alarm: AlarmKind) -> None:
        """Delay a task without a lease until an alarm."""
        record.worker, record.began, record.run_until = None, None, inf
        record.move(TaskState.DELAYED)
        self.delayed[record.id] = record
        self.timers.set(until, alarm, record.id)

    def wait_again(self, record: TaskRecord) -> None:
        """Put a task without a lease back in its place in the queue."""
        record.worker, record.began, record.run_until = None, None, inf
        self.delayed.pop(record.id, None)
        if self.exclusive.is_wanted:
            self.exclusive.leave(record)
        record.move(TaskState.WAITING)
        self.ready.push_back(record)


def _is_quiet(node: SchedulerState) -> bool:
    return not any(_uses_memory(worker) for worker in node.workers)


def _uses_memory(worker: WorkerRecord) -> bool:
    """Return whether a worker runs something that will end, or has not ended itself."""
    if worker.state is WorkerState.SETTLING or worker.lease is None:
        return False
    record = worker.task
    if record is None:
        return True
    return not (record.spec.is_endless or record.state is TaskState.BLOCKED)


def await_results(
    node: SchedulerState, record: TaskRecord, needs: tuple[TaskId, ...]
) -> None:
    """Set a new task aside until its arguments are there."""
    record.move(TaskState.EXPECTING)
    node.expecting[record.id] = needs


def resolve(node: SchedulerState, task: TaskId) -> bool:
    """Queue a task whose arguments have arrived, unless it has ended."""
    if node.expecting.pop(task, None) is None:
        return False
    record = node.tasks[task]
    record.move(TaskState.WAITING)
    node.ready.push_back(record)
    return True


def awaited_results(node: SchedulerState, record: TaskRecord) -> list[TaskRecord]:
    """The unfinished tasks whose results a task expects."""
    found = map(node.tasks.get, node.expecting.get(record.id, ()))
    return [need for need in found if need is not None]


def with_expected(
    node: SchedulerState, records: Iterator[TaskRecord]
) -> Iterator[TaskRecord]:
    """Tasks, and those whose results they expect, and so on; each once."""
    seen: set[TaskId] = set()
    line = list(records)
    while line:
        record = line.pop()
        if record.id not in seen:
            seen.add(record.id)
            yield record
            line += awaited_results(node, record)
