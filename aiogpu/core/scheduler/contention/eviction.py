"""Takes resources back from idle actors that allow it, for tasks that wait.

The driver tells when such an actor has no calls (`Scheduler.rest`) and when it has some
again (`Scheduler.stir`). While tasks wait that do not fit, the actors that have rested
longest are told to leave (`Evict`), as many as the first tasks need and no more. An
actor that has left is an evicted task (`Evicted`), which holds nothing and is not
queued until `Scheduler.bring_back`.

As for reservations, the plan is made on copies of the ledgers.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import itemgetter
from typing import Final

from aiogpu.core.effects import Evict, Evicted
from aiogpu.core.model.request import Request
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.records import Kin, TaskRecord, TaskState, WorkerState, sort_key
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import candidates, try_on
from aiogpu.core.scheduler.state import SchedulerState

PAUSE: Final = 0.02
"""Seconds between two plans. A plan costs about 20 us for each waiting group and idle
actor; what is evicted takes far longer to come back."""

LIMIT: Final = 60.0
"""Seconds that an actor has to leave, `on_evict` included, before it is killed."""

MOST_TASKS: Final = 16
"""Waiting tasks that a plan considers, each the first of its group."""


def expect(node: SchedulerState, when: float | None = None) -> None:
    """Make a plan soon, or at a time."""
    when = node.now + PAUSE if when is None else when
    if node.evicts_at is None or when < node.evicts_at:
        node.evicts_at = when
        node.timers.set(when, AlarmKind.EVICT, 0)


def evict(node: SchedulerState, when: float) -> None:
    """Tell idle actors to leave whose resources let the first waiting tasks start."""
    if when != node.evicts_at:
        return  # another alarm is set
    node.evicts_at = None
    if node.is_closing or not node.resting:
        return
    plan = _Plan(node)
    heads = (first for group in node.ready.groups() if (first := group.first()))
    for _, record, _ in nsmallest(MOST_TASKS, heads, key=itemgetter(0)):
        if node.clients is not None and node.clients.bars(record):
            continue
        chosen = plan.find(record)
        due = max((node.resting[actor.id] for actor in chosen), default=0.0)
        if due > node.now:
            expect(node, due)
            continue
        for actor in chosen:
            _tell(node, actor)


def _tell(node: SchedulerState, actor: TaskRecord) -> None:
    assert actor.worker is not None, actor
    if actor.kin is None:
        actor.kin = Kin(sort_key(actor), 0)  # so that `finish` calls `park`
    del node.resting[actor.id]
    node.evicting.add(actor.id)
    actor.worker.is_leaving = True
    node.timers.set(node.now + LIMIT, AlarmKind.END, actor.worker.id)
    node.effects.append(Evict(actor.id))


def park(node: SchedulerState, record: TaskRecord) -> bool:
    """Keep an actor that was told to leave, without a lease; False for other tasks."""
    is_stopped = record.state is not TaskState.RUNNING or node.is_closing
    if record.id not in node.evicting or is_stopped:
        return False
    node.evicting.discard(record.id)
    record.worker, record.killed_for = None, None
    record.move(TaskState.EVICTED)
    node.evicted[record.id] = record
    node.effects.append(Evicted(record.id))
    return True


class _Plan:
    """Supposes which leases end and which begin, on a copy of each ledger."""

    def __init__(self, node: SchedulerState) -> None:
        self._node = node
        self._trials: dict[int, Ledger] = {}
        self._actors = [
            record
            for task in node.resting
            if (record := node.tasks.get(task)) is not None
            and record.state is TaskState.RUNNING
            # Children end with their actor.
            and not (record.kin is not None and record.kin.children)
        ]

    def _trial(self, home: Ledger) -> Ledger:
        """Return a copy of a ledger without the leases that end soon."""
        trial = self._trials.get(id(home))
        if trial is None:
            trial = self._trials[id(home)] = home.copy()
            for holder in self._node.holders:
                lease = holder.lease
                if lease is None or lease.home is not home or holder.is_left:
                    continue
                is_ending = holder.task is None or holder.is_leaving
                if is_ending and holder.state is not WorkerState.STARTING:
                    trial.suppose(lease, is_held=False)
        return trial

    def find(self, record: TaskRecord) -> list[TaskRecord]:
        """Return the actors to evict for a task; none if it needs or has no such."""
        request = record.spec.shape.request
        for home in candidates(self._node.ledger, request):
            trial, aside = self._trial(home), _aside(home)
            chosen = self._enough(trial, home, request)
            if chosen is None:
                continue
            for actor in chosen[:-1]:
                # Those that rest less long may suffice.
                trial.suppose(_lease_of(actor), is_held=True)
                if try_on(trial, request, aside):
                    chosen = [other for other in chosen if other is not actor]
                else:
                    trial.suppose(_lease_of(actor), is_held=False)
            for lease in try_on(trial, request, aside):
                trial.suppose(lease, is_held=True)
            self._actors = [one for one in self._actors if one not in chosen]
            return chosen
        return []

    def _enough(
        self, trial: Ledger, home: Ledger, request: Request
    ) -> list[TaskRecord] | None:
        """Suppose that actors leave until a request fits; None if it never does."""
        chosen: list[TaskRecord] = []
        actors = (actor for actor in self._actors if _lease_of(actor).home is home)
        while not try_on(trial, request, _aside(home)):
            actor = next(actors, None)
            if actor is None:
                for other in chosen:
                    trial.suppose(_lease_of(other), is_held=True)
                return None
            trial.suppose(_lease_of(actor), is_held=False)
            chosen.append(actor)
        return chosen


def _aside(home: Ledger) -> dict[str, int]:
    """Return the masks of the devices that are set aside, by kind."""
    sets = home.device_sets.items()
    return {kind: devices.availability.aside_mask for kind, devices in sets}


def _lease_of(actor: TaskRecord) -> Lease:
    assert actor.worker is not None, actor
    assert actor.worker.lease is not None, actor
    return actor.worker.lease
