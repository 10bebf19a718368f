"""The scheduler: events in, effects out, nothing else.

`handle(event, now)` brings every record up to date, then matches what waits with what
is free; `deadline()` says when to call it again. Two things always hold. A lease ends
only when the code that it was taken for has stopped. And every task ends in exactly one
of `Settle`, `Expire`, `Lose`, `Deadlock`, `Disown`, `Abandon` or, when its owner has
cancelled it, `Forget` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aiogpu.core import events
from aiogpu.core.effects import (
    NOTHING,
    Abandon,
    Disown,
    Effect,
    Expire,
    Forget,
    Kill,
    Settle,
)
from aiogpu.core.events import Event
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import TaskSpec
from aiogpu.core.queue.fair_share import Clients, Limits
from aiogpu.core.queue.ready import BucketKey
from aiogpu.core.records import (
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
)
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.cancellation import (
    evict_idle_worker,
    go_on_stopping,
    interrupt,
    kill_worker,
    retire_bound,
    retire_clean,
    retire_idle,
    retire_spares,
    unclaim,
    withdraw,
)
from aiogpu.core.scheduler.dispatch import (
    end_all,
    hand_over,
    on_returned,
    refill_spares,
    release,
    release_cpus,
    start,
    take_turn,
    welcome,
)
from aiogpu.core.scheduler.placement import note_stuck, place
from aiogpu.core.scheduler.recovery import (
    Failure,
    end_specially,
    go_on_waiting,
    on_worker_gone,
    outgrow,
    set_aside,
    settle,
    settle_all,
    starve,
)
from aiogpu.core.scheduler.revocation import (
    look,
    on_revoked,
    on_skipped,
    revoke,
    spoil,
)
from aiogpu.core.scheduler.state import SchedulerState, await_results, resolve
from aiogpu.core.scheduler.task_tree import (
    adopt,
    detach,
    end_deadlocks,
    on_waits,
    stop,
)
from aiogpu.core.scheduler.timers import Alarm, AlarmKind

ABANDONED: Final = 500
"""Waiting tasks that are told of the node's end in one go."""

ABANDON_EVERY: Final = 1e-3
"""Seconds between two such goes, in which the loop may do other things."""


def close(
    node: SchedulerState, at_once: bool, now: float, effects: list[Effect]
) -> None:
    """Begin to close: nothing new starts, and nobody may idle any more."""
    node.is_closing = True
    node.most_idle = 0
    node.reservation = None
    settle_all(node)
    abandon_running(node, now, effects)
    if at_once:
        kill_all(node, effects)
    abandon_some(node, now, effects)
    retire_idle(node, now, effects)


def abandon_running(node: SchedulerState, now: float, effects: list[Effect]) -> None:
    """Stop all that workers have, and tell who waits for it."""
    end_all(node, now, effects)
    for worker in list(node.workers):
        for record in [worker.task, *worker.queue]:
            if record is not None and record.state is not TaskState.STOPPING:
                effects.append(Abandon(record.id))
                stop(node, record, now, effects)
        if worker.state is WorkerState.STARTING:
            # It may never come: its zygote may be importing what does not end.
            effects.append(Kill(worker.id))


def kill_all(node: SchedulerState, effects: list[Effect]) -> None:
    """End those who have been asked to stop, whatever time they were given."""
    for worker in node.workers:
        if worker.state is not WorkerState.STARTING:
            kill_worker(worker, effects)


def abandon_some(node: SchedulerState, now: float, effects: list[Effect]) -> None:
    """Tell some of those that wait, and more of them a moment later."""
    for _ in range(ABANDONED):
        record = node.ready.some() or _not_queued(node)
        if record is None:
            return
        effects.append(Abandon(record.id))
        stop(node, record, now, effects)
    node.timers.set(now + ABANDON_EVERY, AlarmKind.CLOSE, 0)


def _not_queued(node: SchedulerState) -> TaskRecord | None:
    """Any task that is not in the queue yet, or not again; None without one."""
    for id_ in node.expecting:
        return node.tasks[id_]
    return next(iter(node.delayed.values()), None)


def _on_settled(node: SchedulerState, it: events.Settled, *_: object) -> None:
    settle(node, it)


