"""The one place where decisions meet I/O: events to the core, effects to the pool.

The driver keeps what the core must not see: the payload, receiver and answer of each
task. It finishes one event before it looks at the next. An event that arrives while
effects are carried out waits in a queue, so the stack stays flat.

If tasks of a function already wait, further calls of it in a row are submitted to the
core together (`SubmitBatch`). None of them can start, so the core has nothing to
decide. That halves the cost of a submission in the core.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core import effects
from aiogpu.core.effects import NOTHING, Effect
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import Environment
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.scheduler.scheduler import Feed, Scheduler, Step
from aiogpu.runtime.actors.registry import Actors, Check
from aiogpu.runtime.callers.caller import pass_on_all
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.devices.memory_guard import Shortages
from aiogpu.runtime.history import DIED, RETRIED
from aiogpu.runtime.memory_monitor import MemoryGuard
from aiogpu.runtime.objects.values import await_arguments, is_complete, unfinished_in
from aiogpu.runtime.pending_tasks import EACH, Call, Delay, tell_fault
from aiogpu.runtime.results import LogFailure, Results, WarnOwner
from aiogpu.runtime.workers.commands import SETTLES
from aiogpu.runtime.workers.death import CROWDED, UNAVAILABLE, Death
from aiogpu.runtime.workers.message_router import InlinePoller, NestedRequests
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.payload import Payload
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import Began, Done, Failed, Skipped

if TYPE_CHECKING:
    from aiogpu.core.queue.ready import Bucket
    from aiogpu.core.records import TaskRecord
    from aiogpu.runtime.callers.leases import Leases
    from aiogpu.runtime.devices.monitor import DeviceMonitor
    from aiogpu.runtime.devices.probe_thread import Key
    from aiogpu.runtime.internal_faults import Faults
    from aiogpu.runtime.objects.values import Value
    from aiogpu.wire.messages import Message

    Lessees = Callable[[Key], Mapping[int, int]]
    """Gives the programs that have a lease of a device, each with the holder's id."""

    DeviceFactory = Callable[[Feed, Lessees], DeviceMonitor]
    """Begins to look at a node's devices, and to tell the core."""


class SubmitBatch:
    """Consecutive calls of one function that are submitted to the core together.

    Attributes:
        func: what is called; None where the next call is submitted by itself.
        calls: calls that the core does not know yet.
    """

    __slots__ = ("_before", "_bucket", "_loop", "_tell", "calls", "func")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[FunctionSpec, list[Call]], object],
    ) -> None:
        """Prepare.

        Args:
            loop: the event loop; a batch is submitted at the end of the loop's turn.
            tell: submits calls of one function to the core.
        """
        self.func: FunctionSpec | None = None
        self.calls: list[Call] = []
        self._before = 0
        self._bucket: Bucket
        self._loop = loop
        self._tell = tell

    def __repr__(self) -> str:
        return f"<SubmitBatch of {len(self.calls)}>"

    def begin(self, func: FunctionSpec, bucket: Bucket | None, before: int) -> None:
        """Let the next calls of a function form a batch, if it runs plain tasks.

        Args:
            func: the function.
            bucket: where its tasks wait. While one waits there, later ones must wait.
            before: the id of the last task that was submitted.
        """
        spec = func.spec
        is_plain = not (func.actor or spec.is_lease or spec.is_grouped)
        if bucket is not None and is_plain and spec.timeout is None:
            self.func, self._bucket, self._before = func, bucket, before

    def add(self, payload: bytes, receiver: Receiver) -> int:
        """Add a call to the batch; return its id, or 0 if it must go alone."""
        func, calls = self.func, self.calls
        if func is None or not self._bucket.size:
            return 0
        if not calls:
            self._loop.call_soon(self.end)
        calls.append(Call(func, payload, receiver))
        return self._before + len(calls)

    def end(self) -> None:
        """Submit the batch; the next call is submitted by itself."""
        func, self.func = self.func, None
        if func is not None and self.calls:
            calls, self.calls = self.calls, []
            self._tell(func, calls)


