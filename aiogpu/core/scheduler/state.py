"""The scheduler's state, and the small state changes that its modules share.

The decisions are made in `dispatch`, `placement`, `revocation`, `cancellation`,
`task_tree` and `recovery`; those in the package `contention` come up only while tasks
wait for what others hold. A task that waits for arguments is in no queue and holds
nothing. A task that was killed because host memory ran out waits for a turn to run
alone (`ExclusiveRetries`). Until it has run, for a limited time, only tasks that
running tasks wait for can start. It fails without further retries only if it was killed
while it ran alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final

from aiogpu.core.effects import Effect
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import LeaseId, TaskId, WorkerId
from aiogpu.core.model.request import PlacementGroupSpec, Request
from aiogpu.core.model.units import CPU
from aiogpu.core.queue.ready import ReadyQueue
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.queue.timers import Alarm, AlarmKind, Timers
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
    from aiogpu.core.queue.fair_share import Accounts


STOP_EVERY: Final = 1e-4
"""Seconds between two batches of tasks that are stopped, so that the event loop can do
other things. Of a million tasks there are 8 000 batches, so a millisecond is too long.
"""


class ExclusiveRetries:
    """The tasks that must run alone.

    A reservation of all CPUs would not do: none is made while an actor holds a CPU, and
    tasks that ask for no CPU would start beside the reserved task.

    Attributes:
        is_wanted: some task waits to run alone or does so; other tasks must wait.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._waiting: deque[TaskRecord] = deque()
        self._current: TaskRecord | None = None

    def __repr__(self) -> str:
        return f"<ExclusiveRetries {self._current}, then {len(self._waiting)}>"

    def await_turn(self, node: SchedulerState, record: TaskRecord) -> None:
        """Queue a task without a lease to run alone."""
        node.delay(record, node.now + node.config.exclusive_wait, AlarmKind.ALONE)
        self._waiting.append(record)
        self.is_wanted = True

    def has_run_alone(self, node: SchedulerState, record: TaskRecord) -> bool:
        """Return True if a running task had its turn and no task ran beside it.

        Its own children do not count. A child of another task may, which had to start.
        """
        return record is self._current and not any(
            _uses_memory(worker) and not _belongs_to(worker.task, record)
            for worker in node.workers
        )

    def bars(self, record: TaskRecord) -> bool:
        """Return True if a task must not start now, so that another can run alone."""
        if not self.is_wanted or record is self._current:
            return False
        # A parent or waiter of the task runs already and cannot end without it. An
        # actor does not end, so the exclusive task does not wait for it.
        kin = record.kin
        if kin is None or kin.awaited_by is not None:
            return kin is None
        return kin.parent is None or kin.parent.spec.is_endless

    def begin(self, node: SchedulerState) -> tuple[TaskRecord, Lease] | None:
        """Take a lease for the first waiting task, if nothing else runs."""
        if self._current is not None or not self._waiting or not _is_quiet(node):
            return None
        record = self._waiting[0]
        if record.kin is not None and record.kin.is_disowned(record.id):
            return None
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
        """Queue a task normally: it has waited too long to run alone.

        If it is killed again, beside others, it is retried like any other task.
        """
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


MIN_ENDED_KEPT: Final = 64
"""Ended members of a placement group that are kept before any are dropped."""


