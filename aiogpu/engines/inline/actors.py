"""Actors in the calling process.

For `runtime.actors`, an actor's object stands for its process, for one life. Plain
methods run one at a time, each as a job on top of the running code. Coroutine methods
interleave on the program's loop, up to the limits of their groups. Each step of their
code sees the actor's environment, which the program's code between two steps does not
see.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Coroutine
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from aiogpu.client.current import inline_report, method_called
from aiogpu.core.model.ids import TaskId
from aiogpu.core.records import TaskState
from aiogpu.engines.inline.jobs import (
    FrameRestorer,
    Job,
    Outcome,
    actor_job,
    id_of_caller,
    running_job,
)
from aiogpu.errors import DeadlockError, NodeClosedError, NodeError
from aiogpu.runtime.actors.actor import (
    FIRST_CALL,
    Actor,
    ActorState,
    killed_for_good,
)
from aiogpu.runtime.actors.registry import LEAVE_LIMIT, Actors
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.serialization.serializer import NONE_PAYLOAD
from aiogpu.wire.messages import (
    ASYNC,
    THREADED,
    Created,
    Demand,
    Done,
    Failed,
    Invoke,
    Leave,
    Message,
)
from aiogpu.worker.actors import Methods
from aiogpu.worker.async_actor import cancel_all, close_method
from aiogpu.worker.invoke import Callables, Constructor

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import InlineClient
    from aiogpu.engines.inline.execution import LoopRunner
    from aiogpu.engines.inline.node import InlineNode


class ConstructorJob(Job):
    """The scheduler's task for an actor: its constructor, then its life.

    Attributes:
        actor: the calls, and the receivers that wait for the actor.
        instance: the instance being made; None before the job begins.
    """

    def __init__(
        self,
        node: InlineNode,
        id_: TaskId,
        func: FunctionSpec,
        actor: Actor,
        actors: InlineActors,
    ) -> None:
        super().__init__(node, id_, func, is_urgent=True)
        self.actor = actor
        self.actor_id = id_
        self.instance: ActorInstance | None = None
        self._actors = actors

    def begin(self) -> None:
        """Begin this job, or begin it again."""
        super().begin()
        self.started = set()
        terms = self.func.actor
        is_async = terms is not None and terms.mode == ASYNC
        kind = AsyncActorInstance if is_async else ActorInstance
        self.instance = kind(self, self._actors)

    def target(self) -> tuple[Callables, Any]:
        """Return the constructor, which passes the object to the instance."""
        node, instance = self.node, self.instance
        assert instance is not None, self
        cls = node.learn(self.func)
        return Constructor(node.functions, instance.keep), cls

    def goes_on(self, outcome: Outcome) -> bool:
        """Return whether the constructor has made an actor that lives on."""
        record, instance = self.record, self.instance
        if type(outcome.answer) is Failed or record is None:
            return False
        if record.state is not TaskState.RUNNING:
            return False
        assert instance is not None, self
        instance.on_made()
        return True

    def interrupt(self) -> None:
        """Stop the constructor, or end the actor's object."""
        instance, scheduler = self.instance, self.node.scheduler
        if instance is None or instance.worker.peer is None:
            super().interrupt()
        elif scheduler.is_closing:
            instance.end_within(scheduler.config.cancel_grace)
        else:
            instance.kill()

    def fail_wait(self, reason: str) -> None:
        """Fail the waits for calls; the program may still make room for the actor."""
        self.waiters = 0
        self._actors.fail_waits(self.actor, reason)

    def abandon(self) -> None:
        """End now, and abandon code that does not stop."""
        if self.instance is not None:
            self.instance.force_close()
        super().abandon()

    def end(self) -> None:
        """End the job: its constructor has failed, or the actor is not needed."""
        if self.instance is not None:
            self.instance.release()
        super().end()


