"""The scheduler: one method for each event, which returns the effects.

The first argument of each method is the time; `deadline()` says when to call `wake`.
Each method updates the records, then places waiting tasks on free resources. Two things
always hold. A lease ends only after its code has stopped. Every task ends in exactly
one of `Settle` and `Fail` or, if its owner has cancelled it, in `Forget` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from typing import Concatenate, Final, ParamSpec, Protocol

from aiogpu.core.effects import (
    NOTHING,
    Announce,
    Effect,
    Fail,
    Failure,
    Forget,
    Kill,
    Settle,
)
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import Environment, TaskSpec
from aiogpu.core.queue.fair_share import Accounts, Limits
from aiogpu.core.queue.ready import Bucket, ShapeKey
from aiogpu.core.queue.timers import Alarm, AlarmKind
from aiogpu.core.records import Memory, TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler import (
    cancellation,
    dispatch,
    placement,
    recovery,
    revocation,
    task_tree,
)
from aiogpu.core.scheduler.state import (
    Halt,
    Reservation,
    SchedulerState,
    await_results,
    goes_before,
    note_stuck,
    resolve,
)

_ENDED: Final = TaskState.ENDED
_QUEUED: Final = TaskState.QUEUED
_RUNNING: Final = TaskState.RUNNING

P = ParamSpec("P")


def event(
    step: Callable[Concatenate[Scheduler, P], None],
) -> Callable[Concatenate[Scheduler, float, P], Sequence[Effect]]:
    """Decorator for event methods: collects effects, then places waiting tasks."""

    def method(
        self: Scheduler, now: float, /, *args: P.args, **kwargs: P.kwargs
    ) -> Sequence[Effect]:
        self.now, self.effects = now, []
        step(self, *args, **kwargs)
        return self._place()

    update_wrapper(method, step)
    return method


Step = Callable[..., Sequence[Effect]]
"""An event method of `Scheduler`."""


class Feed(Protocol):
    """Queues an event for the scheduler: `feed(Scheduler.cancel, task)`."""

    def __call__(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call an event method at once, or after the event that is being handled."""


