"""The scheduler: it is told what happens, and answers what is to be done.

One method for each event, all with the time first; `deadline()` says when to call
`wake`. Each method brings every record up to date, then matches what waits with what is
free. Two things always hold. A lease ends only when the code that it was taken for has
stopped. And every task ends in exactly one of `Settle` and `Fail` or, when its owner
has cancelled it, in `Forget` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from typing import Concatenate, Final, ParamSpec, Protocol

from aiogpu.core.effects import (
    NOTHING,
    Effect,
    Fail,
    Failure,
    Forget,
    Kill,
    Settle,
)
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import Environment, TaskSpec
from aiogpu.core.queue.fair_share import Clients, Limits
from aiogpu.core.queue.ready import BucketKey
from aiogpu.core.queue.timers import Alarm, AlarmKind
from aiogpu.core.records import (
    Memory,
    TaskRecord,
    TaskState,
    WorkerRecord,
    WorkerState,
)
from aiogpu.core.resources.devices import Cause, DeviceAvailability
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
    end_leases,
    hand_over,
    refill_spares,
    release,
    return_lease,
    start,
    take_turn,
    welcome,
)
from aiogpu.core.scheduler.placement import note_stuck, place
from aiogpu.core.scheduler.recovery import (
    end_specially,
    on_worker_gone,
    retry_outages,
    returned_devices,
    settle_all,
)
from aiogpu.core.scheduler.revocation import look, on_revoked, on_skipped, revoke, spoil
from aiogpu.core.scheduler.state import (
    Reservation,
    SchedulerState,
    await_results,
    resolve,
)
from aiogpu.core.scheduler.task_tree import (
    adopt,
    detach,
    end_deadlocks,
    on_waits,
    stop,
)

ABANDONED: Final = 500
"""Waiting tasks that are told of the node's end in one go."""

ABANDON_EVERY: Final = 1e-3
"""Seconds between two such goes, in which the loop may do other things."""

_ENDED: Final = TaskState.ENDED
_QUEUED: Final = TaskState.QUEUED
_RUNNING: Final = TaskState.RUNNING

P = ParamSpec("P")


def event(
    step: Callable[Concatenate[Scheduler, float, list[Effect], P], None],
) -> Callable[Concatenate[Scheduler, float, P], Sequence[Effect]]:
    """Make a method of one that appends effects: what waits is placed afterwards."""

    def method(
        self: Scheduler, now: float, /, *args: P.args, **kwargs: P.kwargs
    ) -> Sequence[Effect]:
        effects: list[Effect] = []
        if self.clients is not None:
            self.clients.now = now
        step(self, now, effects, *args, **kwargs)
        return self._place(now, effects)

    update_wrapper(method, step)
    return method


Step = Callable[..., Sequence[Effect]]
"""One of the methods of `Scheduler` that are told what happened."""