def _on_set_aside(
    node: SchedulerState, it: events.SetAside, _: float, effects: list[Effect]
) -> None:
    set_aside(node, it)
    _clear_off(node, effects)


def _on_recovered(node: SchedulerState, it: events.Recovered, *_: object) -> None:
    node.ledger.device_sets[it.kind].put_back(it.index)


def _on_sick(
    node: SchedulerState, it: events.Sick, now: float, effects: list[Effect]
) -> None:
    node.ledger.device_sets[it.kind].mark_sick(it.index, it.reason)
    _leave_unreserved(node, it.kind, it.index)
    _clear_off(node, effects)
    retire_bound(node, it.kind, it.index, now, effects)


def _on_foreign(
    node: SchedulerState, it: events.Foreign, _: float, effects: list[Effect]
) -> None:
    devices = node.ledger.device_sets[it.kind]
    devices.note_foreign(it.index, it.reason, is_avoided=it.is_avoided)
    _leave_unreserved(node, it.kind, it.index)
    _clear_off(node, effects)


def _leave_unreserved(node: SchedulerState, kind: str, index: int) -> None:
    """Keep a device for nobody; what was kept is made anew, and elsewhere, at once."""
    kept = node.reservation
    if kept is not None and kept.barred.get(kind, 0) >> index & 1:
        node.reservation = None


def _clear_off(node: SchedulerState, effects: list[Effect]) -> None:
    """Take what has not begun off devices that are given to nobody."""
    for worker in node.workers:
        if worker.lease is None or not node.ledger.drains(worker.lease):
            continue
        if worker.queue:
            revoke(worker, effects)
        elif worker.state is WorkerState.STARTING and worker.task:
            record = worker.task
            unclaim(node, record)
            node.wait_again(record)


def _on_well(
    node: SchedulerState, it: events.Well, now: float, effects: list[Effect]
) -> None:
    # What they have opened there may be from before a reset.
    retire_bound(node, it.kind, it.index, now, effects)
    node.ledger.device_sets[it.kind].mark_well(it.index)


def _on_memory_short(
    node: SchedulerState, it: events.MemoryShort, _: float, effects: list[Effect]
) -> None:
    if worker := _busy(node, it.worker):
        starve(worker, effects)


def _on_outgrown(
    node: SchedulerState, it: events.Outgrown, _: float, effects: list[Effect]
) -> None:
    if worker := _busy(node, it.worker):
        outgrow(worker, effects)


def _busy(node: SchedulerState, worker_id: WorkerId) -> WorkerRecord | None:
    worker = node.workers.get(worker_id)
    return worker if worker and worker.state is WorkerState.BUSY else None


Handler = Callable[[SchedulerState, Any, float, list[Effect]], None]


def _on_joined(
    node: SchedulerState, it: events.ClientJoined, now: float, *_: object
) -> None:
    clients = node.clients or Clients(node.ledger, now)
    clients.join(it.client, it.weight, it.limits or Limits())
    if node.clients is None:
        _share(node, clients)


def _share(node: SchedulerState, clients: Clients) -> None:
    """From now on count who has what; costs as much as waits and runs."""
    for record in node.tasks.values():
        clients.of(record.client).unfinished += 1
    for worker in node.holders:
        lease, task = worker.lease, worker.task
        if lease is not None and task is not None:
            clients.begin(task, lease)
            if lease.is_lent and lease.usage is not None:
                lease.usage.lend()
    node.ready.share(clients)
    node.clients = clients


def _on_left(node: SchedulerState, it: events.ClientLeft, *_: object) -> None:
    if node.clients is not None:
        node.clients.leave(it.client)


def _on_behind(node: SchedulerState, it: events.ClientBehind, *_: object) -> None:
    if node.clients is not None:
        node.clients.set_behind(it.client, it.is_behind)