@dataclass(slots=True, eq=False)
class Outage:
    """The failed starts of workers for one environment, since the last success.

    Attributes:
        reason: why the last start failed.
        since: when the first start failed.
        failures: failed attempts in a row; workers that fail together count as one.
        retry_at: when the next worker is started.
        is_paused: `retry_at` has not come yet.
        worker: the worker that is being started as an attempt.
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
        record: the group as a task in the queue.
        members: the tasks that run in the group, including some that have ended.
        pending: tasks that wait for the grant, each with the tasks whose results it
            expects as well.
        is_open: the group is granted and its pending tasks were queued.
        purge_above: number of members at which those that have ended are dropped.
        misfits: by request, why a task can never run in the group; None if it can.
    """

    record: TaskRecord
    placement_group: PlacementGroupSpec
    members: dict[TaskId, TaskRecord] = field(default_factory=dict)
    pending: dict[TaskId, tuple[TaskId, ...] | None] = field(default_factory=dict)
    is_open: bool = False
    purge_above: int = MIN_ENDED_KEPT
    misfits: dict[Request, str | None] = field(default_factory=dict)

    @property
    def living(self) -> list[TaskRecord]:
        """The members that have not ended."""
        ended = TaskState.ENDED
        return [member for member in self.members.values() if member.state is not ended]

    def add(self, record: TaskRecord) -> None:
        """Add a member."""
        self.members[record.id] = record
        if len(self.members) > self.purge_above:
            self.members = {member.id: member for member in self.living}
            self.purge_above = 2 * len(self.members) + MIN_ENDED_KEPT


@dataclass(slots=True)
class Restarts:
    """The restarts of one task.

    Attributes:
        began: when the last attempt was assigned to a worker.
        in_a_row: restarts in a row, each after a short life.
    """

    began: float = 0.0
    in_a_row: int = 0


@dataclass(slots=True)
class Halt:
    """The times that one task has stood at breakpoints, which count for no limit.

    Attributes:
        since: when it has begun to stand; None if it goes on.
        expires: when the `timeout` passes, put off by these times; earlier alarms are
            stale.
    """

    since: float | None = None
    expires: float = 0.0

    def begin(self, now: float) -> None:
        """Note that the task stands, if it does not yet."""
        if self.since is None:
            self.since = now

    def defers(self, alarm: Alarm) -> bool:
        """Return whether a time limit of the task has not passed, despite its alarm."""
        is_early = alarm.kind is AlarmKind.EXPIRE and alarm.when < self.expires
        return is_early or self.since is not None


def goes_before(record: TaskRecord, other: TaskRecord) -> bool:
    """Return True if a task takes precedence over a task with a reservation.

    Between programs, and between a child and another task, only the priority counts,
    because their order changes.
    """
    priority, others = sort_key(record)[0], sort_key(other)[0]
    if priority != others or record.client != other.client:
        return priority < others
    return record.id < other.id and _depth(record) == _depth(other)


def _depth(record: TaskRecord) -> int:
    return 0 if record.kin is None else record.kin.depth


STALLED_AFTER: Final = 2.0
"""Seconds without an end of a lease that a reservation waits for, after which children
may use what is reserved: perhaps the lease cannot end without them."""


@dataclass(slots=True, eq=False)
class Reservation(Withheld):
    """Resources that are kept for a task that has waited long.

    Attributes:
        record: the task; tasks that go before it may take anything.
        until: the latest time at which the task can begin; infinite if unknown.
        planned_at: when the reservation was planned.
        version: `reservation.plan_version` at that time.
        awaits: the leases that hold reserved resources.
        progress_at: when the last of such leases ended, or the reservation began.
    """

    record: TaskRecord
    until: float
    planned_at: float
    version: tuple[int, ...]
    awaits: frozenset[LeaseId] = frozenset()
    progress_at: float = 0.0

    def wants(self, lease: Lease) -> bool:
        """Return True if a lease holds some of the reserved resources."""
        if lease.home is not self.home:
            return False
        for name, _ in lease.request.scalars:
            if name in self.kept and not (lease.is_lent and name == CPU):
                return True
        return any(self.barred.get(kind, 0) & mask for kind, mask in lease.masks())

    def lets_pass(self, node: SchedulerState, record: TaskRecord) -> bool:
        """Return True if the reservation does not concern a task."""
        if self.home not in node.ledger.homes(record.spec.shape.request):
            return True
        if record is self.record or goes_before(record, self.record):
            return True
        if self.needs(record):
            return True
        # Waits for actors, and for tasks of other parents, are not known.
        is_stalled = self.awaits and node.now >= self.progress_at + STALLED_AFTER
        kin = record.kin
        if is_stalled and kin is not None and (kin.parent or kin.awaited_by):
            return True
        timeout = record.spec.timeout
        if timeout is None or self.until == inf:
            return False
        return record.since + timeout + node.grace_of(record) <= self.until

    def needs(self, record: TaskRecord) -> bool:
        """Return True if a holder of reserved resources waits for a task.

        The reserved resources cannot become free before the task has ended.
        """
        kin = record.kin
        while kin is not None and (waiter := kin.awaited_by) is not None:
            lease = None if waiter.worker is None else waiter.worker.lease
            if lease is not None and self.wants(lease):
                return True
            kin = waiter.kin
        return False

    def note_awaited(self, before: Reservation | None) -> None:
        """Note the leases that hold reserved resources, and if any has ended."""
        leases = self.home.leases
        wanted = (id_ for id_, lease in leases.items() if self.wants(lease))
        self.awaits = frozenset(wanted)
        self.progress_at = self.planned_at
        if before is not None and before.awaits <= leases.keys():
            self.progress_at = before.progress_at