class CallJob(Job):
    """A call of an actor, unknown to the scheduler.

    Attributes:
        instance: the actor's object.
        method: name of the method.
    """

    def __init__(self, instance: ActorInstance, message: Invoke) -> None:
        creation = instance.creation
        super().__init__(creation.node, TaskId(message.call), creation.func)
        self.instance = instance
        self.method = message.method
        self.runner = creation.runner
        self.worker = instance.worker
        self.environment = creation.environment
        self.actor_id = creation.id
        self.has_devices = creation.has_devices
        self.payload = message.payload
        self.limit, self.skip = message.limit, message.skip

    @property
    def task(self) -> TaskId:
        """The scheduler's number of its actor."""
        return self.instance.creation.id

    @property
    def name(self) -> str:
        """The name in errors."""
        return f"{self.func.spec.name}.{self.method}"

    @property
    def has_ended(self) -> bool:
        """True if its code has stopped."""
        return self.is_over

    @property
    def is_blocked(self) -> bool:
        """True if its code waits for a child task or a call."""
        # For the scheduler it is not blocked: it holds no CPU that could be lent.
        waits = bool(self.calls_awaited)
        return waits or any(job.waiters for job in self.children())

    def fresh_context(self, client: InlineClient) -> Context:
        """Return a context with only this job and its method set."""
        context = super().fresh_context(client)
        context.run(method_called.set, (self.method, self.id))
        return context

    def target(self) -> tuple[Callables, Any]:
        """Return the object's methods, and the name of this one."""
        return self.instance.methods, self.method

    def stop(self) -> None:
        """Cancel the call if it awaits; abandon it after the grace period.

        Only once: a second cancel would interrupt its cleanup.
        """
        if self.main is not None and self.timer is None:
            self.interrupt()
            grace = self.node.scheduler.config.cancel_grace
            give_up = partial(self.runner.give_up, self)
            self.timer = self.runner.loop.call_later(grace, give_up, context=Context())

    def end(self) -> None:
        """Note that the code has stopped: the next call may run."""
        if self.timer is not None:
            self.timer.cancel()
        self.instance.on_call_ended(self)

    def leave(self) -> None:
        """Do nothing: a call holds no lease."""