_log: Final = logging.getLogger(__name__)


P = ParamSpec("P")


class Driver:
    """Runs one node's tasks on the loop that it was made for.

    Attributes:
        is_busy: whether the core decides or effects are carried out. `feed` queues the
            events that arrive meanwhile.
        events: the queued events.
        workers: live workers by id.
        pool: starts and ends them.
        devices: monitors the node's devices; None if there are none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        assignment: Assignment,
        check: Check,
        make_pool: Callable[[Driver], Pool],
        nested: Callable[[], NestedRequests] | None = None,
        warn_owner: WarnOwner | None = None,
        log_failure: LogFailure | None = None,
        watch: DeviceFactory | None = None,
    ) -> None:
        """Make the parts of a node that decide and carry out.

        Args:
            loop: runs all of it.
            scheduler: decides.
            assignment: tells workers their devices.
            check: raises where a call can never be served.
            make_pool: makes the workers' pool, which tells this driver what becomes of
                them.
            nested: gives what takes in the requests of tasks, once one comes; None
                where no task can ask.
            warn_owner: tells another program what concerns its task; None where no
                program can join.
            log_failure: writes failures of other programs' tasks to the log; None where
                no program can join.
            watch: begins to watch the node's devices; None if there are none.
        """
        self.scheduler = scheduler
        self.devices = None if watch is None else watch(self.feed, self._lessees)
        gpu_guard = None if self.devices is None else self.devices.guard
        peak_seen = None if gpu_guard is None else gpu_guard.peak_of
        self.shortages = Shortages(scheduler, peak_seen)
        self.is_busy = False
        self.events: Final[deque[tuple[Step, Any, Any]]] = deque()
        self._loop = loop
        self.workers: dict[int, LiveWorker] = {}
        self.row = SubmitBatch(loop, self._submit_each)
        self.burst = InlinePoller(self.workers, self.row.end)
        self.pool = make_pool(self)
        self._commands = self.pool.commands
        self.guard = MemoryGuard(loop, scheduler, self.workers, self.feed)
        self._calls: ShardedDict[Call] = ShardedDict()
        self.results = Results(
            *(scheduler, self._calls, self.guard, gpu_guard),
            *(warn_owner, log_failure),
        )
        self._sites = self.results.history.sites
        self.actors = Actors(
            loop, scheduler, self.pool, self, self.results, self.shortages, check
        )
        self._last_task = 0
        self._last_number = 0
        self._leases: Leases | None = None
        self._assignment = assignment
        self._timers = scheduler.timers
        # uvloop's handles do not say when they are due.
        self._timer: asyncio.Handle | None = None
        self._timer_at: float | None = None
        self._closed = loop.create_future()
        # As attributes: so no call is made in between.
        self.on_items = self.results.on_items
        self.on_report = self.results.on_report
        self.on_acting = self.actors.on_message
        self._nested = nested
        self.handlers: Final = self._effect_handlers()

    def _effect_handlers(self) -> dict[type[Effect], Callable[..., None]]:
        return {
            # Not bound methods: these would load the leases now.
            effects.Granted: lambda effect: self.leases.grant(effect),  # noqa: PLW0108
            effects.Reclaim: lambda effect: self.leases.reclaim(effect),  # noqa: PLW0108
            effects.Spawn: lambda effect: self.pool.spawn(
                effect.worker, effect.environment
            ),
            effects.Assign: self._assign,
            effects.Ahead: self._send_ahead,
            effects.Revoke: self.revoke,
            effects.Interrupt: self._interrupt,
            effects.Announce: lambda effect: self._commands.announce(
                effect.worker, effect.task
            ),
            effects.Retire: lambda effect: self.pool.retire(effect.worker),
            effects.Kill: lambda effect: self.pool.kill(effect.worker),
            effects.Settle: self.results.settle,
            effects.Fail: self.results.fail,
            effects.Warn: self.results.warn,
            effects.Forget: self.results.forget,
        }

    @cached_property
    def requests(self) -> NestedRequests:
        """The handler of tasks' requests; loaded with the first request."""
        assert self._nested is not None
        return self._nested()

    @property
    def leases(self) -> Leases:
        """The leases and placements; loaded with the first request for one."""
        if self._leases is None:
            from aiogpu.runtime.callers.leases import Leases

            release = None if self.devices is None else self.devices.release
            self._leases = Leases(
                self._loop, self._calls, self._assignment, release, self.feed
            )
        return self._leases

    @cached_property
    def faults(self) -> Faults:
        """The handler of internal faults; loaded with the first fault."""
        from aiogpu.runtime.internal_faults import Faults

        return Faults(self._calls, self.pool, self._send_alone, self.feed)

    def _lessees(self, key: Key) -> Mapping[int, int]:
        return {} if self._leases is None else self._leases.roots_of(key)

    @property
    def holders(self) -> Mapping[int, int]:
        """Process ids of who has leases or placements, by holder."""
        return {} if self._leases is None else self._leases.pids

    def __repr__(self) -> str:
        return f"<Driver {len(self._calls)} calls, {self.pool!r}>"

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: TaskId | None = None,
        client: ClientId = OWN,
    ) -> int:
        """Start a task; gives its id. Raises what `Scheduler.admit` does."""
        if self.row.func is not None:
            self.row.end()
        if self.scheduler.clients is not None:
            self.scheduler.admit(func.spec.shape.request, client, parent)
        self._last_task += 1
        task = TaskId(self._last_task)
        self._calls[task] = Call(func, payload, receiver, client)
        now = self._loop.time()
        needs: tuple[TaskId, ...] | None = None
        if type(payload) is Payload and not is_complete(payload):
            values = dict.fromkeys(payload.needs)
            needs = tuple(TaskId(v.task) for v in values if v.is_pending and v.task)
        submit = self.scheduler.submit
        wanted: Sequence[Effect] | None = None
        if self.is_busy:
            # The garbage collector may run code that submits, wherever it likes.
            args = (task, func.spec, parent, needs, client)
            self.events.append((Scheduler.submit, args, {}))
        else:
            self.is_busy = True
            try:
                wanted = submit(now, task, func.spec, parent, needs, client)
            except BaseException:
                self.is_busy = False
                del self._calls[task]
                raise
            self.carry_out(wanted)
        if needs is not None:
            assert isinstance(payload, Payload), payload
            await_arguments(payload, partial(self._on_arguments, task))
        elif wanted is NOTHING and parent is None and self.scheduler.clients is None:
            spec, by_shape = func.spec, self.scheduler.ready.by_shape
            bucket = by_shape.get((client, spec.shape), {}).get(spec.lane)
            self.row.begin(func, bucket, self._last_task)
        return task

    def _on_arguments(self, task: TaskId, failed: Value | None) -> None:
        """All arguments of a task are there, or this one never will be."""
        if failed is None:
            self.feed(Scheduler.supply, task)
            return
        call = self.call_of(task)
        if call is not None and call.receiver is not None:
            receiver, call.receiver = call.receiver, None
            failed.tell(receiver)
            self.feed(Scheduler.cancel, task)

    def submit_row(
        self, func: FunctionSpec, calls: list[Call], client: ClientId
    ) -> range:
        """Submit tasks that must wait behind others of the same kind; return their ids.

        The range is empty if the caller must submit each task alone.
        """
        self.row.end()
        if self.is_busy:
            return range(0)
        first, count, now = TaskId(self._last_task + 1), len(calls), self._loop.time()
        if not self.scheduler.submit_many(now, first, count, func.spec, client):
            return range(0)
        self._last_task += count
        self._calls.extend(first, calls)
        return range(first, first + count)

    def _submit_each(self, func: FunctionSpec, calls: list[Call]) -> None:
        """Submit a batch; task by task if no other task of its kind waits."""
        if not self.submit_row(func, calls, OWN):
            for call in calls:
                assert call.receiver is not None, call
                self.submit(func, call.payload, call.receiver)

    def call_of(self, task: TaskId) -> Call | None:
        """Return what is kept of a task that has not ended."""
        self.row.end()
        return self._calls.get(task)

    def knows(self, task: int) -> bool:
        """Return whether a task has not ended."""
        self.row.end()
        return self._calls.get(TaskId(task)) is not None

    def cancel(self, task: int) -> None:
        """Cancel a task; its receiver gets no outcome."""
        self.row.end()
        call = self._calls.get(TaskId(task))
        if call is not None:
            call.receiver = None
            self.feed(Scheduler.cancel, TaskId(task))

    def after_fork(self) -> None:
        """This process is a fork of the driver's: decide and carry out nothing."""
        self.is_busy = True

    def feed(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Tell the core what happened, and do what it says.

        Amid another event the event is queued, and taken in when that one is done.

        Args:
            step: a method of `Scheduler`.
            *args: what it gets after the time.
            **kwargs: the same by name.
        """
        if self.is_busy:
            self.events.append((step, args, kwargs))
            return
        if self.row.calls:
            self.row.end()
        self.is_busy = True
        wanted: Sequence[Effect] = NOTHING
        try:
            wanted = step(self.scheduler, self._loop.time(), *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see `Faults`
            self.faults.on_event(step, args, error)
        self.carry_out(wanted)

    def carry_out(self, wanted: Sequence[Effect]) -> None:
        """Carry out effects; then pass the events queued by them to the core.

        The caller must set `is_busy` before it asks the core. This method clears it.
        """
        events, handlers = self.events, self.handlers
        try:
            while True:
                for effect in wanted:
                    try:
                        handlers[type(effect)](effect)
                    except Exception as error:  # noqa: BLE001 - see `Faults`
                        self.faults.on_effect(effect, error)
                if not events:
                    break
                (step, args, kwargs), wanted = events.popleft(), NOTHING
                try:
                    wanted = step(self.scheduler, self._loop.time(), *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - see `Faults`
                    self.faults.on_event(step, args, error)
        finally:
            self.is_busy = False
        earliest = self._timers.earliest
        if earliest != self._timer_at:
            self._rearm(earliest)
        if (
            self.scheduler.is_closing
            and self.scheduler.is_closed
            and not self._closed.done()
        ):
            self._closed.set_result(None)

    def _rearm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._on_time)

    def _on_time(self) -> None:
        self._timer = self._timer_at = None
        self.feed(Scheduler.wake)

    def announce_stop(self, client: ClientId | None = None) -> None:
        """Let the tasks of a program know that it stops; None for the whole node."""
        if client is None:
            self._commands.announce_stop()
        self.feed(Scheduler.announce_stop, client)

    async def close(self, timeout: float) -> None:
        """Stop everything; return when the last worker is gone, or time is up.

        Time is up when no task has ended for `timeout` seconds: it takes seconds to
        tell a million owners. The longest grace of a worker's task is added.
        """
        self.guard.close()
        self.announce_stop()
        self.feed(Scheduler.close)
        if self._leases is not None:
            self._leases.close()
        # Of those alone that have a worker: a million may wait.
        graces = (
            (record.spec.cancel_grace or 0.0) + record.spec.stop_grace
            for worker in self.scheduler.workers
            for record in (worker.task, *worker.queue)
            if record is not None
        )
        timeout += max(graces, default=0.0)
        left = None
        while left != (left := len(self._calls)) and not self._closed.done():
            await asyncio.wait([self._closed], timeout=timeout)
        if self._timer is not None:
            self._timer.cancel()

    # What becomes of workers, and what they say: see `WorkerEvents`

    def on_started(self, worker: int) -> None:
        """A worker has connected."""
        self.feed(Scheduler.worker_started, WorkerId(worker))

    def wait(
        self, task: TaskId, children: tuple[TaskId, ...], is_elsewhere: bool = False
    ) -> None:
        """Note that a task waits for tasks or an actor, or no longer waits."""
        self.feed(Scheduler.wait_for, task, children, is_elsewhere)

    def demand(self, task: int, limit: int) -> None:
        """A task may yield so many items in all, over all attempts at it."""
        call = self._calls.get(TaskId(task))
        if call is not None:
            call.limit = limit
            self._commands.demand(call.worker, task, limit)

    def receiver_of(self, task: TaskId) -> Receiver | None:
        """Return the receiver of a task."""
        call = self._calls.get(task)
        return None if call is None else call.receiver

    def worker(self, identity: int) -> LiveWorker | None:
        """The live worker of that id."""
        return self.workers.get(identity)

    def task_of(self, worker: int) -> int:
        """The task that a worker runs, 0 for none."""
        record = self.scheduler.workers.get(WorkerId(worker))
        return 0 if record is None or record.task is None else record.task.id

    def delay(self, worker: LiveWorker, task: int, delay: Delay) -> None:
        """Delay the outcome of a task or a call."""
        if worker.actor is not None:
            worker.actor.delay(task, delay)
            return
        tasks = [TaskId(task)]
        if task == EACH:
            record = self.scheduler.workers.get(WorkerId(worker.id))
            has = () if record is None else (record.task, *record.queue)
            tasks = [one.id for one in has if one is not None]
        for call in self._calls.some(tasks):
            if call is None or call.worker != worker.id:
                continue
            if call.receiver is not None:
                call.receiver = delay(call.receiver)

    def name_of(self, task: int) -> str:
        """Return the name of a task, "" if it has ended."""
        call = self._calls.get(TaskId(task))
        return call.func.spec.name if call is not None else ""

    def on_gone(self, worker: int, death: Death) -> None:
        """A worker has ended, and all that it had said was taken in."""
        if self.is_busy:
            self._loop.call_soon(self.on_gone, worker, death)
            return
        tell_callers = self.actors.on_gone(worker, death)
        gone, sites = WorkerId(worker), self._sites
        self.results.deaths[gone] = death
        began = self._sent_as(gone, death.begun)
        settles = self._settles(gone, death.pid)
        outage = death.reason if death.known in (CROWDED, UNAVAILABLE) else ""
        is_crowded = death.known == CROWDED
        end = (began, settles, is_crowded, outage)
        call = None if began is None else self._calls.get(began)
        since = sites[worker].began
        self.feed(Scheduler.worker_gone, gone, *end)
        if call is not None and began is not None:
            self.feed(self.results.note_attempt, began, call, DIED, since)
        sites.pop(worker, None)
        del self.results.deaths[gone]
        self.guard.forget(worker)
        if tell_callers is not None:
            tell_callers()

    def _settles(self, worker: WorkerId, pid: int) -> bool:
        """Return whether it is still to be seen that a worker has left its devices."""
        record = self.scheduler.workers.get(worker)
        lease = None if record is None else record.lease
        if self.devices is None:
            return False
        # A worker without a process id never existed, so it has nothing on a device.
        if lease is None or not pid or self.scheduler.is_closing:
            self.devices.release.forget(worker)
            return False
        return self.devices.release.end(worker, lease, (pid,))

    def on_fault(self, worker: LiveWorker, message: Message, error: Exception) -> None:
        """A message was not taken in, for no fault of the worker's."""
        self.faults.on_message(worker, message, error)

    def on_outdated(self, environment: Environment) -> None:
        """The zygote of an environment was replaced; its idle workers are outdated."""
        self.feed(Scheduler.environment_outdated, environment)

    # What workers are sent: tasks, and what takes them back

    def _assign(self, effect: effects.Assign) -> None:
        call = self._calls[effect.task]
        self._last_number += 1
        # What another worker has said is void.
        call.worker, call.number, call.answer = effect.worker, self._last_number, None
        if self.guard.timer is None:
            self.guard.wake()
        if effect.lease.request is not call.func.spec.shape.request:
            call.func = call.func.holding(effect.lease.request)
        bind = None
        if effect.is_first:
            worker = self.workers.get(effect.worker)
            pid = 0 if worker is None else worker.pid
            self.results.history.occupy(effect.worker, pid, effect.lease)
            bind = self._assignment.bind(effect.lease, call.func.environ)
            if self.devices is not None:
                self.devices.release.begin(effect.worker, effect.lease)
        self._sites[effect.worker].began = self.scheduler.now
        if call.func.actor is not None:
            creation = self.actors.creation(
                self.workers[effect.worker], effect.task, call
            )
            self._commands.create(effect.worker, call, bind, creation)
            return
        if effect.worker in self.actors.workers:
            self.actors.release_worker(effect.worker)
        self._commands.assign(effect.worker, effect.task, call, bind, effect.is_last)

    def on_created(self, task: TaskId) -> None:
        """An actor's constructor has returned: see whether it may be called again."""
        record, call = self.scheduler.tasks.get(task), self._calls.get(task)
        if call is None or type(call.payload) is not Payload:
            return
        if record is None or not record.retries_left:
            call.payload.let_go_of_actors()

    def _send_ahead(self, effect: effects.Ahead) -> None:
        tasks = effect.tasks
        calls = self._calls.some(tasks)
        number = self._last_number
        self._last_number += len(tasks)
        self._commands.send_ahead(effect.worker, tasks, calls, number)

    def _send_alone(self, worker: WorkerId, task: TaskId) -> None:
        """Send one task ahead, where several could not be sent together."""
        self._send_ahead(effects.Ahead(worker, [task]))

    def revoke(self, effect: effects.Revoke) -> None:
        """Keep a worker from beginning more of what it was sent."""
        worker = effect.worker
        # It cannot have begun work that has not reached it, so it is left alone.
        is_left_alone = self._is_large_or_late(worker)
        if not is_left_alone:
            self._commands.revoke(worker, self._last_number + 1)
        tell = partial(self._on_revoked, worker, effect.number, is_left_alone)
        self._loop.call_later(SETTLES, tell)

    def _is_large_or_late(self, worker: WorkerId) -> bool:
        """Return whether a worker may still be receiving the one task it was sent."""
        record = self.scheduler.workers.get(worker)
        if record is None or record.task is None or record.queue:
            return False
        is_large = len(self._calls[record.task.id].payload) >= LARGE
        return is_large or not self._commands.is_reached(worker)

    def _on_revoked(self, worker: WorkerId, number: int, is_left_alone: bool) -> None:
        """Tell the core which task a worker had begun before the revocation."""
        began = self._sent_as(worker, self._commands.begun(worker))
        record = self.scheduler.workers.get(worker)
        if is_left_alone and record is not None and record.task is not None:
            began = record.task.id
        self.feed(Scheduler.revoked, worker, number, began)

    def _sent_as(self, worker: WorkerId, number: int) -> TaskId | None:
        """Return the task that a worker was sent under a number, if it still has it."""
        record = self.scheduler.workers.get(worker)
        if record is None or record.task is None:
            return None
        for sent in (record.task, *record.queue):
            call = self._calls[sent.id]
            # The calls of an actor have higher numbers than the actor itself.
            is_begun_actor = call.func.actor is not None and number > call.number
            if call.number == number or is_begun_actor:
                return sent.id
        return None

    def _interrupt(self, effect: effects.Interrupt) -> None:
        func, task = self._calls[effect.task].func, int(effect.task)
        if func.actor is not None and self.scheduler.is_closing:
            task = self.actors.call_off(effect.worker, effect.attempt) or task
        self._commands.interrupt(effect.worker, task, effect.attempt, func.is_coroutine)

    # What workers say of the ends of tasks

    def on_done(self, worker: int, answers: Sequence[Done]) -> None:
        """A worker has ended some tasks, one after the other."""
        start, last = 0, len(answers) - 1
        while start <= last:
            if start < last:
                start += self._end_row(worker, answers[start:])
            if start <= last:
                self.on_answer(worker, answers[start])
                start += 1

    def _end_row(self, worker: int, answers: Sequence[Done]) -> int:
        """End as many tasks as can be ended together; gives how many."""
        tasks = [TaskId(answer.task) for answer in answers]
        calls: list[Call] = []
        ended: list[tuple[TaskId, float]] = []
        found = self._calls.some(tasks)
        for task, call, answer in zip(tasks, found, answers, strict=True):
            if call is None or call.worker != worker:
                break
            if type(answer.payload) is not bytes:
                break
            calls.append(call)
            ended.append((task, answer.took * 1e-6))
        if self.is_busy:
            return 0
        now, who = self._loop.time(), WorkerId(worker)
        self.is_busy = True
        records: list[TaskRecord] = []
        try:
            records = self.scheduler.finish_many(now, who, ended)
        except Exception as error:  # noqa: BLE001 - one of them harms no other
            for task, _ in ended:
                self.faults.on_event(Scheduler.finish, (task, who), error)
        if records:
            took = [answer.took for answer in answers[: len(records)]]
            self.results.history.add_row(worker, records, took, now)
        wanted = self.scheduler.effects
        if wanted or self.events:
            # What the worker is to do next goes first: others only hear of it.
            self.carry_out(wanted)
        self.is_busy = False
        if not records:
            return 0
        self._tell(calls[: len(records)], answers)
        self._calls.pop_some(tasks[: len(records)])
        return len(records)

    def _tell(self, calls: Sequence[Call], answers: Sequence[Done]) -> None:
        receivers = [call.receiver for call in calls]
        payloads = [answer.payload for answer in answers[: len(calls)]]
        if pass_on_all(receivers, payloads):
            return
        # Each by itself: what one makes of it is no other's business.
        for call, answer in zip(calls, answers, strict=False):
            if call.receiver is not None:
                try:  # as `settle` does, without its calls
                    call.receiver.settle(answer.payload)
                except Exception as error:  # noqa: BLE001 - it is told to who waits
                    tell_fault(call.receiver, error)

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """A worker has ended a task."""
        task = TaskId(answer.task)
        call = self._calls.young.get(task) or self._calls.get(task)
        if call is None or call.worker != worker:
            if type(answer) is Failed and answer.is_spoilt:
                self.feed(Scheduler.worker_spoilt, WorkerId(worker))
            return
        call.answer = answer
        took = 0.0
        if type(answer) is Done:
            if type(answer.payload) is not bytes:
                # Tasks to which the result has handles outlive the task that ends now.
                for one in unfinished_in(answer.payload):
                    self.feed(Scheduler.detach, TaskId(one))
            took = answer.took * 1e-6
        elif type(answer) is Failed:
            if answer.is_spoilt:
                self.feed(Scheduler.worker_spoilt, WorkerId(worker))
            retry, ran_out = answer.is_retried, answer.peak >= 0
            if ran_out:
                self.shortages.replace(call, answer)
            if retry or ran_out:
                began = self._sites[worker].began
                end = (task, WorkerId(worker), retry, took, ran_out)
                self.feed(Scheduler.finish, *end)
                self.feed(self.results.note_attempt, task, call, RETRIED, began)
                return
        if self.is_busy:
            self.feed(Scheduler.finish, task, WorkerId(worker), False, took)
            return
        now, finish = self._loop.time(), self.scheduler.finish
        self.is_busy = True
        wanted: Sequence[Effect] = NOTHING
        try:
            wanted = finish(now, task, WorkerId(worker), False, took)
        except Exception as error:  # noqa: BLE001 - one of them harms no other
            args = (task, WorkerId(worker), False, took)
            self.faults.on_event(Scheduler.finish, args, error)
        self.carry_out(wanted)

    def on_skipped(self, worker: int, skipped: Skipped) -> None:
        """A worker was sent a task that was taken back as it came up."""
        call = self._calls.get(TaskId(skipped.task))
        if call is not None and call.number == skipped.number:
            self.feed(Scheduler.task_skipped, TaskId(skipped.task), WorkerId(worker))

    def on_began(self, worker: LiveWorker, began: Began) -> None:
        """The code of a task or call has begun whose run is timed."""
        task, when = TaskId(began.task), began.when * 1e-6
        if worker.actor is not None:
            self.actors.on_began(worker.actor, began.task, when)
            return
        self.feed(Scheduler.began, task, WorkerId(worker.id), when)