class DeadlockSearch:
    """Decides when to search for deadlocks, so that searches cost little altogether.

    Attributes:
        steps: the cost of the last search: tasks and groups that it looked at.
    """

    CHEAP: Final = 256
    """A search of at most this cost is repeated at each event."""

    STEPS: Final = 16
    """Steps for which each event pays."""

    DELAY: Final = 0.1
    """The most seconds for which a search is put off."""

    def __init__(self) -> None:
        self.steps = 0
        self._paid = 0
        self._is_due = False

    def is_affordable(self, node: SchedulerState) -> bool:
        """Note an event that may cause a deadlock; False to put the search off."""
        self._paid += self.STEPS
        if self.steps <= self.CHEAP or self.steps <= self._paid:
            self._paid = 0
            return True
        self.put_off(node)
        return False

    def put_off(self, node: SchedulerState) -> None:
        """Set an alarm for a search, unless one is set."""
        if not self._is_due:
            self._is_due = True
            node.timers.set(node.now + self.DELAY, AlarmKind.DEADLOCK, 0)

    def note_alarm(self) -> None:
        """Note that the alarm has come for which a search was put off."""
        self._is_due, self._paid = False, self.steps


_ENDED: Final = TaskState.ENDED


IsOutdone = Callable[[WorkerId, TaskId], bool]
"""Returns True if an idle worker would have to prepare at length for a task, and a new
worker would not; the scheduler does not know how."""