class Scheduler(SchedulerState):
    """The scheduler of one node; see the module's docstring."""

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.tasks)} tasks, {self.workers!r}, {self.ledger!r}>"

    @property
    def is_closed(self) -> bool:
        """True if the node is closing and no task and no worker is left."""
        return self.is_closing and not len(self.workers) and not self.tasks

    def deadline(self) -> float | None:
        """Return the time at which to call `wake`; None: never."""
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
        """Take in a new task. Ids must increase.

        Args:
            now: the time.
            task: the task's id.
            spec: the task's request and options.
            parent: the task that submits this one.
            needs: the tasks whose results are arguments of this one, if some results
                are missing: the task then waits for `supply`. None if none is missing.
            client: the program that owns the task; ignored for a child, which belongs
                to the program of its parent.
        """
        if self.is_closing:
            return [Fail(task, Failure.ABANDONED), Forget(task, now, False)]
        self.now, self.effects = now, []
        record = TaskRecord(task, spec, now, client)
        if parent is not None:
            starter = self.tasks.get(parent)
            if starter is None or starter.state is TaskState.STOPPING:
                return [Fail(task, Failure.DISOWNED), Forget(task, now, False)]
            task_tree.adopt(starter, record)
        self.tasks[task] = record
        if self.clients is not None:
            is_waiting = record.client in self.ready.of_client
            self.clients.enter(record, is_waiting=is_waiting)
        if spec.timeout is not None:
            self.timers.set(now + spec.timeout, AlarmKind.EXPIRE, task)
        lanes = self.ready.by_shape.get((record.client, spec.shape))
        is_behind = lanes is not None
        if spec.is_grouped:
            from aiogpu.core.scheduler.placement_groups import enter

            if not enter(self, record, needs):
                return self._advance_groups()
            is_behind = is_behind or self.ready.has_group_for(record)
        elif needs is not None:
            await_results(self, record, needs)
            return NOTHING
        # Queue behind tasks of the same shape, or placement groups with equal bundles.
        # If there are none, start now: no waiting task fits the free resources.
        if not is_behind and (lease := self.take(record)):
            dispatch.start(self, record, lease)
            return self._advance_groups() if self.changed_groups else self.effects
        self.ready.push(record)
        if spec.is_lease:
            self.ungranted.add(task)
        if lanes is None:
            note_stuck(self, record)
            return self._place() if self._may_give_way(record) else NOTHING
        # A lease needs no worker; the tasks before it may wait for lack of one.
        if not (self.reservation or spec.is_lease):
            return NOTHING
        return self._place() if lanes[min(lanes)].head() is record else NOTHING

    def _may_give_way(self, record: TaskRecord) -> bool:
        """Return True if a new task that does not fit may let something be placed.

        It may take over a reservation or start by another of its requests, or a worker
        may be retired for it.
        """
        plan = self.reservation
        if plan is not None and goes_before(record, plan.record):
            return True
        if self.resting:
            self._expect_evictions()
        if record.spec.alternatives:
            return True
        if not self.workers.idle:
            return False  # no worker can be retired for it
        return self.exclusive.is_wanted or self.worker_limit.refused > 0

    def submit_many(
        self,
        now: float,
        first: TaskId,
        count: int,
        spec: TaskSpec,
        client: ClientId = OWN,
    ) -> bool:
        """Queue many new tasks without a parent behind waiting tasks of their shape.

        Args:
            now: the time.
            first: the lowest id; the ids are consecutive.
            count: the number of tasks.
            spec: the spec of all tasks.
            client: the program that owns the tasks.

        Returns:
            False if nothing was queued and each task needs a call of `submit`.
        """
        bucket = self._bucket_behind(spec, client)
        if bucket is None:
            return False
        if self.clients is not None:
            self.clients.of(client).unfinished += count
        self.now = now
        records = [
            TaskRecord(TaskId(task), spec, now, client)
            for task in range(first, first + count)
        ]
        self.tasks.extend(first, records)
        bucket.extend(records)
        return True

    def accepts_many(self, spec: TaskSpec, client: ClientId = OWN) -> bool:
        """Return True if `submit_many` would queue tasks of this spec now."""
        return self._bucket_behind(spec, client) is not None

    def _bucket_behind(self, spec: TaskSpec, client: ClientId) -> Bucket | None:
        """Return the bucket in which new tasks can do nothing but wait.

        None if there is no such bucket, or a limit must be checked for each task. A
        reservation is no obstacle: the tasks are behind the first of the bucket.
        """
        if self.is_closing or spec.timeout is not None or spec.is_grouped:
            return None
        if self.clients is not None:
            program = self.clients.of(client)
            if program.most or program.limits.max_waiting is not None:
                return None
        return self.ready.by_shape.get((client, spec.shape), {}).get(spec.lane)

    @event
    def supply(self, task: TaskId) -> None:
        """Queue a task whose missing arguments have arrived."""
        if resolve(self, task):
            task_tree.end_deadlocks(self)

    def cancel(self, now: float, task: TaskId) -> Sequence[Effect]:
        """Cancel a task for its owner."""
        record = self.tasks.get(task)
        if record is None:
            return NOTHING
        self.now, self.effects = now, []
        is_alone = record.state is TaskState.WAITING and record.kin is None
        if is_alone and not self.holds_back:
            # The task holds nothing and no task waits for it: nothing can be placed.
            cancellation.withdraw(self, record)
            return self._advance_groups() if self.changed_groups else self.effects
        task_tree.stop(self, record)
        return self._place()

    def finish(
        self,
        now: float,
        task: TaskId,
        worker: WorkerId,
        retry: bool = False,
        took: float = 0.0,
        ran_out: bool = False,
    ) -> Sequence[Effect]:
        """Handle the result of a task, whose code has stopped.

        Args:
            now: the time.
            task: the task.
            worker: the worker.
            retry: the task failed with an exception that is retried, if the task has
                retries left.
            took: seconds that the code ran; 0 if unknown.
            ran_out: the task failed because device memory ran out.
        """
        runner = self.workers.get(worker)
        record = None if runner is None else runner.task
        if runner is None or record is None or record.id != task:
            return NOTHING
        self.now, self.effects = now, []
        spec, state = record.spec, record.state
        record.worker = runner.task = None
        if took:
            spec.pace.note(took)
        is_special = record.kin is not None or retry or state is not _RUNNING
        if ran_out or self.exclusive.is_wanted:
            is_special = True
        if is_special:
            assert runner.lease is not None, runner
            if runner.lease.is_lent:
                self.ledger.resume(runner.lease)
            recovery.end_or_retry(self, record, retry, ran_out)
        else:
            self.end(record)
            self.effects.append(Settle(task, record.since))
        if spec.max_calls:
            runner.calls[spec.function] = runner.calls.get(spec.function, 0) + 1
        self._continue_worker(runner, (record.client, spec.shape))
        if is_special:
            # The task may be queued again, and children that ended have freed leases.
            self._place()
        return self.effects

    def finish_many(
        self,
        now: float,
        worker_id: WorkerId,
        finished: Iterable[tuple[TaskId, float]],
    ) -> list[TaskRecord]:
        """Handle the results of several tasks of one worker, without failures.

        Args:
            now: the time.
            worker_id: the worker.
            finished: the tasks, each with the seconds that its code ran.

        Returns:
            The tasks, from the first on, that have ended here, as if by `Settle`. The
            caller passes the rest to `finish`. All other effects are in `effects`.
        """
        self.now, self.effects = now, []
        settled: list[TaskRecord] = []
        reservation = self.reservation
        worker = self.workers.get(worker_id)
        if worker is None or worker.is_killed or self.exclusive.is_wanted:
            return settled
        queue = worker.queue
        for task, took in finished:
            record = worker.task
            if record is None or record.id != task or not queue:
                break
            following = queue[0]
            if following.state is not _QUEUED or not _ends_without_decision(record):
                break
            if following.spec.is_timed:
                break  # its start time must be recorded
            if took:
                record.spec.pace.note(took)
            record.worker, record.state = None, _ENDED
            settled.append(record)
            if len(queue) - 1 <= worker.refill_at:
                dispatch.take_turn(self, worker)
            else:
                worker.task = queue.popleft()
                following.state = _RUNNING
        if settled:
            self.tasks.pop_some([record.id for record in settled])
            if self.clients is not None:
                client = self.clients.of(settled[0].client)
                client.unfinished -= len(settled)
                self.clients.forget(client)
            self._place_if_released(reservation)
        return settled

    def _continue_worker(self, worker: WorkerRecord, key: ShapeKey) -> None:
        """Give a worker its next task of the same shape, or end its lease."""
        reservation = self.reservation
        if worker.queue:
            dispatch.take_turn(self, worker)
            self._place_if_released(reservation)
            return
        worker.is_revoking = False
        by_shape = self.ready.by_shape
        if by_shape and not self.is_closing:
            lanes = by_shape.get(key)
            if lanes is not None and dispatch.hand_over(self, worker, lanes):
                self._place_if_released(reservation)
                return
        if dispatch.release(self, worker):
            idle, exclusive = self.workers.idle, self.exclusive
            if by_shape or idle > self.most_idle or exclusive.is_wanted:
                self._place()

    def _place_if_released(self, before: Reservation | None) -> None:
        """Place waiting tasks if the reservation of before the event has ended."""
        if before is not None and self.reservation is not before:
            self._place()

    def task_leaves(self, now: float, task: TaskId) -> Sequence[Effect]:
        """Note that an endless task was told to end: what it holds comes back."""
        record = self.tasks.get(task)
        self.evicting.discard(task)
        if record is not None and record.worker is not None:
            record.worker.is_leaving = True
        return NOTHING

    @event
    def rest(self, task: TaskId, until: float) -> None:
        """Note that an actor has no calls; it may be evicted from a time on."""
        record = self.tasks.get(task)
        if record is not None and record.state is _RUNNING:
            self.resting[task] = until
            if self.ready.by_shape:
                self._expect_evictions()

    def _expect_evictions(self) -> None:
        # Imported late: few programs have actors that may be evicted.
        from aiogpu.core.scheduler.contention.eviction import expect

        expect(self)

    def stir(self, now: float, task: TaskId) -> Sequence[Effect]:
        """Note that an actor has a call again, so it stays."""
        if self.resting.pop(task, None) is None and task in self.evicting:
            # The call was made after the decision, before it was carried out.
            self.evicting.discard(task)
            worker = self.tasks[task].worker
            assert worker is not None, task
            worker.is_leaving = False
        return NOTHING

    @event
    def bring_back(self, task: TaskId) -> None:
        """Queue an evicted actor again: it has a call."""
        record = self.evicted.pop(task, None)
        if record is not None:
            self.wait_again(record)

    def task_began(
        self, now: float, task: TaskId, worker: WorkerId, when: float
    ) -> Sequence[Effect]:
        """Start the `run_timeout` of a task whose code has begun.

        Args:
            now: the time.
            task: the task.
            worker: the worker that runs the task.
            when: the time at which the code began.
        """
        record = self.tasks.get(task)
        if record is None or record.worker is None or record.worker.id != worker:
            return NOTHING
        limit = record.spec.run_timeout
        if limit is not None:
            record.began = min(when, now)
            record.run_until = record.began + limit
            self.timers.set(record.run_until, AlarmKind.OVERRUN, task)
        return NOTHING

    @event
    def task_halted(self, task: TaskId, worker: WorkerId, stands: bool) -> None:
        """Stop the time limits of a task that stands at a breakpoint, or let them run.

        Args:
            task: the task.
            worker: the worker that runs the task.
            stands: False if the task goes on.
        """
        record = self.tasks.get(task)
        if record is None or record.worker is None or record.worker.id != worker:
            return
        if record.spec.is_timed:
            if stands:
                self.halts.setdefault(task, Halt()).begin(self.now)
            else:
                self.end_halt(record)

    @event
    def wait_for(
        self,
        task: TaskId,
        children: tuple[TaskId, ...],
        elsewhere: bool = False,
        is_more: bool = False,
    ) -> None:
        """Block a task until all `children` have ended.

        Without children the task has stopped waiting, unless it waits `elsewhere`: for
        something that the scheduler does not know. `is_more`: it waits for these as
        well as for the children of earlier calls.
        """
        record = self.tasks.get(task)
        if record is not None:
            task_tree.on_waits(self, record, children, elsewhere, is_more)

    def detach(self, _now: float, task: TaskId) -> Sequence[Effect]:
        """Let a task outlive its parent: the parent's result contains its handle."""
        task_tree.detach(self.tasks.get(task))
        return NOTHING

    @event
    def release_cpus(self, task: TaskId) -> None:
        """Free the CPUs of a running actor, whose constructor has returned."""
        record = self.tasks.get(task)
        if record is None or record.state is not _RUNNING:
            return
        assert record.worker is not None, record
        assert record.worker.lease is not None, record.worker
        if not record.worker.lease.is_lent:
            self.ledger.lend(record.worker.lease)

    @event
    def use_restart(self, task: TaskId) -> None:
        """Use up a restart of an actor whose process is killed before it exists.

        The actor keeps its place in the queue, or the process that is being started for
        it. Without restarts left, the actor ends.
        """
        record = self.tasks.get(task)
        if record is None or record.state is TaskState.STOPPING:
            return
        if not recovery.may_retry(record):
            self.effects.append(Fail(task, Failure.KILLED))
            task_tree.stop(self, record)

    # Workers

    def worker_started(self, now: float, worker: WorkerId) -> Sequence[Effect]:
        """Handle the connection of a worker that was forked by `Spawn`."""
        started = self.workers.get(worker)
        if started is None or started.state is not WorkerState.STARTING:
            return NOTHING
        self.now, self.effects = now, []
        had_outage = self.outages.pop(started.environment, None) is not None
        dispatch.on_worker_started(self, started)
        if self.effects and not had_outage:
            return self.effects
        return self._place()

    @event
    def worker_spoilt(self, worker: WorkerId) -> None:
        """Give no more tasks to a worker that will exit after its current task.

        Must be called before `finish` for that task.
        """
        if busy := self._busy(worker):
            revocation.spoil(self, busy)

    @event
    def task_skipped(self, task: TaskId, worker: WorkerId) -> None:
        """Requeue a task that a worker skipped because of a `Revoke`."""
        skipper, record = self.workers.get(worker), self.tasks.get(task)
        if skipper is not None and record is not None:
            revocation.on_skipped(self, skipper, record)

    @event
    def revoked(self, worker: WorkerId, number: int, began: TaskId | None) -> None:
        """Handle the answer to `Revoke`: the worker begins nothing after `began`.

        Args:
            worker: the worker.
            number: the number of the `Revoke`.
            began: the last task that the worker has begun or is about to begin; None
                if it has begun none of its unfinished tasks.
        """
        revoked = self.workers.get(worker)
        if revoked is None:
            return
        revocation.on_revoked(self, revoked, number, began)
        task_tree.end_deadlocks(self)
        record = revoked.task
        if record and record.state is TaskState.STOPPING and record.stop is None:
            # The task was cancelled in the worker's queue but has begun nevertheless.
            cancellation.interrupt(self, record)

    @event
    def worker_gone(
        self,
        worker: WorkerId,
        began: TaskId | None = None,
        settles: bool = False,
        is_crowded: bool = False,
        outage: str = "",
        is_left: bool = False,
    ) -> None:
        """Handle the end of a worker's process and all its descendants.

        Args:
            worker: the worker.
            began: the last task that the worker had begun; None if it had begun none
                of its unanswered tasks.
            settles: the worker's devices have yet to be checked; one of `devices_free`
                and `devices_stuck` follows.
            is_crowded: the worker never started: descriptors or processes ran out.
            outage: why the worker could not be started. The reason probably holds for
                all workers of its environment or, if `is_crowded`, of the node.
            is_left: the worker was killed and its code never runs again, but a process
                of it has not ended, and may still use what the worker holds;
                `worker_ended` follows.
        """
        gone = self.workers.get(worker)
        if gone is not None and gone.state is not WorkerState.SETTLING:
            end = recovery.End(began, settles, is_crowded, outage, is_left)
            recovery.on_worker_gone(self, gone, end)

    @event
    def worker_ended(self, worker: WorkerId, settles: bool = False) -> None:
        """Handle that the processes of a worker that `is_left` have ended at last.

        `settles`: as for `worker_gone`.
        """
        gone = self.workers.get(worker)
        if gone is not None and gone.state is WorkerState.SETTLING:
            recovery.on_worker_ended(self, gone, settles)

    @event
    def kill_for_memory(self, worker: WorkerId, memory: Memory) -> None:
        """Kill a worker: host memory runs out, or its task outgrew its device memory.

        Args:
            worker: the worker; for host memory, the one that the monitor chose.
            memory: the reason; it decides how the task is retried.
        """
        if (busy := self._busy(worker)) and busy.task:
            busy.task.killed_for = memory
            busy.task.is_alone = self.exclusive.has_run_alone(self, busy.task)
            cancellation.kill_worker(self, busy)

    @event
    def end_idle(self, worker: WorkerId) -> None:
        """End an idle worker soon: host memory runs out, and the worker keeps some."""
        idle = self.workers.get(worker)
        if idle is not None and idle.state is WorkerState.IDLE:
            self.workers.leave_idle(idle)
            cancellation.retire(self, idle)
            soon = self.now + min(cancellation.SOON, self.config.exit_grace)
            self.timers.set(soon, AlarmKind.END, idle.id)

    def _busy(self, worker_id: WorkerId) -> WorkerRecord | None:
        worker = self.workers.get(worker_id)
        return worker if worker and worker.state is WorkerState.BUSY else None

    def environment_outdated(
        self, now: float, environment: Environment
    ) -> Sequence[Effect]:
        """Replace the clean workers of an environment: its zygote was replaced."""
        self.now, self.effects = now, []
        cancellation.retire_clean(self, environment)
        if self.is_closing:
            return self.effects
        if environment:
            # This zygote may have been replaced to make room for the zygote of another
            # environment; spares would bring it back and evict that zygote in turn.
            self.spares.forget(environment)
            self.note_spares()
        dispatch.refill_spares(self)
        return self.effects

    # Devices and leases

    @event
    def device_changed(
        self,
        kind: str,
        index: int,
        cause: Cause,
        reason: str | None,
        is_avoided: bool = False,
    ) -> None:
        """Set a device aside for a cause, or end that cause.

        Args:
            kind: the kind of device, such as "GPU".
            index: the device's index in its set.
            cause: the cause; a device can be set aside for several causes at a time.
            reason: the cause in words; None if the cause has ended.
            is_avoided: do not set the device aside, but choose it after all others.
        """
        availability = self.ledger.device_sets[kind].availability
        if cause is Cause.FOREIGN:
            availability.avoid(index, is_avoided=is_avoided and reason is not None)
        availability.note(index, cause, None if is_avoided else reason)
        plan, bit = self.reservation, 1 << index
        if cause is not Cause.UNSETTLED and plan and plan.barred.get(kind, 0) & bit:
            self.reservation = None  # the next placement reserves other devices
        self._requeue_from_unfit_devices()
        if cause is Cause.SICK:
            # Also when the device has recovered: a reset may have invalidated the
            # contexts that the workers have open.
            cancellation.retire_bound(self, kind, index)

    @event
    def devices_free(self, worker: WorkerId, is_verified: bool = True) -> None:
        """Free the devices of a worker that is gone or of a returned lease.

        `is_verified`: the driver has checked; otherwise it has no means to check.
        """
        for devices, index in recovery.returned_devices(self, worker):
            if is_verified:
                devices.unverified.discard(index)
            else:
                devices.unverified.add(index)

    @event
    def devices_stuck(self, worker: WorkerId, reason: str) -> None:
        """Set aside the devices of a gone worker, which are still in use."""
        for devices, index in recovery.returned_devices(self, worker):
            devices.availability.note(index, Cause.UNSETTLED, reason)
        self._requeue_from_unfit_devices()

    @event
    def lease_returned(self, holder: WorkerId, settles: bool = False) -> None:
        """End a granted lease; the processes that used it have ended.

        `settles`: the lease's devices have yet to be checked; one of `devices_free`
        and `devices_stuck` follows for this holder.
        """
        dispatch.return_lease(self, holder, settles)

    def _requeue_from_unfit_devices(self) -> None:
        """Requeue tasks that have not begun and whose devices were set aside."""
        for worker in self.workers:
            if worker.lease is None or not self.ledger.drains(worker.lease):
                continue
            if worker.queue:
                revocation.revoke(self, worker)
            elif worker.state is WorkerState.STARTING and worker.task:
                record = worker.task
                cancellation.unclaim(self, record)
                self.wait_again(record)

    # Programs

    @event
    def join(
        self, client: ClientId, weight: float = 1.0, limits: Limits | None = None
    ) -> None:
        """Add a program that shares the node, or change its weight and limits.

        `weight`: the program's share relative to a program of weight 1. Until the
        first call the node does no accounting for programs.
        """
        clients = self.clients or Accounts(self, self.ledger)
        clients.join(client, weight, limits or Limits())
        if self.clients is None:
            self._share(clients)

    def _share(self, clients: Accounts) -> None:
        """Begin to account for programs. Costs O(tasks + workers)."""
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
    def leave(self, client: ClientId) -> None:
        """Note that a program submits no more tasks; its submitted tasks continue."""
        if self.clients is not None:
            self.clients.leave(client)

    @event
    def set_behind(self, client: ClientId, is_behind: bool) -> None:
        """Note that a program does not read its messages, or has caught up.

        While it is behind, none of its tasks start: their results would pile up.
        """
        if self.clients is not None:
            self.clients.set_behind(client, is_behind)

    @event
    def announce_stop(self, client: ClientId | None) -> None:
        """Note that a program is about to stop its tasks, or the node all tasks.

        The `stop_grace` of each task begins now; a stopped task is interrupted when its
        grace has passed. A detached task outlives its program.

        Args:
            client: the program; None for the node, whose workers notice by themselves.
        """
        if client is None:
            if self.stops_since is None:
                self.stops_since = self.now
            return
        program = None if self.clients is None else self.clients.find(client)
        if program is None:
            return  # the program has no tasks
        if program.stops_since is None:
            program.stops_since = self.now
        for worker in self.workers:
            record = worker.task
            if record is None or worker.state is not WorkerState.BUSY:
                continue
            if record.client == client and not record.spec.is_detached:
                self.effects.append(Announce(record.id, worker.id))

    # Time

    @event
    def wake(self) -> None:
        """Handle all due alarms; to be called at the time of `deadline()`."""
        for alarm in self.timers.due(self.now):
            self._handle_alarm(alarm)

    def _handle_alarm(self, alarm: Alarm) -> None:
        """Handle one alarm, unless it is stale."""
        match alarm.kind:
            case AlarmKind.STOP_SOME:
                self._stop_some()
            case AlarmKind.REFILL if not self.is_closing:
                dispatch.refill_spares(self)
            case AlarmKind.SPARES if not self.is_closing:
                cancellation.retire_spares(self)
            case AlarmKind.WORKER_LIMIT:
                self.grow()
            case AlarmKind.OUTAGE:
                recovery.retry_outages(self)
            case AlarmKind.DEADLOCK:
                self.search.note_alarm()
                task_tree.end_deadlocks(self)
            case AlarmKind.STALL:
                from aiogpu.core.scheduler.contention.shortage import warn_of_stalls

                warn_of_stalls(self)
            case AlarmKind.EVICT:
                from aiogpu.core.scheduler.contention.eviction import evict

                evict(self, alarm.when)
            case AlarmKind.END | AlarmKind.LOOK:
                self._handle_worker_alarm(alarm)
            case _:
                self._handle_task_alarm(alarm)

    def _handle_worker_alarm(self, alarm: Alarm) -> None:
        worker = self.workers.get(WorkerId(alarm.subject))
        if worker is None:
            return
        if alarm.kind is AlarmKind.LOOK:
            revocation.check_progress(self, worker, alarm.when)
        elif worker.state is WorkerState.BUSY and worker.is_leaving:
            cancellation.kill_worker(self, worker)
        elif worker.state not in (WorkerState.SETTLING, WorkerState.BUSY):
            # A busy worker has an actor that was to leave, and stays after all.
            self.effects.append(Kill(worker.id))

    def _handle_task_alarm(self, alarm: Alarm) -> None:
        record = self.tasks.get(TaskId(alarm.subject))
        if record is None:
            return
        if alarm.kind is AlarmKind.STOP:
            cancellation.interrupt_again_or_kill(self, record)
        elif alarm.kind is AlarmKind.ALONE:
            self.exclusive.give_up(self, record)
        elif alarm.kind is AlarmKind.RETRY:
            self.wait_again(record)
            task_tree.end_deadlocks(self)
        elif record.state is TaskState.STOPPING:
            return
        elif record.id in self.halts and self.halts[record.id].defers(alarm):
            return  # another alarm follows when the task goes on
        elif alarm.kind is AlarmKind.EXPIRE:
            self._expire(record, Failure.EXPIRED)
        elif alarm.when == record.run_until:  # else set for an earlier attempt
            self._expire(record, Failure.OVERRUN)

    def _expire(self, record: TaskRecord, failure: Failure) -> None:
        times = cancellation.describe_times(record, self.now)
        self.effects.append(Fail(record.id, failure, times))
        task_tree.stop(self, record)

    # Shutdown

    def close(self, now: float, at_once: bool = False) -> Sequence[Effect]:
        """Shut down: start nothing new, stop all tasks.

        `at_once`: kill workers without giving their tasks time to stop.
        """
        self.now, self.effects = now, []
        self.is_closing = True
        if self.stops_since is None:
            self.stops_since = now
        self.most_idle = 0
        self.reservation = None
        recovery.settle_all(self)
        dispatch.end_leases(self)
        for worker in list(self.workers):
            for record in [worker.task, *worker.queue]:
                if record is not None and record.state is not TaskState.STOPPING:
                    self.effects.append(Fail(record.id, Failure.ABANDONED))
                    task_tree.stop(self, record)
            if worker.state is WorkerState.STARTING:
                # It may never connect: an import in its zygote may hang.
                self.effects.append(Kill(worker.id))
        for worker in self.workers if at_once else ():
            if worker.state is not WorkerState.STARTING:
                cancellation.kill_worker(self, worker)
        self._stop_some()
        cancellation.retire_idle(self)
        return self.effects

    def _stop_some(self) -> None:
        """Stop one batch of tasks, and set an alarm for the next batch.

        Of children that their parents have left behind, and of all tasks without code
        if the node closes.
        """
        for _ in range(task_tree.STOPPED_AT_ONCE):
            child = task_tree.next_disowned(self)
            if child is not None:
                task_tree.disown(self, child)
                continue
            if not self.is_closing:
                return
            record = self.ready.any_task() or self._any_unqueued_task()
            if record is None:
                return
            self.effects.append(Fail(record.id, Failure.ABANDONED))
            task_tree.stop(self, record)
        self.stop_some_later()

    def _any_unqueued_task(self) -> TaskRecord | None:
        """Return a task that waits for arguments or for its next attempt, or None."""
        for id_ in self.expecting:
            return self.tasks[id_]
        for record in self.evicted.values():
            return record
        return next(iter(self.delayed.values()), None)

    def _place(self) -> list[Effect]:
        if self.exclusive.is_wanted and not self.is_closing:
            alone = self.exclusive.begin(self)
            if alone is not None:
                dispatch.start(self, *alone)
            cancellation.evict_idle_worker(self)
        if self.ready.by_shape:
            if not self.is_closing:
                for record, lease in placement.place(self):
                    dispatch.start(self, record, lease)
                if self.ready.flexible:
                    self._start_alternatives()
                if self.resting and self.ready.by_shape:
                    self._expect_evictions()
        else:
            self.reservation = None
        if self.workers.idle > self.most_idle:
            # After the placement, which may give the idle workers tasks.
            cancellation.retire_idle(self)
        return self._advance_groups() if self.changed_groups else self.effects

    def _start_alternatives(self) -> None:
        # Imported late: few programs have tasks with several requests.
        from aiogpu.core.scheduler.contention.alternatives import start_alternatives

        start_alternatives(self)

    def _advance_groups(self) -> list[Effect]:
        """Queue members of granted placement groups, end members of removed ones."""
        if not self.is_closing:
            from aiogpu.core.scheduler.placement_groups import advance_groups

            if advance_groups(self):
                self._place()
        return self.effects

    def check(self) -> None:
        """Assert the scheduler's invariants. Costs O(everything)."""
        from aiogpu.core.scheduler.invariants import check

        check(self)


def _ends_without_decision(record: TaskRecord) -> bool:
    """Return True in the usual case: nothing to retry, recycle, time or clean up."""
    spec = record.spec
    return (
        record.state is _RUNNING
        and record.kin is None
        and not spec.max_calls
        and not spec.is_timed
    )