class ActorInstance:
    """One object of an actor; stands for the connection to its process.

    This class is for actors with plain methods, which run one at a time.

    Attributes:
        creation: the job that makes it.
        worker: stands for the process.
        actor: its calls and the receivers that wait; may outlive this object.
        object: the object; None before and after its life.
        methods: the object's methods.
        is_over: the instance has completely ended.
    """

    def __init__(self, creation: ConstructorJob, actors: InlineActors) -> None:
        assert creation.worker is not None, creation
        self.creation = creation
        self.worker = creation.worker
        self.actor = creation.actor
        self.object: Any = None
        self.methods = Methods(None)
        self.is_over = False
        self._actors = actors
        self._queue: deque[Invoke] = deque()
        self._running: CallJob | None = None
        self._is_restarting = False
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<ActorInstance {self.worker.id} of {self.actor!r}>"

    @property
    def waits_for_running_code(self) -> bool:
        """True if its own code waits for the running code to return."""
        running = self._running
        return running is not None and running.main is None

    def keep(self, made: object) -> None:
        """Keep the object that the constructor has made."""
        self.object, self.methods = made, Methods(made, self._note_begun)

    def _note_begun(self) -> None:
        """Report that the code of a call with a `run_timeout` begins."""
        number = method_called.get()[1]
        self._actors.on_began(self.actor, number, time.monotonic())

    def on_made(self) -> None:
        """Note that the constructor has returned."""
        self.worker.peer = self
        self._actors.on_message(self.worker.id, Created(self.creation.id))

    # Messages of the actor to its process.

    def post(self, message: Message) -> None:
        """Queue a call."""
        if type(message) is Invoke:
            self._queue.append(message)
            self._actors.note_calls(self)
        elif type(message) is Demand:
            self.creation.node.streams.raise_limit(message.task, message.limit)

    def send(self, message: Message) -> None:
        """End in an orderly way on `Leave`."""
        if type(message) is Leave:
            self.end_within(LEAVE_LIMIT)

    def drop(self, number: int) -> None:
        """Cancel a call: remove it from the queue, or stop it."""
        running = self._running
        if running is not None and running.id == number:
            running.stop()
            return
        for message in self._queue:
            if message.call == number:
                self._queue.remove(message)
                self._answer_dropped(number)
                return

    def restart(self) -> None:
        """End like `kill`, and allow a new instance."""
        self._is_restarting = True
        self.kill()

    def kill(self) -> None:
        """End at once, or within the grace period of a cancelled task."""
        grace = self.creation.node.scheduler.config.cancel_grace
        self.end_within(grace, is_orderly=False)

    def end_within(self, _seconds: float, is_orderly: bool = True) -> None:
        """End at once, or as soon as its code has returned."""
        self._queue.clear()
        if self._running is not None:
            self._running.stop()
        self.end()

    def force_close(self) -> None:
        """End now, and abandon code that does not stop."""
        self.kill()

    # Its calls.

    def next_call(self) -> CallJob | None:
        """Return the next call; None if there is none or a call runs."""
        if self._running is not None or not self._queue:
            return None
        message = self._queue.popleft()
        self._running = call = CallJob(self, message)
        self.worker.begun = message.call
        return call

    def on_call_ended(self, call: CallJob) -> None:
        """Send the outcome of a call whose code has stopped."""
        self._running = None
        if not self._is_restarting:
            self._answer(call)  # else the call fails, or waits for the next instance
        if self._is_ending:
            self.end()
        elif self._queue:
            self._actors.note_calls(self)

    def _answer(self, call: CallJob) -> None:
        timer = self.actor.timers.get(call.id)
        if timer is not None and timer.when() <= self._actors.runner.loop.time():
            self._actors.overrun(
                self.actor, call.id
            )  # plain code could not be interrupted
        pending, outcome = self.actor.calls.get(call.id), call.outcome
        receiver = None if pending is None else pending.receiver
        if outcome is None:
            self._answer_dropped(call.id)  # cancelled before it began
            return
        answer, error = outcome.answer, outcome.error
        if call.is_cancelled and isinstance(error, asyncio.CancelledError):
            if self.actor.state is ActorState.LEAVING:
                self._answer_dropped(call.id)  # another call has ended the actor
                return
            if receiver is not None:
                # The loop is ending and has cancelled a call that is still wanted.
                receiver.settle(
                    NodeClosedError(f"the event loop of {self.actor.name} has ended.")
                )
                self.actor.cancel(call.id)  # the loop delivers no more answers
        elif pending is not None and receiver is not None and error is not None:
            pending.receiver = FrameRestorer(receiver, call.name, error)
        self._actors.on_message(self.worker.id, answer)

    def _answer_dropped(self, number: int) -> None:
        stopped = Failed(number, STOPPED, "", "", "", None)
        self._actors.on_message(self.worker.id, stopped)

    # Its end.

    def end(self) -> None:
        """Release the object, now or as soon as none of its code runs."""
        self._is_ending = True
        if self._running is None and not self.is_over:
            self.release()
            creation, node = self.creation, self.creation.node
            creation.is_over, creation.instance = True, None
            if not self._is_restarting:
                self._actors.on_message(
                    self.worker.id, Done(creation.id, NONE_PAYLOAD, 0)
                )
            node.lose(self.worker.id)
            node.wake()

    def release(self) -> None:
        """Release the object and stop the tasks that it has started."""
        self.is_over, self.worker.peer = True, None
        if self.creation.environment is not None:
            with self.creation.environment.applied():
                # Its `__del__` may read the environment.
                released = _weak(self.object)
                self.object, self.methods = None, Methods(None)
            if released is not None and released() is not None:
                # The object is part of a cycle, or code that is about to return refers
                # to it.
                self._actors.collect_soon()
        self._actors.end_calls(self)
        self.creation.node.end_orphans(*self.creation.children())


def _weak(thing: object) -> weakref.ref[object] | None:
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


T = TypeVar("T")


_log: Final = logging.getLogger(__name__)