class SchedulerState:
    """The ledger, the queue and the records of one node.

    Attributes:
        now: the time of the latest event, in seconds.
        effects: the effects of that event.
        delayed: tasks that have failed and are retried later.
        expecting: tasks with missing arguments, each with the tasks of this node whose
            results these arguments are.
        placement_groups: the requested and granted groups, by key.
        changed_groups: the keys of groups that were granted, or are being removed.
        granted: by holder id, the records that stand for the holders of granted leases;
            also of returned leases until their devices are known to be free.
        ungranted: the leases and placement groups in the queue.
        restarts: the restarts of endless tasks.
        halts: the tasks with a time limit that stand or have stood at a breakpoint.
        resting: the actors that may be evicted and have no calls, those that rest
            longest first; the value is the time from which on they may be evicted.
        evicting: the actors that were told to leave and have not left.
        evicted: the actors that have left.
        evicts_at: when the next eviction is planned; None if none is.
        disowned: the children of tasks that have ended, which are stopped in batches.
        blocked: tasks that wait for others, and some that have just stopped waiting.
        search: decides when to search for deadlocks.
        reservation: the reservation for a task that has waited long, or None.
        exclusive: the tasks that must run alone.
        spares: how many clean workers are kept ready.
        outages: environments for which no worker can be started now.
        most_idle: idle workers that are kept.
        worker_limit: how many workers there may be.
        stalls_at: when to check next for tasks to warn; None if no check is due.
        stall_turn: the group with which that check begins.
        clients: the programs that share the node; None while one program has it.
        stops_some_at: when the next, or else the last, batch of tasks is stopped.
        stops_since: when the node's stop was announced, or None.
        turns_given: the number of turns that were given (`turns`).
        is_outdone: compares an idle worker with a new one; None if all are equal. Set
            by the driver once some task needs preparation.
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
        self.changed_groups: dict[str, None] = {}
        self.granted: dict[WorkerId, WorkerRecord] = {}
        self.ungranted: set[TaskId] = set()
        self.timers = Timers()
        self.disowned: deque[Iterator[TaskRecord]] = deque()
        self.blocked: dict[TaskId, TaskRecord] = {}
        self.search = DeadlockSearch()
        self.reservation: Reservation | None = None
        self.stalls_at: float | None = None
        self.stall_turn = 0
        self.is_closing = False
        self.stops_since: float | None = None
        self.stops_some_at: float | None = None
        self.clients: Accounts | None = None
        self.restarts: dict[TaskId, Restarts] = {}
        self.halts: dict[TaskId, Halt] = {}
        self.resting: dict[TaskId, float] = {}
        self.evicting: set[TaskId] = set()
        self.evicted: dict[TaskId, TaskRecord] = {}
        self.evicts_at: float | None = None
        self.exclusive = ExclusiveRetries()
        self.turns_given = 0
        self.is_outdone: IsOutdone | None = None
        self.worker_limit = WorkerLimit()
        self.outages: dict[Environment, Outage] = {}
        limits = self.config
        self.spares = Spares(limits.spare_workers, limits.spares_for, self.timers)
        self.most_idle = limits.idle_workers + self.spares.target

    @property
    def holders(self) -> Iterable[WorkerRecord]:
        """All records that may hold a lease: workers and holders of granted leases."""
        return chain(self.workers, self.granted.values())

    @property
    def holds_back(self) -> bool:
        """True if free resources may be kept from some waiting tasks."""
        is_for_another = self.reservation is not None or self.exclusive.is_wanted
        return is_for_another or self.worker_limit.refused > 0

    def admit(
        self, request: Request, client: ClientId, parent: TaskId | None = None
    ) -> None:
        """Check that a program, or a parent's program, may submit a task.

        Raises:
            LimitError: the program has reached its limit of unfinished tasks.
            InfeasibleError: the task asks for more than the program may hold.
        """
        if self.clients is not None:
            starter = None if parent is None else self.tasks.get(parent)
            self.clients.admit(client if starter is None else starter.client, request)

    def take(self, record: TaskRecord) -> Lease | None:
        """Take a lease for a task; None if it does not fit or no worker is available.

        Resources that are reserved for another task do not count as free.
        """
        lease = self._take(record)
        if lease is None or self.has_worker(record, lease):
            return lease
        self.ledger.give_back(lease)
        if not (self.outages and self.has_outage(record)):
            self.worker_limit.refused += 1
        return None

    def expect_stalls(self) -> None:
        """Set a timer to check for tasks that wait for resources held without end."""
        if self.stalls_at is None:
            self.stalls_at = self.now + self.config.warn_after
            self.timers.set(self.stalls_at, AlarmKind.STALL, 0)

    def note_spares(self) -> None:
        """Update `most_idle` after the environments that have spares have changed."""
        self.most_idle = self.config.idle_workers + self.spares.total

    def has_outage(self, record: TaskRecord) -> bool:
        """Return True if no worker may be started for a task's environment now."""
        outage = self.outages.get(record.spec.shape.environment)
        return outage is not None and outage.bars and not record.spec.is_lease

    @property
    def lacks_workers(self) -> bool:
        """True if nothing in the queue can start before a worker ends or gets idle."""
        is_full = self.worker_limit.refused > 0 and not self.workers.has_any_free
        return is_full and not self.ungranted

    def fits(self, record: TaskRecord) -> bool:
        """Return True if a task could take its lease now; needs no worker."""
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
        """Return True if a worker for this lease is idle or may be started."""
        has_room = len(self.workers.by_id) < self.worker_limit.now
        if has_room and not (self.outages and self.has_outage(record)):
            return True
        spec = record.spec
        if spec.is_lease:
            return True
        if self.workers.spares(spec.shape.environment):
            return True
        return spec.max_calls != 1 and self.workers.has_bound(binding_of(spec, lease))

    def may_start_worker(self, record: TaskRecord) -> bool:
        """Return True if a task need not run on a worker that others have used."""
        if self.workers.spares(record.spec.shape.environment):
            return True
        return self.has_room_for(record)

    def has_room_for(self, record: TaskRecord) -> bool:
        """Return True if a worker for a task can be started now, as far as is known."""
        has_room = len(self.workers.by_id) < self.worker_limit.now
        return has_room and not (self.outages and self.has_outage(record))

    def is_unprepared(self, worker: WorkerRecord, record: TaskRecord) -> bool:
        """Return True if a task should go to a new worker rather than to this one."""
        return (
            self.is_outdone is not None
            and self.is_outdone(worker.id, record.id)
            and self.may_start_worker(record)
        )

    def note_crowded(self, reason: str) -> None:
        """Lower the worker limit for a while: a start failed for lack of room."""
        if self.worker_limit.shrink(len(self.workers), reason, self.now):
            self._grow_later()

    def grow(self) -> None:
        """Raise the limit of workers by a step, to try for more."""
        starting = WorkerState.STARTING
        is_quiet = not any(worker.state is starting for worker in self.workers)
        if self.worker_limit.grow(is_quiet):
            self._grow_later()

    def _grow_later(self) -> None:
        limit = self.worker_limit
        limit.retry_at = self.now + self.config.start_retry_delay(limit.failures)
        self.timers.set(limit.retry_at, AlarmKind.WORKER_LIMIT, 0)

    def grace_of(self, record: TaskRecord) -> float:
        """Return the seconds between a task's first interrupt and its worker's kill.

        Endless tasks that end with the node have the node's `cancel_grace`.
        """
        grace = record.spec.cancel_grace
        if self.is_closing and record.spec.is_endless:
            grace = None
        return self.config.cancel_grace if grace is None else grace

    def stop_grace_of(self, record: TaskRecord) -> float:
        """Return the seconds until a task that must stop is interrupted.

        0 unless the stop of its program or node was announced: the task's `stop_grace`
        counts from the announcement.
        """
        since, grace = self.stops_since, record.spec.stop_grace
        if since is None and self.clients is not None:
            since = self.clients.of(record.client).stops_since
        return 0.0 if since is None else max(0.0, since + grace - self.now)

    def stop_some_later(self) -> None:
        """Set an alarm for the next batch of tasks to stop, unless one is set."""
        if self.stops_some_at is None or self.stops_some_at <= self.now:
            self.stops_some_at = self.now + STOP_EVERY
            self.timers.set(self.stops_some_at, AlarmKind.STOP_SOME, 0)

    def end(self, record: TaskRecord) -> None:
        """Forget a task whose code has stopped or will never run."""
        record.state = _ENDED  # allowed from every state
        if self.tasks.young.pop(record.id, None) is None:
            self.tasks.pop(record.id)
        if self.clients is not None:
            self.clients.exit(record)
        if self.exclusive.is_wanted:
            self.exclusive.leave(record)
        if record.spec.is_grouped:
            self.note_group(record)
        if record.spec.is_timed:
            if record.spec.timeout is not None:
                self.timers.note_stale(AlarmKind.EXPIRE, self.tasks)
            if record.run_until != inf:
                self.timers.note_stale(AlarmKind.OVERRUN, self.tasks)
            if self.halts:
                self.halts.pop(record.id, None)
        if self.restarts:
            self.restarts.pop(record.id, None)
            if self.resting or self.evicting:
                self.resting.pop(record.id, None)
                self.evicting.discard(record.id)
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
                self.unblock(waiter)

    def unblock(self, record: TaskRecord) -> None:
        """Let a task run that no longer waits; it takes its CPUs back at once."""
        if record.state is not TaskState.BLOCKED:
            return
        record.move(TaskState.RUNNING)
        worker = record.worker
        assert worker is not None, record
        assert worker.lease is not None, worker
        self.ledger.resume(worker.lease)

    def note_group(self, record: TaskRecord) -> None:
        """Note that a placement group, or the group of a member, may have changed."""
        group = record.spec.shape.request.placement_group
        if group is not None and group.key in self.placement_groups:
            self.changed_groups[group.key] = None

    def end_halt(self, record: TaskRecord) -> None:
        """Let the time limits of a task run again, later by the time that it stood."""
        halt = self.halts.get(record.id)
        if halt is None or halt.since is None:
            return
        pause, halt.since = self.now - halt.since, None
        if record.spec.timeout is not None:
            first = record.since + record.spec.timeout
            halt.expires = max(halt.expires, first) + pause
            self.timers.set(halt.expires, AlarmKind.EXPIRE, record.id)
        if record.run_until != inf:
            record.run_until += pause
            self.timers.set(record.run_until, AlarmKind.OVERRUN, record.id)

    def delay(self, record: TaskRecord, until: float, alarm: AlarmKind) -> None:
        """Delay a task without a lease until an alarm."""
        if self.halts:
            self.end_halt(record)
        record.worker, record.began, record.run_until = None, None, inf
        record.move(TaskState.DELAYED)
        self.delayed[record.id] = record
        self.timers.set(until, alarm, record.id)

    def wait_again(self, record: TaskRecord) -> None:
        """Put a task without a lease back in its place in the queue."""
        if self.halts:
            self.end_halt(record)
        record.worker, record.began, record.run_until = None, None, inf
        self.delayed.pop(record.id, None)
        if self.exclusive.is_wanted:
            self.exclusive.leave(record)
        record.move(TaskState.WAITING)
        self.ready.push_back(record)