HANDLERS: Final[dict[type[Event], Handler]] = {
    events.Settled: _on_settled,
    events.SetAside: _on_set_aside,
    events.LeaseReturned: on_returned,
    events.Recovered: _on_recovered,
    events.Sick: _on_sick,
    events.Well: _on_well,
    events.Foreign: _on_foreign,
    events.MemoryShort: _on_memory_short,
    events.Outgrown: _on_outgrown,
    events.ClientJoined: _on_joined,
    events.ClientLeft: _on_left,
    events.ClientBehind: _on_behind,
}
"""What is done for events of devices, leases and clients, before tasks are placed."""

_ENDED: Final = TaskState.ENDED
_QUEUED: Final = TaskState.QUEUED
_RUNNING: Final = TaskState.RUNNING


def submit_many(  # noqa: PLR0917 - as `Scheduler.submit`
    node: SchedulerState,
    first: TaskId,
    count: int,
    spec: TaskSpec,
    now: float,
    client: ClientId = OWN,
) -> bool:
    """Have new tasks without a parent wait behind others that are like them.

    Args:
        node: where.
        first: id of the first; the others' follow.
        count: how many they are.
        spec: of all of them.
        now: the time.
        client: whose they are.

    Returns:
        False if each is to be submitted by itself; then nothing has changed.
    """
    if node.is_closing or node.reservation is not None:
        return False
    if spec.timeout is not None or spec.is_grouped:
        return False
    bucket = node.ready.by_shape.get((client, spec.shape))
    if bucket is None:
        return False
    if node.clients is not None:
        program = node.clients.of(client)
        if program.most or program.limits.max_waiting is not None:
            return False
        node.clients.now = now
        program.unfinished += count
    retries = spec.max_retries
    records = [
        TaskRecord(TaskId(task), spec, retries, now, client)
        for task in range(first, first + count)
    ]
    node.tasks.extend(first, records)
    bucket.extend(records)
    return True


def finish_many(
    node: SchedulerState,
    worker_id: WorkerId,
    ended: Iterable[tuple[TaskId, float]],
    now: float,
    effects: list[Effect],
) -> list[TaskRecord]:
    """A worker has ended tasks, without a failure, that it was sent ahead in order.

    Args:
        node: where.
        worker_id: the worker.
        ended: the tasks, and the seconds that each took.
        now: the time.
        effects: gets what is to be done besides.

    Returns:
        The first of them, which have ended: as if `Settle` were answered for each.
        The rest is for `TaskFinished`.
    """
    settled: list[TaskRecord] = []
    worker = node.workers.get(worker_id)
    if worker is None or worker.refill_at < 0 or node.solitude.is_wanted:
        return settled
    if node.clients is not None:
        node.clients.now = now
    queue = worker.queue
    for task, took in ended:
        record = worker.task
        if record is None or record.id != task or not queue:
            break
        following = queue[0]
        if following.state is not _QUEUED or not _simply_ends(record):
            break
        if took:
            record.spec.pace.note(took)
        record.worker, record.state = None, _ENDED
        settled.append(record)
        if len(queue) - 1 <= worker.refill_at:
            take_turn(node, worker, now, effects)
        else:
            worker.task = queue.popleft()
            following.state = _RUNNING
    if settled:
        _forget(node, settled)
    return settled


def _simply_ends(record: TaskRecord) -> bool:
    """Whether nothing is to be decided when a task ends and another follows it."""
    spec = record.spec
    return (
        record.state is _RUNNING
        and record.kin is None
        and not spec.max_calls
        and spec.timeout is None
    )


def _forget(node: SchedulerState, settled: list[TaskRecord]) -> None:
    node.tasks.pop_some([record.id for record in settled])
    if node.clients is not None:
        client = node.clients.of(settled[0].client)
        client.unfinished -= len(settled)
        node.clients.forget(client)


def ring(node: SchedulerState, alarm: Alarm, now: float, effects: list[Effect]) -> None:
    """An alarm rings; it may have become needless."""
    if alarm.kind is AlarmKind.CLOSE:
        abandon_some(node, now, effects)
    elif alarm.kind is AlarmKind.REFILL:
        if not node.is_closing:
            refill_spares(node, effects)
    elif alarm.kind is AlarmKind.SPARES:
        if not node.is_closing:
            retire_spares(node, now, effects)
    elif alarm.kind is AlarmKind.ROOM:
        node.grow(now)
    elif alarm.kind is AlarmKind.OUTAGE:
        from aiogpu.core.scheduler.recovery import (
            retry_outages,  # few nodes have any
        )

        retry_outages(node, now)
    elif alarm.kind is AlarmKind.STALL:
        from aiogpu.core.scheduler.stalls import look_for_stalls

        look_for_stalls(node, now, effects)
    elif alarm.kind in (AlarmKind.END, AlarmKind.LOOK):
        _ring_for_worker(node, alarm, now, effects)
    else:
        _ring_for_task(node, alarm, now, effects)


