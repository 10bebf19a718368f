"""The one place where decisions meet I/O: events to the core, effects to the pool.

The driver keeps the data that the core must not see: the payload, receiver and answer
of each task. It finishes one event before it handles the next. An event that arrives
while effects are carried out is queued, so the stack stays flat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

from aiogpu.client.function_spec import Function, FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core import effects
from aiogpu.core.effects import NOTHING, Effect
from aiogpu.core.model.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.model.request import Environment
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.scheduler.scheduler import Feed, Scheduler, Step
from aiogpu.errors import NodeClosedError
from aiogpu.runtime.actors.actor import Check
from aiogpu.runtime.actors.registry import Actors
from aiogpu.runtime.callers.caller import pass_on_all
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.devices.memory_guard import Shortages
from aiogpu.runtime.history import DIED, RETRIED
from aiogpu.runtime.memory_monitor import MemoryGuard
from aiogpu.runtime.objects.values import await_arguments, is_complete, unfinished_in
from aiogpu.runtime.pending_tasks import EACH, Call, Delay, settle_with_fault
from aiogpu.runtime.results import LogFailure, ResultDelivery, WarnOwner
from aiogpu.runtime.workers.commands import SETTLES
from aiogpu.runtime.workers.death import CROWDED, UNAVAILABLE, Death
from aiogpu.runtime.workers.message_router import InlinePoller, NestedRequests
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.payload import Payload
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import Began, Done, Failed, Halted, Skipped

if TYPE_CHECKING:
    from aiogpu.core.queue.ready import Bucket
    from aiogpu.core.records import TaskRecord
    from aiogpu.observe.status import UnendedStatus
    from aiogpu.runtime.callers.leases import Leases
    from aiogpu.runtime.devices.monitor import DeviceMonitor
    from aiogpu.runtime.devices.probe_thread import Key
    from aiogpu.runtime.internal_faults import Faults
    from aiogpu.runtime.objects.values import Value
    from aiogpu.wire.messages import Message

    Lessees = Callable[[Key], Mapping[int, int]]
    """Returns the programs that lease a device: process id to holder id."""

    DeviceFactory = Callable[[Feed, Lessees], DeviceMonitor]
    """Starts to monitor a node's devices and to report to the core."""


class SubmitBatch:
    """Consecutive calls of one function that are submitted to the core together.

    A batch is used while tasks of the function already wait. None of its calls can
    start, so the core has nothing to decide, and a submission costs half as much.

    Attributes:
        func: the function that is called; None if the next call is submitted alone.
        calls: calls that the core does not know yet.
    """

    __slots__ = ("_before", "_bucket", "_loop", "_submit", "calls", "func")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        submit: Callable[[FunctionSpec, list[Call]], object],
    ) -> None:
        """Make an empty batch.

        Args:
            loop: the event loop; a batch is submitted at the end of the loop's turn.
            submit: submits calls of one function to the core.
        """
        self.func: FunctionSpec | None = None
        self.calls: list[Call] = []
        self._before = 0
        self._bucket: Bucket
        self._loop = loop
        self._submit = submit

    def __repr__(self) -> str:
        return f"<SubmitBatch of {len(self.calls)}>"

    def begin(self, func: FunctionSpec, bucket: Bucket | None, before: int) -> None:
        """Collect the next calls of a function, if its calls are plain tasks.

        Args:
            func: the function.
            bucket: the queue of its tasks. Later tasks must wait until it is empty.
            before: the id of the last task that was submitted.
        """
        spec = func.spec
        is_plain = not (func.actor or spec.is_lease or spec.is_grouped)
        if bucket is not None and is_plain and spec.timeout is None:
            self._bucket, self._before = bucket, before
            # Last: an exception of a signal handler may come between two steps.
            self.func = func

    def add(self, payload: bytes, receiver: Receiver) -> int:
        """Add a call; return its id, or 0 if it must be submitted alone."""
        func, calls = self.func, self.calls
        if func is None or not self._bucket.size:
            return 0
        if not calls:
            self._loop.call_soon(self.end)
        calls.append(Call(func, payload, receiver))
        return self._before + len(calls)

    def end(self) -> None:
        """Submit the batch; the next call is submitted alone."""
        func, self.func = self.func, None
        if func is not None and self.calls:
            calls, self.calls = self.calls, []
            self._submit(func, calls)