def _is_quiet(node: SchedulerState) -> bool:
    return not any(_uses_memory(worker) for worker in node.workers)


def _uses_memory(worker: WorkerRecord) -> bool:
    """Return True if a worker runs a finite task or has not exited yet."""
    if worker.state is WorkerState.SETTLING or worker.lease is None:
        return False
    record = worker.task
    if record is None:
        return True
    return not (record.spec.is_endless or record.state is TaskState.BLOCKED)


def _belongs_to(record: TaskRecord | None, root: TaskRecord) -> bool:
    """Return True for the root itself and for its descendants."""
    while record is not None and record is not root:
        record = None if record.kin is None else record.kin.parent
    return record is root


def await_results(
    node: SchedulerState, record: TaskRecord, needs: tuple[TaskId, ...]
) -> None:
    """Let a new task wait outside the queue until its arguments arrive."""
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
    """Return the unfinished tasks whose results are arguments of a task."""
    needs = map(node.tasks.get, node.expecting.get(record.id, ()))
    return [need for need in needs if need is not None]


def is_first_of_group(node: SchedulerState, record: TaskRecord) -> bool:
    """Return True if a task waits and is the first of its group."""
    if record.state is not TaskState.WAITING:
        return False
    first = node.ready.group_of(record).first()
    return first is not None and first[1] is record


def note_stuck(node: SchedulerState, record: TaskRecord) -> None:
    """Note that the first task of a group does not fit, if that is new."""
    group = node.ready.group_of(record)
    if group.stuck is not record and is_first_of_group(node, record):
        group.stuck = record
        group.reserve_at = node.now + node.config.reserve_after
        if not group.is_warned:
            node.expect_stalls()