class AsyncActorInstance(ActorInstance):
    """The object of a class with coroutine methods, which interleave on the loop."""

    def __init__(self, creation: ConstructorJob, actors: InlineActors) -> None:
        super().__init__(creation, actors)
        self._runner = actors.runner
        self._context = Context()
        self._calls: dict[int, CallJob] = {}
        self._ending: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def waits_for_running_code(self) -> bool:
        """False: its code runs on the loop, which runs while code waits."""
        return False

    def on_made(self) -> None:
        """Note that the constructor has returned."""
        self.creation.is_interleaved = True
        self._context.run(actor_job.set, self.creation)
        self._runner.task_tracker.begin()
        super().on_made()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # Not by the loop's factory, which would count the task as the caller's.
        context = self._context.copy()
        return asyncio.Task(coroutine, loop=self._runner.loop, context=context)

    # Messages of the actor to its process.

    def post(self, message: Message) -> None:
        """Start a call."""
        if type(message) is not Invoke:
            super().post(message)
            return
        self._calls[message.call] = call = CallJob(self, message)
        call.is_interleaved = True
        self.worker.begun = message.call
        context = self._context.copy()
        context.run(method_called.set, (call.method, call.id))
        context.run(inline_report.set, call.report)
        self._runner.interleave(call, context)

    def on_call_ended(self, call: CallJob) -> None:
        """Send the outcome of a call whose code has stopped."""
        del self._calls[call.id]
        super().on_call_ended(call)

    def drop(self, number: int) -> None:
        """Cancel a call."""
        call = self._calls.get(number)
        if call is not None:
            call.interrupt()

    def force_close(self) -> None:
        """End now, and abandon code that does not stop."""
        for task in (self._ending, *self._tasks(), *self.creation.started):
            if task is not None:
                task.cancel()
        self.end()

    # Its end.

    def end_within(self, seconds: float, is_orderly: bool = True) -> None:
        """Cancel all calls, run `close` if the end is orderly, and end."""
        if self.is_over:
            return
        if self._ending is None:
            self._ending = self._start(self._end(is_orderly))
        if self._alarm is not None:
            self._alarm.cancel()
        loop = self._runner.loop
        self._alarm = loop.call_later(seconds, self._give_up, context=Context())

    def _tasks(self) -> list[asyncio.Task[None] | None]:
        return [call.main for call in self._calls.values()]

    async def _end(self, is_orderly: bool) -> None:
        await cancel_all(self._tasks())
        if is_orderly:
            await self._close()
        await cancel_all(self.creation.started)
        self.end()

    async def _close(self) -> None:
        executor = self._runner.executor
        try:
            close = close_method(self.object)
            if close is not None:
                await executor.drive_task(self.creation, close())
        except BaseException as error:  # noqa: BLE001 - the actor ends in any case
            if executor.ctrl_c.is_real(error):
                # Raised in a callback, where it ends the program; a task would keep it.
                self._runner.loop.call_soon(_raise, error, context=Context())
            elif not self.is_over:  # else it was cancelled when it was abandoned
                sys.excepthook(*sys.exc_info())

    def _give_up(self) -> None:
        _log.warning(
            "! %s was told to end and still runs. In its own process it would be "
            "killed; here it is abandoned, and its code may run beside other code.",
            self.actor.name,
        )
        self.force_close()

    def release(self) -> None:
        """Release the object and stop the tasks that it has started."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self.worker.peer is not None:
            self._runner.task_tracker.end()
        super().release()


def _raise(error: BaseException) -> NoReturn:
    raise error


class InlineActors(Actors):
    """The actors of one node; see `ActorsPort`.

    Attributes:
        runner: runs their calls, on the program's loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, node: InlineNode, runner: LoopRunner
    ) -> None:
        super().__init__(
            loop,
            node.scheduler,
            node.pool,
            node,
            node.results,
            node.shortages,
            self.check_class,
        )
        self.runner = runner
        self._waiting: dict[int, Job] = {}
        self._node = node
        self._with_calls: dict[ActorInstance, None] = {}

    @property
    def has_living(self) -> bool:
        """True if an actor has not ended."""
        return any(isinstance(job, ConstructorJob) for job in self._node.jobs.values())

    def check_class(self, func: FunctionSpec, payload: bytes) -> None:
        """Check that this node can have an actor of a class.

        Raises:
            NodeError: the actor needs threads, or the node is shutting down.
            InfeasibleError: the node can never meet the request.
        """
        if func.actor is not None and func.actor.mode == THREADED:
            raise NodeError(
                f"{func.spec.name} has plain methods that run concurrently, by "
                f"max_concurrency or concurrency_groups. A node of "
                f"init(address='inline') runs all code in one thread: leave these "
                f"options out, make the methods `async def`, or open a node with "
                f"address='local'."
            )
        self._node.check(func, payload)

    def job_of(self, task: TaskId, func: FunctionSpec, actor: object) -> ConstructorJob:
        """Make the job that creates an actor."""
        assert isinstance(actor, Actor), actor
        return ConstructorJob(self._node, task, func, actor, self)

    def known(self, actor: int) -> Actor:
        """Return an actor that lives or has handles.

        Raises:
            ActorDiedError: the actor has ended and has no handle.
        """
        known = self.get(actor)
        if known is None:
            raise self.unknown(actor)
        return known

    # Calls.

    def end_calls(self, instance: ActorInstance) -> None:
        """Forget the waiting calls of an instance."""
        self._with_calls.pop(instance, None)

    def note_calls(self, instance: ActorInstance) -> None:
        """Note that an instance has calls that may run now."""
        self._with_calls[instance] = None
        self._node.wake()

    def next_call(self) -> CallJob | None:
        """Return the next call to run; None if there is none."""
        while self._with_calls:
            instance = next(iter(self._with_calls))
            del self._with_calls[instance]
            call = instance.next_call()
            if call is not None:
                return call
        return None

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call."""
        self.end_wait(number, is_over=True)
        super().cancel(actor, number)

    def demand_call(self, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        actor = self.called_by(number)
        if actor is not None:
            actor.demand(number, limit)

    def cancel_call(self, number: int) -> None:
        """Cancel a call by its number alone."""
        actor = self.called_by(number)
        if actor is not None:
            self.cancel(actor.id, number)

    def called_by(self, number: int) -> Actor | None:
        """Return the living actor of an unfinished call."""
        if number < FIRST_CALL:
            return None
        return next((actor for actor in self.all() if number in actor.calls), None)

    def caller_here(self) -> int:
        """Return the id of the calling job; 0 for the program."""
        return id_of_caller()

    # Which jobs wait for calls.

    def begin_wait(self, number: int) -> None:
        """Note that the running code waits for a call; fail a wait that cannot end."""
        actor, job = self.called_by(number), running_job.get()
        if actor is None:
            return
        instance: Any = None if actor.worker is None else actor.worker.peer
        if job is not None:
            self._waiting[number] = job
            job.calls_awaited[number] = job.calls_awaited.get(number, 0) + 1
            if instance is None:
                # If the actor does not fit, this may now be a deadlock.
                self._node.jobs[TaskId(actor.id)].waiters = 1
                self._node.wake()
            self._node.tell_waits(job)
        if instance is not None and instance.waits_for_running_code:
            method = actor.calls[number].method
            self._fail_wait(
                actor,
                number,
                f"{actor.name}.{method} was called by code for which a method of "
                f"{actor.name} waits, and its methods run one at a time. Call the "
                f"method directly, by self, or let the first method return before.",
            )

    def end_wait(self, number: int, is_over: bool = False) -> None:
        """Note the end of a wait for a call; `is_over`: of all waits for the call."""
        job = self._waiting.get(number)
        if job is not None:
            job.calls_awaited[number] -= 1
            if is_over or not job.calls_awaited[number]:
                del job.calls_awaited[number], self._waiting[number]
                self._node.tell_waits(job)

    def fail_waits(self, actor: Actor, reason: str) -> None:
        """Fail all waits for calls of an actor, since they cannot end."""
        for number in list(actor.calls):
            if number in self._waiting:
                self._fail_wait(actor, number, f"{reason}. The wait could never end.")

    def _fail_wait(self, actor: Actor, number: int, why: str) -> None:
        receiver = actor.calls[number].receiver
        self.cancel(actor.id, number)
        if receiver is not None:
            receiver.settle(DeadlockError(why))

    # Their ends.

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor; without restarts left it is dead before its code has ended."""
        known = self.get(actor)
        record = self._node.scheduler.tasks.get(TaskId(known.id)) if known else None
        is_last = record is not None and not record.retries_left
        is_ended = is_last and not no_restart
        if is_ended and known is not None and known.state is ActorState.ALIVE:
            died = killed_for_good(known.name)
            known.settle(died)
            self._results.note_stop(known.id, type(died).__name__, str(died))
            self._node.cancel(known.id)
        super().kill(actor, no_restart)

    def collect_soon(self) -> None:
        """Schedule the garbage collector, to free objects in cycles."""
        self.runner.loop.call_soon(gc.collect, context=Context())