_log: Final = logging.getLogger(__name__)


P = ParamSpec("P")


def broken_off(error: BaseException) -> NodeClosedError:
    """Return the error of a call to a node that an exception has cut short."""
    closed = NodeClosedError(
        f"this node has ended: {type(error).__name__} was raised in the middle of its "
        f"own code, as by the handler of a signal. Close it by aiogpu.shutdown(), and "
        f"open another by aiogpu.init(). A handler of signals should set a flag, not "
        f"raise."
    )
    closed.__cause__ = error
    return closed


class Driver:
    """Runs one node's tasks on one event loop.

    Attributes:
        is_busy: True while the core decides or effects are carried out. `feed` queues
            the events that arrive meanwhile.
        events: the queued events.
        workers: live workers by id.
        pool: starts and ends workers.
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
        """Make the driver and the parts that it owns.

        Args:
            loop: the event loop of the node.
            scheduler: makes the decisions.
            assignment: builds the `Bind` that tells a worker its devices.
            check: raises if a call can never be served.
            make_pool: makes the pool of workers, which reports to this driver.
            nested: makes the handler of tasks' requests, on the first request; None
                if tasks cannot send requests.
            warn_owner: sends a warning about a task to the program that owns the
                task; None if no program can join.
            log_failure: writes failures of other programs' tasks to the log; None if
                no program can join.
            watch: starts to monitor the node's devices; None if there are none.
        """
        self.scheduler = scheduler
        self.devices = None if watch is None else watch(self.feed, self._lessees)
        gpu_guard = None if self.devices is None else self.devices.guard
        peak_seen = None if gpu_guard is None else gpu_guard.peak_of
        self.shortages = Shortages(scheduler, peak_seen)
        self.is_busy = False
        self._broken: BaseException | None = None
        self.events: Final[deque[tuple[Step, Any, Any]]] = deque()
        self._loop = loop
        self.workers: dict[int, LiveWorker] = {}
        self.row = SubmitBatch(loop, self._submit_each)
        self.burst = InlinePoller(self.workers, self.row.end)
        self.pool = make_pool(self)
        self._commands = self.pool.commands
        self.guard = MemoryGuard(loop, scheduler, self.workers, self.feed)
        self._calls: ShardedDict[Call] = ShardedDict()
        self.results = ResultDelivery(
            scheduler,
            self._calls,
            self.guard,
            gpu_guard,
            warn_owner,
            log_failure,
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
        # Kept because uvloop's handles do not say when they are due.
        self._timer: asyncio.Handle | None = None
        self._timer_at: float | None = None
        self._closed = loop.create_future()
        # Attributes, not methods: this saves a call per message.
        self.on_items = self.results.on_items
        self.on_report = self.results.on_report
        self.on_acting = self.actors.on_message
        self._nested = nested
        self.handlers: Final = self._effect_handlers()

    def _effect_handlers(self) -> dict[type[Effect], Callable[..., None]]:
        return {
            # Bound methods would load the leases now.
            effects.Granted: lambda effect: self.leases.grant(effect),  # noqa: PLW0108
            effects.Reclaim: lambda effect: self.leases.reclaim(effect),  # noqa: PLW0108
            effects.Spawn: self._spawn,
            effects.Assign: self._assign,
            effects.Ahead: self._send_ahead,
            effects.Revoke: self.revoke,
            effects.Interrupt: self._interrupt,
            effects.Announce: lambda effect: self._commands.announce(
                effect.worker, effect.task
            ),
            effects.Unclaim: lambda effect: self.pool.unclaim(effect.worker),
            effects.Retire: lambda effect: self.pool.retire(effect.worker),
            effects.Kill: lambda effect: self.pool.kill(effect.worker),
            effects.Settle: self.results.settle,
            effects.Fail: self.results.fail,
            effects.Warn: self.results.warn,
            effects.Evict: lambda effect: self.actors.evict(effect.task),
            effects.Evicted: self._on_evicted,
            effects.Forget: self._forget,
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

    def expect_imports(self, function: Function) -> None:
        """Prefer workers that have a function's modules, if it needs any."""
        if function.modules:
            self.on_slow_import()

    def on_slow_import(self) -> None:
        """Prefer workers that need not import what a new worker has already."""
        self.scheduler.is_outdone = self._is_outdone

    def _is_outdone(self, worker: WorkerId, task: TaskId) -> bool:
        live, call = self.workers.get(worker), self._calls.get(task)
        if live is None or call is None:
            return False
        return self.pool.is_outdone(live, call.func.function)

    def _forget(self, effect: effects.Forget) -> None:
        self.results.forget(effect)
        if self._leases is not None:
            self._leases.forget(effect.task)

    @cached_property
    def faults(self) -> Faults:
        """The handler of internal faults; loaded with the first fault."""
        from aiogpu.runtime.internal_faults import Faults

        return Faults(self._calls, self.pool, self._send_alone, self.feed)

    def _lessees(self, key: Key) -> Mapping[int, int]:
        return {} if self._leases is None else self._leases.roots_of(key)

    @property
    def holders(self) -> Mapping[int, int]:
        """Process ids of the programs with leases or placements, by holder."""
        return {} if self._leases is None else self._leases.pids

    @property
    def unended(self) -> dict[int, UnendedStatus]:
        """The processes that have not ended with their worker or lease, by its id."""
        leases = {} if self._leases is None else self._leases.unended
        return {**self.pool.unended, **leases}

    def __repr__(self) -> str:
        return f"<Driver {len(self._calls)} calls, {self.pool!r}>"

    @property
    def last_task(self) -> int:
        """The number of the task that was submitted last."""
        self.row.end()
        return self._last_task

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: TaskId | None = None,
        client: ClientId = OWN,
    ) -> int:
        """Start a task and return its id; raises as `Scheduler.admit` does."""
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
            # The garbage collector can run code that submits, at any point.
            if self._broken is not None:
                del self._calls[task]
                raise broken_off(self._broken)
            args = (task, func.spec, parent, needs, client)
            self.events.append((Scheduler.submit, args, {}))
        else:
            try:
                try:
                    self.is_busy = True
                    wanted = submit(now, task, func.spec, parent, needs, client)
                except Exception:
                    self.is_busy = False
                    del self._calls[task]
                    raise
                self.carry_out(wanted)
            except BaseException as error:
                if self.is_busy:
                    self.on_cut_short(error)
                raise
        if needs is not None:
            assert isinstance(payload, Payload), payload
            await_arguments(payload, partial(self._on_arguments, task))
        elif wanted is NOTHING and parent is None and self.scheduler.clients is None:
            spec, by_shape = func.spec, self.scheduler.ready.by_shape
            bucket = by_shape.get((client, spec.shape), {}).get(spec.lane)
            self.row.begin(func, bucket, self._last_task)
        return task

    def _on_arguments(self, task: TaskId, failed: Value | None) -> None:
        """Handle that a task's arguments are complete, or that one has failed."""
        if failed is None:
            self.feed(Scheduler.supply, task)
            return
        call = self.call_of(task)
        if call is not None and call.receiver is not None:
            receiver, call.receiver = call.receiver, None
            failed.pass_to(receiver)
            self.feed(Scheduler.cancel, task)

    def accepts_row(self, func: FunctionSpec, client: ClientId) -> bool:
        """Return True if `submit_row` would take calls of a function now."""
        if func.actor is not None or func.spec.is_lease or self.is_busy:
            return False
        return self.scheduler.accepts_many(func.spec, client)

    def submit_row(
        self, func: FunctionSpec, calls: list[Call], client: ClientId
    ) -> range:
        """Submit tasks that must queue behind others of their kind; return their ids.

        An empty range means that the caller must submit each task alone.
        """
        self.row.end()
        if self.is_busy:
            return range(0)
        first, count, now = TaskId(self._last_task + 1), len(calls), self._loop.time()
        try:
            if not self.scheduler.submit_many(now, first, count, func.spec, client):
                return range(0)
            self._last_task += count
            self._calls.extend(first, calls)
        except BaseException as error:
            self.on_cut_short(error)
            raise
        return range(first, first + count)

    def _submit_each(self, func: FunctionSpec, calls: list[Call]) -> None:
        """Submit a batch, or each task alone if no task of this kind waits."""
        try:
            if not self.submit_row(func, calls, OWN):
                for call in calls:
                    assert call.receiver is not None, call
                    self.submit(func, call.payload, call.receiver)
        except BaseException as error:
            if self._broken is not None or not isinstance(error, Exception):
                self.row.calls = calls  # they fail with the node
                self.on_cut_short(error)
            raise

    def call_of(self, task: TaskId) -> Call | None:
        """Return the call of a task that has not ended."""
        self.row.end()
        return self._calls.get(task)

    def knows(self, task: int) -> bool:
        """Return True if the task has not ended."""
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
        """Disable this driver in a fork of its process."""
        self.is_busy = True

    def feed(
        self,
        step: Callable[Concatenate[Scheduler, float, P], Sequence[Effect]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Pass an event to the core and carry out the effects.

        During another event, the new event is queued.

        Args:
            step: a method of `Scheduler`.
            *args: its arguments after the time.
            **kwargs: its keyword arguments.
        """
        if self.is_busy:
            self.events.append((step, args, kwargs))
            return
        if self.row.calls:
            self.row.end()
        wanted: Sequence[Effect] = NOTHING
        try:
            try:
                self.is_busy = True
                wanted = step(self.scheduler, self._loop.time(), *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see `Faults`
                self.faults.on_event(step, args, error)
            self.carry_out(wanted)
        except BaseException as error:
            self.on_cut_short(error)
            raise

    def on_cut_short(self, error: BaseException) -> None:
        """Give up a node of which an event was cut short.

        The handler of a signal may raise between any two bytecodes; `MemoryError` and
        `RecursionError` may come anywhere. The core may have decided what was not
        carried out, so the node takes no more events, and all its calls fail: an error
        is better than a call that never ends. `DeferredInterrupts` keeps Ctrl-C out.
        """
        if self._broken is None:
            self._broken, self.row.func = error, None
            _log.error("! the node has ended", exc_info=error)
            # Later: this code may run deep in a stack that has just overflown.
            self._loop.call_soon(self.actors.slices.add, self._fail_all())
        self.is_busy = True

    def _fail_all(self) -> Iterator[None]:
        """Fail all tasks, calls and leases of a broken node, one a step."""
        assert self._broken is not None, self
        self.events.clear()
        calls, self.row.calls = self.row.calls, []
        for actor in self.actors.all():
            actor.die(broken_off(self._broken))
            yield
        for piece in chain([calls], self._calls.pieces()):
            for call in piece:
                call.fail(broken_off(self._broken))
                yield
        if not self._closed.done():
            self._closed.set_result(None)

    def carry_out(self, wanted: Sequence[Effect]) -> None:
        """Carry out effects; then pass the events queued by them to the core.

        The caller must set `is_busy` before it asks the core, and pass an exception of
        this method to `on_cut_short`. This method clears `is_busy`.
        """
        events, handlers = self.events, self.handlers
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
        """Tell the tasks of a program that it stops; None for all of the node."""
        if client is None:
            self._commands.announce_stop()
        self.feed(Scheduler.announce_stop, client)

    async def close(
        self, timeout: float, on_wait: Callable[[float], object] | None = None
    ) -> None:
        """Stop everything; return when the last worker is gone, or on timeout.

        The timeout is reached when no task has ended for `timeout` seconds, plus the
        longest grace of a running task. Progress extends it, because notifying the
        owners of a million tasks takes half a minute.

        Args:
            timeout: the seconds without progress.
            on_wait: called with the seconds of each wait for progress, as it begins.
        """
        self.guard.close()
        self.announce_stop()
        self.feed(Scheduler.close)
        if self._leases is not None:
            self._leases.close()
        # Only tasks that have a worker: a million may wait.
        graces = (
            (record.spec.cancel_grace or 0.0) + record.spec.stop_grace
            for worker in self.scheduler.workers
            for record in (worker.task, *worker.queue)
            if record is not None
        )
        timeout += max(graces, default=0.0)
        count = None
        while count != (count := len(self._calls)) and not self._closed.done():
            if on_wait is not None:
                on_wait(timeout)
            await asyncio.wait([self._closed], timeout=timeout)
        await self.actors.slices.finish()
        if self._timer is not None:
            self._timer.cancel()

    # Events of workers: see `WorkerEvents`

    def on_started(self, worker: int) -> None:
        """Handle that a worker has connected."""
        self.feed(Scheduler.worker_started, WorkerId(worker))

    def wait(
        self,
        task: TaskId,
        children: tuple[TaskId, ...],
        is_elsewhere: bool = False,
        is_more: bool = False,
    ) -> None:
        """Note for which children a task waits, and if it waits for an actor.

        `is_more`: it waits for these as well as for those noted before.
        """
        self.feed(Scheduler.wait_for, task, children, is_elsewhere, is_more)

    def demand(self, task: int, limit: int) -> None:
        """Let a task yield `limit` items in total, over all its attempts."""
        call = self._calls.get(TaskId(task))
        if call is not None:
            call.limit = limit
            self._commands.demand(call.worker, task, limit)

    def receiver_of(self, task: TaskId) -> Receiver | None:
        """Return the receiver of a task."""
        call = self._calls.get(task)
        return None if call is None else call.receiver

    def worker(self, identity: int) -> LiveWorker | None:
        """Return the live worker with this id."""
        return self.workers.get(identity)

    def task_of(self, worker: int) -> int:
        """Return the task that a worker runs, 0 for none."""
        record = self.scheduler.workers.get(WorkerId(worker))
        return 0 if record is None or record.task is None else record.task.id

    def delay(self, worker: LiveWorker, task: int, delay: Delay) -> None:
        """Delay the outcome of a task or a call of an actor."""
        if worker.actor is not None:
            worker.actor.delay(task, delay)
            return
        tasks = [TaskId(task)]
        if task == EACH:
            record = self.scheduler.workers.get(WorkerId(worker.id))
            sent = () if record is None else (record.task, *record.queue)
            tasks = [task.id for task in sent if task is not None]
        for call in self._calls.some(tasks):
            if call is None or call.worker != worker.id:
                continue
            if call.receiver is not None:
                call.receiver = delay(call.receiver)

    def name_of(self, task: int) -> str:
        """Return the name of a task, or "" if it has ended."""
        call = self._calls.get(TaskId(task))
        return call.func.spec.name if call is not None else ""

    def on_gone(self, worker: int, death: Death, is_left: bool = False) -> None:
        """Handle that a worker has ended; its messages were all handled before.

        `is_left`: it was killed, but has processes that have not ended (`on_ended`).
        """
        if self.is_busy:
            self._loop.call_soon(self.on_gone, worker, death, is_left)
            return
        tell_callers = self.actors.on_gone(worker, death)
        gone, sites = WorkerId(worker), self._sites
        self.results.deaths[gone] = death
        began = self._sent_as(gone, death.begun)
        settles = not is_left and self._settles(gone, death.pid)
        outage = death.reason if death.known in (CROWDED, UNAVAILABLE) else ""
        is_crowded = death.known == CROWDED
        end = (began, settles, is_crowded, outage, is_left)
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

    def on_ended(self, worker: int, pid: int) -> None:
        """Handle that the processes of a worker that was gone before have ended."""
        if self.is_busy:
            self._loop.call_soon(self.on_ended, worker, pid)
            return
        gone = WorkerId(worker)
        self.feed(Scheduler.worker_ended, gone, self._settles(gone, pid))

    def _settles(self, worker: WorkerId, pid: int) -> bool:
        """Return True if the core must wait until the worker's devices are released."""
        record = self.scheduler.workers.get(worker)
        lease = None if record is None else record.lease
        if self.devices is None:
            return False
        # A worker without a process id never existed, so it holds no device memory.
        if lease is None or not pid or self.scheduler.is_closing:
            self.devices.release.forget(worker)
            return False
        return self.devices.release.end(worker, lease, (pid,))

    def on_fault(self, worker: LiveWorker, message: Message, error: Exception) -> None:
        """Handle an internal error that a worker's message has raised."""
        self.faults.on_message(worker, message, error)

    def on_outdated(self, environment: Environment) -> None:
        """Handle that an environment's zygote was replaced: idle workers are stale."""
        self.feed(Scheduler.environment_outdated, environment)

    # Effects on workers: send tasks, take them back, interrupt them

    def _spawn(self, effect: effects.Spawn) -> None:
        call = None if effect.task is None else self._calls.get(effect.task)
        function = None if call is None else call.func.function
        self.pool.spawn(effect.worker, effect.environment, function)

    def _assign(self, effect: effects.Assign) -> None:
        call = self._calls[effect.task]
        self._last_number += 1
        # An answer from an earlier worker no longer counts.
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

    def _on_evicted(self, effect: effects.Evicted) -> None:
        call = self._calls[effect.task]
        answer, call.answer = call.answer, None
        self.actors.on_evicted(effect.task, answer)

    def on_created(self, task: TaskId) -> None:
        """Release the constructor's handles to actors if it can never run again."""
        record, call = self.scheduler.tasks.get(task), self._calls.get(task)
        if call is None or type(call.payload) is not Payload:
            return
        terms = call.func.actor
        may_return = terms is not None and terms.evict_after is not None
        if record is None or not (record.retries_left or may_return):
            call.payload.release_actors()

    def _send_ahead(self, effect: effects.Ahead) -> None:
        tasks = effect.tasks
        calls = self._calls.some(tasks)
        number = self._last_number
        self._last_number += len(tasks)
        self._commands.send_ahead(effect.worker, tasks, calls, number)

    def _send_alone(self, worker: WorkerId, task: TaskId) -> None:
        """Send one task ahead, after several could not be sent together."""
        self._send_ahead(effects.Ahead(worker, [task]))

    def revoke(self, effect: effects.Revoke) -> None:
        """Keep a worker from beginning more of the tasks that it was sent."""
        worker = effect.worker
        # The worker has not begun a task that it is still receiving. It keeps the task.
        is_receiving = self._may_be_receiving(worker)
        if not is_receiving:
            self._commands.revoke(worker, self._last_number + 1)
        note = partial(self._on_revoked, worker, effect.number, is_receiving)
        self._loop.call_later(SETTLES, note)

    def _may_be_receiving(self, worker: WorkerId) -> bool:
        """Return True if a worker may still be receiving the only task it was sent."""
        record = self.scheduler.workers.get(worker)
        if record is None or record.task is None or record.queue:
            return False
        is_large = len(self._calls[record.task.id].payload) >= LARGE
        return is_large or not self._commands.is_reached(worker)

    def _on_revoked(self, worker: WorkerId, number: int, is_receiving: bool) -> None:
        """Tell the core which task a worker had begun before the revocation."""
        began = self._sent_as(worker, self._commands.begun(worker))
        record = self.scheduler.workers.get(worker)
        if is_receiving and record is not None and record.task is not None:
            began = record.task.id
        self.feed(Scheduler.revoked, worker, number, began)

    def _sent_as(self, worker: WorkerId, number: int) -> TaskId | None:
        """Return the task that the worker has under this number; None for none."""
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

    # Answers of workers

    def on_done(self, worker: int, answers: Sequence[Done]) -> None:
        """Handle a worker's answers to several tasks, in order."""
        start, last = 0, len(answers) - 1
        while start < last:
            start += self._end_row(worker, answers[start:])
            if start <= last:
                self.on_answer(worker, answers[start])
                start += 1
        if start == last:
            self.on_answer(worker, answers[last])

    def _end_row(self, worker: int, answers: Sequence[Done]) -> int:
        """End as many tasks as can be ended together; return their number."""
        tasks = [TaskId(answer.task) for answer in answers]
        calls: list[Call] = []
        ended: list[tuple[TaskId, float]] = []
        kept = self._calls.some(tasks)
        for task, call, answer in zip(tasks, kept, answers, strict=True):
            if call is None or call.worker != worker:
                break
            if type(answer.payload) is not bytes:
                break
            calls.append(call)
            ended.append((task, answer.took * 1e-6))
        if self.is_busy:
            return 0
        now, worker_id = self._loop.time(), WorkerId(worker)
        records: list[TaskRecord] = []
        try:
            try:
                self.is_busy = True
                records = self.scheduler.finish_many(now, worker_id, ended)
            except Exception as error:  # noqa: BLE001 - see `Faults`
                for task, _ in ended:
                    self.faults.on_event(Scheduler.finish, (task, worker_id), error)
            if records:
                took = [answer.took for answer in answers[: len(records)]]
                self.results.history.add_row(worker, records, took, now)
            wanted = self.scheduler.effects
            if wanted or self.events:
                # Send the worker its next tasks before the results are delivered.
                self.carry_out(wanted)
            self.is_busy = False
            if not records:
                return 0
            self._settle_all(calls[: len(records)], answers)
            self._calls.pop_some(tasks[: len(records)])
        except BaseException as error:
            self.on_cut_short(error)
            raise
        return len(records)

    def _settle_all(self, calls: Sequence[Call], answers: Sequence[Done]) -> None:
        receivers = [call.receiver for call in calls]
        payloads = [answer.payload for answer in answers[: len(calls)]]
        if pass_on_all(receivers, payloads):
            return
        # One receiver's error must not affect the others.
        for call, answer in zip(calls, answers, strict=False):
            if call.receiver is not None:
                try:  # the body of `settle`, inlined to save its calls
                    call.receiver.settle(answer.payload)
                except Exception as error:  # noqa: BLE001 - passed to the receiver
                    settle_with_fault(call.receiver, error)

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """Handle a worker's answer to one task."""
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
                # Tasks whose handles are in the result outlive the task that ends now.
                for child in unfinished_in(answer.payload):
                    self.feed(Scheduler.detach, TaskId(child))
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
        wanted: Sequence[Effect] = NOTHING
        try:
            try:
                self.is_busy = True
                wanted = finish(now, task, WorkerId(worker), False, took)
            except Exception as error:  # noqa: BLE001 - see `Faults`
                args = (task, WorkerId(worker), False, took)
                self.faults.on_event(Scheduler.finish, args, error)
            self.carry_out(wanted)
        except BaseException as error:
            self.on_cut_short(error)
            raise

    def on_skipped(self, worker: int, skipped: Skipped) -> None:
        """Handle that a worker has skipped a task that was taken back."""
        call = self._calls.get(TaskId(skipped.task))
        if call is not None and call.number == skipped.number:
            self.feed(Scheduler.task_skipped, TaskId(skipped.task), WorkerId(worker))

    def on_began(self, worker: LiveWorker, began: Began) -> None:
        """Handle that the code of a task or call with a `run_timeout` has begun."""
        task, when = TaskId(began.task), began.when * 1e-6
        if worker.actor is not None:
            self.actors.on_began(worker.actor, began.task, when)
            return
        self.feed(Scheduler.task_began, task, WorkerId(worker.id), when)

    def on_halted(self, worker: LiveWorker, halted: Halted) -> None:
        """Handle that a task or call stands at a breakpoint, or goes on."""
        if worker.halted is None:
            worker.halted = {}
        stands = bool(halted.where)
        if stands:
            worker.halted[halted.task] = halted
        else:
            worker.halted.pop(halted.task, None)
        if worker.actor is not None:
            self.actors.on_halted(worker.actor, halted.task, stands)
            return
        self.feed(
            Scheduler.task_halted, TaskId(halted.task), WorkerId(worker.id), stands
        )