def _ring_for_worker(
    node: SchedulerState, alarm: Alarm, now: float, effects: list[Effect]
) -> None:
    worker = node.workers.get(WorkerId(alarm.subject))
    if worker is None:
        return
    if alarm.kind is AlarmKind.LOOK:
        look(node, worker, alarm.when, now, effects)
    elif worker.state is not WorkerState.SETTLING:
        effects.append(Kill(worker.id))


def _ring_for_task(
    node: SchedulerState, alarm: Alarm, now: float, effects: list[Effect]
) -> None:
    record = node.tasks.get(TaskId(alarm.subject))
    if record is None:
        return
    if alarm.kind is AlarmKind.STOP:
        go_on_stopping(node, record, now, effects)
    elif alarm.kind is AlarmKind.ALONE:
        node.solitude.give_up(node, record)
    elif alarm.kind is AlarmKind.RETRY:
        go_on_waiting(node, record)
        end_deadlocks(node, now, effects)
    elif record.state is not TaskState.STOPPING:
        effects.append(Expire(record.id))
        stop(node, record, now, effects)


class Scheduler(SchedulerState):
    """Decides for one node."""

    def __init__(self, ledger: Ledger, patience: SchedulerConfig | None = None) -> None:
        super().__init__(ledger, patience)
        self._ways: Final[dict[type[events.Event], Callable[..., Sequence[Effect]]]] = {
            events.Submitted: self._on_submitted,
            events.Supplied: self._on_supplied,
            events.TaskFinished: self._on_finished,
            events.WorkerSpoilt: self._on_spoilt,
            events.TaskWaits: self._on_waits,
            events.Detached: self._on_detached,
            events.Resides: self._on_resides,
            events.TaskSkipped: self._on_skipped,
            events.Revoked: self._on_revoked,
            events.Cancelled: self._on_cancelled,
            events.WorkerStarted: self._on_worker_started,
            events.WorkerGone: self._on_worker_gone,
            events.Outdated: self._on_outdated,
            events.TimePassed: self._on_time_passed,
            events.Closing: self._on_closing,
            **dict.fromkeys(HANDLERS, self._on_handled),
        }

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.tasks)} tasks, {self.workers!r}, {self.ledger!r}>"

    @property
    def is_closed(self) -> bool:
        """Whether a closing node has nothing left that runs or is to be told."""
        return self.is_closing and not len(self.workers) and not self.tasks

    def deadline(self) -> float | None:
        """When to send `TimePassed`, None for never."""
        return self.timers.earliest

    def handle(self, event: events.Event, now: float) -> Sequence[Effect]:
        """Take in what happened; answer what is to be done, in order."""
        if self.clients is not None:
            self.clients.now = now
        return self._ways[type(event)](event, now)

    def _on_submitted(self, e: events.Submitted, now: float) -> Sequence[Effect]:
        return self.submit(e.task, e.spec, now, e.parent, e.needs, e.client)

    def submit(  # noqa: PLR0917 - by position, each time
        self,
        task: TaskId,
        spec: TaskSpec,
        now: float,
        parent: TaskId | None = None,
        needs: tuple[TaskId, ...] | None = None,
        client: ClientId = OWN,
    ) -> Sequence[Effect]:
        """`Submitted`, for those who call it a million times."""
        if self.is_closing:
            return [Abandon(task), Forget(task)]
        record = TaskRecord(task, spec, spec.max_retries, now, client)
        if parent is not None:
            starter = self.tasks.get(parent)
            if starter is None or starter.state is TaskState.STOPPING:
                return [Disown(task), Forget(task)]
            adopt(starter, record)
        self.tasks[task] = record
        if self.clients is not None:
            is_waiting = record.client in self.ready.of_client
            self.clients.enter(record, now, is_waiting=is_waiting)
        if spec.timeout is not None:
            self.timers.set(now + spec.timeout, AlarmKind.EXPIRE, task)
        if needs is not None or spec.is_grouped:
            return self._set_aside(record, needs, now)
        effects: list[Effect] = []
        bucket = self.ready.by_shape.get((record.client, spec.shape))
        # Where others of its shape wait, it must wait as well; where they do not,
        # nobody who waits could use what it takes.
        if bucket is None and (lease := self.take(record)):
            start(self, record, lease, now, effects)
            return effects
        if bucket is None:
            self.ready.push(record)
            note_stuck(self, record, now)
            return self._place(now, effects) if self.holds_back else NOTHING
        bucket.push(record)
        if self.reservation is None or bucket.head() is not record:
            return NOTHING
        return self._place(now, effects) if self.holds_back else NOTHING

    def _set_aside(
        self, record: TaskRecord, needs: tuple[TaskId, ...] | None, now: float
    ) -> Sequence[Effect]:
        if not record.spec.is_grouped:
            await_results(self, record, needs or ())
            return NOTHING
        from aiogpu.core.scheduler.placement_groups import enter

        return self._place(now, enter(self, record, needs))

    def _on_supplied(self, event: events.Supplied, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        if resolve(self, event.task):
            end_deadlocks(self, now, effects)
            self._place(now, effects)
        return effects

    def _on_finished(self, it: events.TaskFinished, now: float) -> Sequence[Effect]:
        return self.finish(it.task, it.worker, it.retry, it.took, now, it.ran_out)

    def finish(  # noqa: PLR0917 - by position, each time
        self,
        task: TaskId,
        worker_id: WorkerId,
        retry: bool,
        took: float,
        now: float,
        ran_out: bool = False,
    ) -> Sequence[Effect]:
        """`TaskFinished`, for those who call it a million times."""
        worker = self.workers.get(worker_id)
        record = None if worker is None else worker.task
        if worker is None or record is None or record.id != task:
            return NOTHING
        effects: list[Effect] = []
        spec, state = record.spec, record.state
        if self.clients is not None:
            self.clients.now = now
        record.worker = worker.task = None
        if took:
            spec.pace.note(took)
        is_special = record.kin is not None or retry or state is not _RUNNING
        if ran_out or self.solitude.is_wanted:
            is_special = True
        if is_special:
            assert worker.lease is not None, worker
            if worker.lease.is_lent:
                self.ledger.resume(worker.lease)
            end_specially(self, record, Failure(retry, ran_out), now, effects)
        else:
            self.end(record)
            effects.append(Settle(task))
        if spec.max_calls:
            worker.calls[spec.function] = worker.calls.get(spec.function, 0) + 1
        self._go_on(worker, (record.client, spec.shape), now, effects)
        if is_special:
            # It may wait again, and what it had started may have held something.
            self._place(now, effects)
        return effects

    def _go_on(
        self, worker: WorkerRecord, key: BucketKey, now: float, effects: list[Effect]
    ) -> None:
        """Give a worker that has ended a task of this kind its next one, if any."""
        if worker.queue:
            take_turn(self, worker, now, effects)
            return
        worker.is_revoking = False
        by_shape = self.ready.by_shape
        if by_shape and not self.is_closing:
            bucket = by_shape.get(key)
            if bucket is not None and hand_over(self, worker, bucket, effects, now):
                return
        release(self, worker, now, effects)
        idle, solitude = self.workers.idle, self.solitude
        if by_shape or idle > self.most_idle or solitude.is_wanted:
            self._place(now, effects)

    def _on_spoilt(self, event: events.WorkerSpoilt, now: float) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        effects: list[Effect] = []
        if worker is not None and worker.state is WorkerState.BUSY:
            spoil(self, worker, effects)
            self._place(now, effects)
        return effects

    def _on_waits(self, event: events.TaskWaits, now: float) -> Sequence[Effect]:
        record = self.tasks.get(event.task)
        if record is None:
            return NOTHING
        effects: list[Effect] = []
        on_waits(self, record, event, now, effects)
        return self._place(now, effects)

    def _on_detached(self, event: events.Detached, _: float) -> Sequence[Effect]:
        detach(self.tasks.get(event.task))
        return NOTHING

    def _on_resides(self, event: events.Resides, now: float) -> Sequence[Effect]:
        record = self.tasks.get(event.task)
        if record is None or record.state is not _RUNNING:
            return NOTHING
        release_cpus(self, record)
        return self._place(now, [])

    def _on_skipped(self, event: events.TaskSkipped, now: float) -> Sequence[Effect]:
        worker, record = self.workers.get(event.worker), self.tasks.get(event.task)
        if worker is None or record is None:
            return NOTHING
        effects: list[Effect] = []
        on_skipped(self, worker, record, effects)
        return self._place(now, effects)

    def _on_revoked(self, event: events.Revoked, now: float) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        if worker is None:
            return NOTHING
        effects: list[Effect] = []
        on_revoked(self, worker, event, now, effects)
        end_deadlocks(self, now, effects)
        record = worker.task
        if record and record.state is TaskState.STOPPING and record.stop is None:
            # It was cancelled in the queue, and has begun all the same.
            interrupt(self, record, now, effects)
        return self._place(now, effects)

    def _on_cancelled(self, event: events.Cancelled, now: float) -> Sequence[Effect]:
        record = self.tasks.get(event.task)
        if record is None:
            return NOTHING
        effects: list[Effect] = []
        is_alone = record.state is TaskState.WAITING and record.kin is None
        if is_alone and not self.holds_back and not record.spec.is_grouped:
            # It held nothing, and nobody waited for it.
            withdraw(self, record, now, effects)
            return effects
        stop(self, record, now, effects)
        return self._place(now, effects)

    def _on_worker_started(
        self, event: events.WorkerStarted, now: float
    ) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        if worker is None or worker.state is not WorkerState.STARTING:
            return NOTHING
        effects: list[Effect] = []
        had_outage = self.outages.pop(worker.environment, None) is not None
        welcome(self, worker, now, effects)
        if effects and not had_outage:
            return effects
        return self._place(now, effects)

    def _on_worker_gone(self, event: events.WorkerGone, now: float) -> Sequence[Effect]:
        worker = self.workers.get(event.worker)
        if worker is None or worker.state is WorkerState.SETTLING:
            return NOTHING
        effects: list[Effect] = []
        on_worker_gone(self, worker, event, now, effects)
        return self._place(now, effects)

    def _on_handled(self, event: events.Event, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        HANDLERS[type(event)](self, event, now, effects)
        return self._place(now, effects)

    def _on_outdated(self, event: events.Outdated, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        retire_clean(self, event.environment, now, effects)
        if self.is_closing:
            return effects
        if event.environment:
            # Its zygote may have made way for another's, to which it would do the same.
            self.spares.forget(event.environment)
            self.note_spares()
        refill_spares(self, effects)
        return effects

    def _on_time_passed(self, _: events.TimePassed, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        for alarm in self.timers.due(now):
            ring(self, alarm, now, effects)
        return self._place(now, effects)

    def _on_closing(self, event: events.Closing, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        close(self, event.at_once, now, effects)
        return effects

    def _place(self, now: float, effects: list[Effect]) -> list[Effect]:
        if self.solitude.is_wanted and not self.is_closing:
            alone = self.solitude.begin(self)
            if alone is not None:
                start(self, *alone, now, effects)
            evict_idle_worker(self, now, effects)
        if self.ready.by_shape:
            if not self.is_closing:
                for record, lease in place(self, now, effects):
                    start(self, record, lease, now, effects)
        else:
            self.reservation = None
        if self.workers.idle > self.most_idle:
            # After placing, so that work comes first.
            retire_idle(self, now, effects)
        if self.gangs and not self.is_closing:
            from aiogpu.core.scheduler.placement_groups import advance_groups

            if advance_groups(self, now, effects):
                self._place(now, effects)
        return effects

    def check(self) -> None:
        """Assert what must hold between any two events. Costs O(everything)."""
        from aiogpu.core.scheduler.invariants import check

        check(self)