class Feed(Protocol):
    """Tells the scheduler what happened: `feed(Scheduler.cancel, task)`."""

    def __call__(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Have a step taken, at once or after the one that is being taken."""


class Scheduler(SchedulerState):
    """Decides for one node."""

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.tasks)} tasks, {self.workers!r}, {self.ledger!r}>"

    @property
    def is_closed(self) -> bool:
        """True if a closing node has nothing left that runs or is to be told."""
        return self.is_closing and not len(self.workers) and not self.tasks

    def deadline(self) -> float | None:
        """Return when to call `wake`, None for never."""
        return self.timers.earliest

    # Tasks

    def submit(
        self,
        now: float,
        task: TaskId,
        spec: TaskSpec,
        parent: TaskId | None = None,
        needs: tuple[TaskId, ...] | None = None,
        client: ClientId = OWN,
    ) -> Sequence[Effect]:
        """A new task is to run. Ids count up.

        Args:
            now: the time.
            task: its id.
            spec: what it asks for.
            parent: the task that has started it.
            needs: the tasks whose results are its arguments, if some of these are not
                there yet; it waits for `supply` then. None if all are.
            client: the program whose it is; a child is its parent's.
        """
        if self.is_closing:
            return [Fail(task, Failure.ABANDONED), Forget(task)]
        record = TaskRecord(task, spec, now, client)
        if parent is not None:
            starter = self.tasks.get(parent)
            if starter is None or starter.state is TaskState.STOPPING:
                return [Fail(task, Failure.DISOWNED), Forget(task)]
            adopt(starter, record)
        self.tasks[task] = record
        if self.clients is not None:
            is_waiting = record.client in self.ready.of_client
            self.clients.enter(record, now, is_waiting=is_waiting)
        if spec.timeout is not None:
            self.timers.set(now + spec.timeout, AlarmKind.EXPIRE, task)
        if spec.is_grouped:
            from aiogpu.core.scheduler.placement_groups import enter

            return self._place(now, enter(self, record, needs))
        if needs is not None:
            await_results(self, record, needs)
            return NOTHING
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
        # A lease needs no worker, for want of which the others may wait.
        if bucket.head() is not record or not (self.reservation or spec.is_lease):
            return NOTHING
        return self._place(now, effects)

    def submit_many(
        self,
        now: float,
        first: TaskId,
        count: int,
        spec: TaskSpec,
        client: ClientId = OWN,
    ) -> bool:
        """New tasks without a parent are to wait behind others that are like them.

        Args:
            now: the time.
            first: id of the first; the others' follow.
            count: how many they are.
            spec: of all of them.
            client: whose they are.

        Returns:
            False if each is to be submitted by itself; then nothing has changed.
        """
        if self.is_closing or self.reservation is not None:
            return False
        if spec.timeout is not None or spec.is_grouped:
            return False
        bucket = self.ready.by_shape.get((client, spec.shape))
        if bucket is None:
            return False
        if self.clients is not None:
            program = self.clients.of(client)
            if program.most or program.limits.max_waiting is not None:
                return False
            self.clients.now = now
            program.unfinished += count
        records = [
            TaskRecord(TaskId(task), spec, now, client)
            for task in range(first, first + count)
        ]
        self.tasks.extend(first, records)
        bucket.extend(records)
        return True

    @event
    def supply(self, now: float, effects: list[Effect], task: TaskId) -> None:
        """All arguments of a task are there that were not."""
        if resolve(self, task):
            end_deadlocks(self, now, effects)

    def cancel(self, now: float, task: TaskId) -> Sequence[Effect]:
        """Nobody wants a task's result any more."""
        record = self.tasks.get(task)
        if record is None:
            return NOTHING
        effects: list[Effect] = []
        if self.clients is not None:
            self.clients.now = now
        is_alone = record.state is TaskState.WAITING and record.kin is None
        if is_alone and not self.holds_back and not record.spec.is_grouped:
            # It held nothing, and nobody waited for it.
            withdraw(self, record, now, effects)
            return effects
        stop(self, record, now, effects)
        return self._place(now, effects)

    def finish(
        self,
        now: float,
        task: TaskId,
        worker: WorkerId,
        retry: bool = False,
        took: float = 0.0,
        ran_out: bool = False,
    ) -> Sequence[Effect]:
        """A worker has answered: a task's code has stopped.

        Args:
            now: the time.
            task: the task.
            worker: the worker.
            retry: it failed with an exception for which it is to be tried again,
                should it have retries left.
            took: seconds that its code ran; 0 where that is not known.
            ran_out: it failed for want of device memory.
        """
        known = self.workers.get(worker)
        record = None if known is None else known.task
        if known is None or record is None or record.id != task:
            return NOTHING
        effects: list[Effect] = []
        spec, state = record.spec, record.state
        if self.clients is not None:
            self.clients.now = now
        record.worker = known.task = None
        if took:
            spec.pace.note(took)
        is_special = record.kin is not None or retry or state is not _RUNNING
        if ran_out or self.exclusive.is_wanted:
            is_special = True
        if is_special:
            assert known.lease is not None, known
            if known.lease.is_lent:
                self.ledger.resume(known.lease)
            end_specially(self, record, retry, ran_out, now, effects)
        else:
            self.end(record)
            effects.append(Settle(task))
        if spec.max_calls:
            known.calls[spec.function] = known.calls.get(spec.function, 0) + 1
        self._go_on(known, (record.client, spec.shape), now, effects)
        if is_special:
            # It may wait again, and what it had started may have held something.
            self._place(now, effects)
        return effects

    def finish_many(
        self,
        now: float,
        worker_id: WorkerId,
        ended: Iterable[tuple[TaskId, float]],
        effects: list[Effect],
    ) -> list[TaskRecord]:
        """A worker has ended tasks, without a failure, that it was sent ahead in order.

        Args:
            now: the time.
            worker_id: the worker.
            ended: the tasks, and the seconds that each took.
            effects: gets what is to be done besides.

        Returns:
            The first of them, which have ended: as if `Settle` were answered for each.
            The rest is for `finish`.
        """
        settled: list[TaskRecord] = []
        kept = self.reservation
        worker = self.workers.get(worker_id)
        if worker is None or worker.is_killed or self.exclusive.is_wanted:
            return settled
        if self.clients is not None:
            self.clients.now = now
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
                take_turn(self, worker, now, effects)
            else:
                worker.task = queue.popleft()
                following.state = _RUNNING
        if settled:
            self.tasks.pop_some([record.id for record in settled])
            if self.clients is not None:
                client = self.clients.of(settled[0].client)
                client.unfinished -= len(settled)
                self.clients.forget(client)
            self._place_if_let_go(kept, now, effects)
        return settled

    def _go_on(
        self, worker: WorkerRecord, key: BucketKey, now: float, effects: list[Effect]
    ) -> None:
        """Give a worker that has ended a task of this kind its next one, if any."""
        kept = self.reservation
        if worker.queue:
            take_turn(self, worker, now, effects)
            self._place_if_let_go(kept, now, effects)
            return
        worker.is_revoking = False
        by_shape = self.ready.by_shape
        if by_shape and not self.is_closing:
            bucket = by_shape.get(key)
            if bucket is not None and hand_over(self, worker, bucket, effects, now):
                self._place_if_let_go(kept, now, effects)
                return
        release(self, worker, now, effects)
        idle, exclusive = self.workers.idle, self.exclusive
        if by_shape or idle > self.most_idle or exclusive.is_wanted:
            self._place(now, effects)

    def _place_if_let_go(
        self, kept: Reservation | None, now: float, effects: list[Effect]
    ) -> None:
        """Place others if the task that something was kept for went on with a lease."""
        if kept is not None and self.reservation is not kept:
            self._place(now, effects)

    @event
    def wait_for(
        self,
        now: float,
        effects: list[Effect],
        task: TaskId,
        children: tuple[TaskId, ...],
        elsewhere: bool = False,
    ) -> None:
        """A task's code waits until these tasks have ended, all of them.

        None of them: it does not wait any more, unless it waits for something
        `elsewhere`, of which nothing is known here.
        """
        record = self.tasks.get(task)
        if record is not None:
            on_waits(self, record, children, elsewhere, now, effects)

    def detach(self, _now: float, task: TaskId) -> Sequence[Effect]:
        """A task does not end with its parent, whose result has a handle to it."""
        detach(self.tasks.get(task))
        return NOTHING

    @event
    def release_cpus(self, _now: float, _: list[Effect], task: TaskId) -> None:
        """A running task has its place, and needs no CPU from here on."""
        record = self.tasks.get(task)
        if record is None or record.state is not _RUNNING:
            return
        assert record.worker is not None, record
        assert record.worker.lease is not None, record.worker
        if not record.worker.lease.is_lent:
            self.ledger.lend(record.worker.lease)

    # Workers

    def worker_started(self, now: float, worker: WorkerId) -> Sequence[Effect]:
        """A worker that was asked for has connected."""
        known = self.workers.get(worker)
        if known is None or known.state is not WorkerState.STARTING:
            return NOTHING
        effects: list[Effect] = []
        if self.clients is not None:
            self.clients.now = now
        had_outage = self.outages.pop(known.environment, None) is not None
        welcome(self, known, now, effects)
        if effects and not had_outage:
            return effects
        return self._place(now, effects)

    @event
    def worker_spoilt(
        self, _now: float, effects: list[Effect], worker: WorkerId
    ) -> None:
        """A worker is unfit for another task: it ends by itself after the one it runs.

        Told before that one is finished.
        """
        if known := self._busy(worker):
            spoil(self, known, effects)

    @event
    def task_skipped(
        self, _now: float, effects: list[Effect], task: TaskId, worker: WorkerId
    ) -> None:
        """A worker had a task's turn, saw that it was taken back, and left it out."""
        known, record = self.workers.get(worker), self.tasks.get(task)
        if known is not None and record is not None:
            on_skipped(self, known, record, effects)

    @event
    def revoked(
        self,
        now: float,
        effects: list[Effect],
        worker: WorkerId,
        number: int,
        began: TaskId | None,
    ) -> None:
        """What a worker had been sent at this `Revoke`, and had not begun, is back.

        `began` is the last of its tasks that it has begun or is about to, None if none
        of those that it still has; it will begin no other.
        """
        known = self.workers.get(worker)
        if known is None:
            return
        on_revoked(self, known, number, began, now, effects)
        end_deadlocks(self, now, effects)
        record = known.task
        if record and record.state is TaskState.STOPPING and record.stop is None:
            # It was cancelled in the queue, and has begun all the same.
            interrupt(self, record, now, effects)

    @event
    def worker_gone(
        self,
        now: float,
        effects: list[Effect],
        worker: WorkerId,
        began: TaskId | None = None,
        settles: bool = False,
        is_crowded: bool = False,
        outage: str = "",
    ) -> None:
        """A worker's process and all that it started have ended.

        Args:
            now: the time.
            effects: gets what is to be done.
            worker: the worker.
            began: the last of its tasks that it had begun, None if none of those whose
                answer has not come.
            settles: whether its devices are free is still to be seen; one of
                `devices_free` and `devices_stuck` follows.
            is_crowded: it was never started, for want of descriptors or processes.
            outage: why it could not be started; the same is likely for others of its
                environment or, if `is_crowded`, for all.
        """
        known = self.workers.get(worker)
        if known is not None and known.state is not WorkerState.SETTLING:
            end = (began, settles, is_crowded, outage)
            on_worker_gone(self, known, *end, now, effects)

    @event
    def memory_short(
        self, _now: float, effects: list[Effect], worker: WorkerId
    ) -> None:
        """Memory runs out, and this worker is the first to go."""
        if (known := self._busy(worker)) and known.task:
            known.task.killed_for = Memory.HOST
            kill_worker(known, effects)

    @event
    def memory_outgrown(
        self, _now: float, effects: list[Effect], worker: WorkerId
    ) -> None:
        """A worker's task uses more device memory than was reserved for it: end it."""
        if (known := self._busy(worker)) and known.task:
            known.task.killed_for = Memory.DEVICE
            kill_worker(known, effects)

    def _busy(self, worker_id: WorkerId) -> WorkerRecord | None:
        worker = self.workers.get(worker_id)
        return worker if worker and worker.state is WorkerState.BUSY else None

    def environment_outdated(
        self, now: float, environment: Environment
    ) -> Sequence[Effect]:
        """Clean workers of this environment were forked from what is old by now."""
        effects: list[Effect] = []
        retire_clean(self, environment, now, effects)
        if self.is_closing:
            return effects
        if environment:
            # Its zygote may have made way for another's, to which it would do the same.
            self.spares.forget(environment)
            self.note_spares()
        refill_spares(self, effects)
        return effects

    # Devices and leases

    @event
    def device_sick(
        self, now: float, effects: list[Effect], kind: str, index: int, reason: str
    ) -> None:
        """A device is unfit for new tasks until it is well, and why."""
        self._availability(kind).note(index, Cause.SICK, reason)
        self._leave_unreserved(kind, index)
        self._clear_off(effects)
        retire_bound(self, kind, index, now, effects)

    @event
    def device_well(
        self, now: float, effects: list[Effect], kind: str, index: int
    ) -> None:
        """A device that was sick may be used again."""
        # What they have opened there may be from before a reset.
        retire_bound(self, kind, index, now, effects)
        self._availability(kind).note(index, Cause.SICK, None)

    @event
    def device_foreign(
        self,
        _now: float,
        effects: list[Effect],
        kind: str,
        index: int,
        reason: str | None,
        is_avoided: bool = False,
    ) -> None:
        """Processes that are none of the node's are on a device.

        `reason` says who; None: no more. `is_avoided`: others are chosen before it;
        else it is given to nobody meanwhile.
        """
        is_avoided &= reason is not None
        devices = self._availability(kind)
        devices.avoid(index, is_avoided=is_avoided)
        devices.note(index, Cause.FOREIGN, None if is_avoided else reason)
        self._leave_unreserved(kind, index)
        self._clear_off(effects)

    @event
    def devices_free(
        self, _now: float, _: list[Effect], worker: WorkerId, is_verified: bool = True
    ) -> None:
        """The devices of a worker that has gone, or of a lease's holder, are free.

        `is_verified`: that was seen; otherwise nobody here can see it.
        """
        for devices, index in returned_devices(self, worker):
            if is_verified:
                devices.unverified.discard(index)
            else:
                devices.unverified.add(index)

    @event
    def devices_stuck(
        self, _now: float, effects: list[Effect], worker: WorkerId, reason: str
    ) -> None:
        """The devices of a worker that has gone do not become free, and why."""
        for devices, index in returned_devices(self, worker):
            devices.availability.note(index, Cause.UNSETTLED, reason)
        self._clear_off(effects)

    @event
    def device_recovered(
        self, _now: float, _: list[Effect], kind: str, index: int
    ) -> None:
        """A device that was set aside is free again."""
        self._availability(kind).note(index, Cause.UNSETTLED, None)

    @event
    def lease_returned(
        self,
        _now: float,
        effects: list[Effect],
        holder: WorkerId,
        settles: bool = False,
    ) -> None:
        """All processes have ended for which a lease was granted to this holder.

        `settles`: whether its devices are free is still to be seen; one of
        `devices_free` and `devices_stuck` follows, of that holder.
        """
        return_lease(self, holder, settles, effects)

    def _availability(self, kind: str) -> DeviceAvailability:
        return self.ledger.device_sets[kind].availability

    def _leave_unreserved(self, kind: str, index: int) -> None:
        """Keep a device for nobody; what was kept is made anew, and elsewhere."""
        kept = self.reservation
        if kept is not None and kept.barred.get(kind, 0) >> index & 1:
            self.reservation = None

    def _clear_off(self, effects: list[Effect]) -> None:
        """Take what has not begun off devices that are given to nobody."""
        for worker in self.workers:
            if worker.lease is None or not self.ledger.drains(worker.lease):
                continue
            if worker.queue:
                revoke(worker, effects)
            elif worker.state is WorkerState.STARTING and worker.task:
                record = worker.task
                unclaim(self, record)
                self.wait_again(record)

    # Programs

    @event
    def join(
        self,
        now: float,
        _: list[Effect],
        client: ClientId,
        weight: float = 1.0,
        limits: Limits | None = None,
    ) -> None:
        """Another program submits tasks too; told again, it has other terms.

        `weight`: how much it gets where one of weight 1 gets 1. From the first of these
        on the node is fair between programs; without any it knows of none.
        """
        clients = self.clients or Clients(self.ledger, now)
        clients.join(client, weight, limits or Limits())
        if self.clients is None:
            self._share(clients)

    def _share(self, clients: Clients) -> None:
        """From now on count who has what; costs as much as waits and runs."""
        for record in self.tasks.values():
            clients.of(record.client).unfinished += 1
        for worker in self.holders:
            lease, task = worker.lease, worker.task
            if lease is not None and task is not None:
                clients.begin(task, lease)
                if lease.is_lent and lease.usage is not None:
                    lease.usage.lend()
        self.ready.share(clients)
        self.clients = clients

    @event
    def leave(self, _now: float, _: list[Effect], client: ClientId) -> None:
        """A program submits nothing any more; what it has submitted goes on."""
        if self.clients is not None:
            self.clients.leave(client)

    @event
    def set_behind(
        self, _now: float, _: list[Effect], client: ClientId, is_behind: bool
    ) -> None:
        """A program does not read what it is sent, or has caught up.

        While it does not, nothing more of it is started: its results would pile up.
        """
        if self.clients is not None:
            self.clients.set_behind(client, is_behind)

    # Time

    @event
    def wake(self, now: float, effects: list[Effect]) -> None:
        """The moment named by `deadline()` has come."""
        for alarm in self.timers.due(now):
            self._ring(alarm, now, effects)

    def _ring(self, alarm: Alarm, now: float, effects: list[Effect]) -> None:
        """An alarm rings; it may have become needless."""
        match alarm.kind:
            case AlarmKind.CLOSE:
                self._abandon_some(now, effects)
            case AlarmKind.REFILL if not self.is_closing:
                refill_spares(self, effects)
            case AlarmKind.SPARES if not self.is_closing:
                retire_spares(self, now, effects)
            case AlarmKind.WORKER_LIMIT:
                self.grow(now)
            case AlarmKind.OUTAGE:
                retry_outages(self, now)
            case AlarmKind.STALL:
                from aiogpu.core.scheduler.shortage import look_for_stalls

                look_for_stalls(self, now, effects)
            case AlarmKind.END | AlarmKind.LOOK:
                self._ring_for_worker(alarm, now, effects)
            case _:
                self._ring_for_task(alarm, now, effects)

    def _ring_for_worker(self, alarm: Alarm, now: float, effects: list[Effect]) -> None:
        worker = self.workers.get(WorkerId(alarm.subject))
        if worker is None:
            return
        if alarm.kind is AlarmKind.LOOK:
            look(self, worker, alarm.when, now, effects)
        elif worker.state is not WorkerState.SETTLING:
            effects.append(Kill(worker.id))

    def _ring_for_task(self, alarm: Alarm, now: float, effects: list[Effect]) -> None:
        record = self.tasks.get(TaskId(alarm.subject))
        if record is None:
            return
        if alarm.kind is AlarmKind.STOP:
            go_on_stopping(self, record, now, effects)
        elif alarm.kind is AlarmKind.ALONE:
            self.exclusive.give_up(self, record)
        elif alarm.kind is AlarmKind.RETRY:
            self.wait_again(record)
            end_deadlocks(self, now, effects)
        elif record.state is not TaskState.STOPPING:
            effects.append(Fail(record.id, Failure.EXPIRED))
            stop(self, record, now, effects)

    # The end

    def close(self, now: float, at_once: bool = False) -> Sequence[Effect]:
        """The node shuts down: nothing new starts, all that runs is stopped.

        `at_once`: nobody is given time to stop, not even those who have it already.
        """
        effects: list[Effect] = []
        if self.clients is not None:
            self.clients.now = now
        self.is_closing = True
        self.most_idle = 0
        self.reservation = None
        settle_all(self)
        end_leases(self, effects)
        for worker in list(self.workers):
            for record in [worker.task, *worker.queue]:
                if record is not None and record.state is not TaskState.STOPPING:
                    effects.append(Fail(record.id, Failure.ABANDONED))
                    stop(self, record, now, effects)
            if worker.state is WorkerState.STARTING:
                # It may never come: its zygote may be importing what does not end.
                effects.append(Kill(worker.id))
        for worker in self.workers if at_once else ():
            if worker.state is not WorkerState.STARTING:
                kill_worker(worker, effects)
        self._abandon_some(now, effects)
        retire_idle(self, now, effects)
        return effects

    def _abandon_some(self, now: float, effects: list[Effect]) -> None:
        """Tell some of those that wait, and more of them a moment later."""
        for _ in range(ABANDONED):
            record = self.ready.some() or self._not_queued()
            if record is None:
                return
            effects.append(Fail(record.id, Failure.ABANDONED))
            stop(self, record, now, effects)
        self.timers.set(now + ABANDON_EVERY, AlarmKind.CLOSE, 0)

    def _not_queued(self) -> TaskRecord | None:
        """Any task that is not in the queue yet, or not again; None without one."""
        for id_ in self.expecting:
            return self.tasks[id_]
        return next(iter(self.delayed.values()), None)

    def _place(self, now: float, effects: list[Effect]) -> list[Effect]:
        if self.exclusive.is_wanted and not self.is_closing:
            alone = self.exclusive.begin(self)
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
        if self.placement_groups and not self.is_closing:
            from aiogpu.core.scheduler.placement_groups import advance_groups

            if advance_groups(self, now, effects):
                self._place(now, effects)
        return effects

    def check(self) -> None:
        """Assert what must hold between any two events. Costs O(everything)."""
        from aiogpu.core.scheduler.invariants import check

        check(self)


def _simply_ends(record: TaskRecord) -> bool:
    """Whether nothing is to be decided when a task ends and another follows it."""
    spec = record.spec
    return (
        record.state is _RUNNING
        and record.kin is None
        and not spec.max_calls
        and spec.timeout is None
    )
