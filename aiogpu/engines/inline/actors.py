"""Actors in the calling process.

To `runtime.actors` the object of an actor is its process, for one life. Plain methods
run one at a time, each as a job on top of whatever runs. Coroutine methods interleave
on the program's loop, as many at once as their groups may; each step of their code
finds the actor's environment, which the program's code between two steps does not see.
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
from aiogpu.errors import ActorDiedError, DeadlockError, NodeClosedError, NodeError
from aiogpu.runtime.actors.actor import FIRST_CALL, Actor, ActorState
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
    """The task that an actor is to the scheduler: its constructor, then its life.

    Attributes:
        actor: its calls and who waits for it.
        instance: what is made; None before it is its turn.
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
        """Begin, or go on, with the turn of this job."""
        super().begin()
        self.started = set()
        terms = self.func.actor
        is_async = terms is not None and terms.mode == ASYNC
        kind = AsyncActorInstance if is_async else ActorInstance
        self.instance = kind(self, self._actors)

    def target(self) -> tuple[Callables, Any]:
        """Return what makes the object, and keeps it."""
        node, instance = self.node, self.instance
        assert instance is not None, self
        cls = node.learn(self.func)
        return Constructor(node.functions, instance.keep), cls

    def goes_on(self, outcome: Outcome) -> bool:
        """Whether it has made what goes on living."""
        record, instance = self.record, self.instance
        if type(outcome.answer) is Failed or record is None:
            return False
        if record.state is not TaskState.RUNNING:
            return False
        assert instance is not None, self
        instance.on_made()
        return True

    def interrupt(self) -> None:
        """Have it end, with what its object has started."""
        instance, scheduler = self.instance, self.node.scheduler
        if instance is None or instance.worker.peer is None:
            super().interrupt()
        elif scheduler.is_closing:
            instance.end_within(scheduler.config.cancel_grace)
        else:
            instance.kill()

    def fail_wait(self, reason: str) -> None:
        """Tell who waits for calls; the program may still place the actor."""
        self.waiters = 0
        self._actors.fail_waits(self.actor, reason)

    def abandon(self) -> None:
        """End now, and leave behind what takes its time."""
        if self.instance is not None:
            self.instance.force_close()
        super().abandon()

    def end(self) -> None:
        """Its constructor has failed, or nobody wants what it has made."""
        if self.instance is not None:
            self.instance.let_go()
        super().end()


class CallJob(Job):
    """A call of an actor; the scheduler knows nothing of it.

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
        """The number by which the scheduler knows its actor."""
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
        """True if its code waits for a task that it has started, or for a call."""
        # To the scheduler it is not: it holds no CPU that others could have meanwhile.
        waits = bool(self.calls_awaited)
        return waits or any(job.waiters for job in self.children())

    def fresh_context(self, client: InlineClient) -> Context:
        """An empty context, but for whose it is and which method runs."""
        context = super().fresh_context(client)
        context.run(method_called.set, (self.method, self.id))
        return context

    def target(self) -> tuple[Callables, Any]:
        """Return the object's methods, and the name of this one."""
        return self.instance.methods, self.method

    def stop(self) -> None:
        """Stop it, if it awaits something, and leave it behind after a while.

        Once: a second time would cut its clearing up short.
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
        """Note that no frame of it is on the stack; nothing waits for that."""


class ActorInstance:
    """One object of an actor, until it ends; to the actor, its process's connection.

    The object of a class with plain methods: these run one at a time.

    Attributes:
        creation: the job that makes it.
        worker: stands for the process.
        actor: its calls and who waits for it; it may outlive this life.
        object: what its class has made; None before and after its life.
        methods: the object's methods.
        is_over: whether nothing is left of it.
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
        """True if code of it waits for the code that runs now to return."""
        running = self._running
        return running is not None and running.main is None

    def keep(self, made: object) -> None:
        """Keep the object that the constructor has made."""
        self.object, self.methods = made, Methods(made, self._note_begun)

    def _note_begun(self) -> None:
        """The code of a call begins, whose run is timed."""
        number = method_called.get()[1]
        self._actors.on_began(self.actor, number, time.monotonic())

    def on_made(self) -> None:
        """Note that the constructor has returned."""
        self.worker.peer = self
        self._actors.on_message(self.worker.id, Created(self.creation.id))

    # What its actor tells its process.

    def post(self, message: Message) -> None:
        """Have a call run when its turn comes."""
        if type(message) is Invoke:
            self._queue.append(message)
            self._actors.note_calls(self)
        elif type(message) is Demand:
            self.creation.node.streams.rise(message.task, message.limit)

    def send(self, message: Message) -> None:
        """End in an orderly way."""
        if type(message) is Leave:
            self.end_within(LEAVE_LIMIT)

    def drop(self, number: int) -> None:
        """Cancel a call: do not run it, or stop it."""
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
        """End as `kill` does, and make room for another life."""
        self._is_restarting = True
        self.kill()

    def kill(self) -> None:
        """End at once, or within the time that a cancelled task has."""
        grace = self.creation.node.scheduler.config.cancel_grace
        self.end_within(grace, is_orderly=False)

    def end_within(self, _seconds: float, is_orderly: bool = True) -> None:
        """End at once, or as soon as its code has returned."""
        self._queue.clear()
        if self._running is not None:
            self._running.stop()
        self.end()

    def force_close(self) -> None:
        """End now, and leave behind what takes its time."""
        self.kill()

    # Its calls.

    def next_call(self) -> CallJob | None:
        """The call whose turn it is; None if there is none, or one runs."""
        if self._running is not None or not self._queue:
            return None
        message = self._queue.popleft()
        self._running = call = CallJob(self, message)
        self.worker.begun = message.call
        return call

    def on_call_ended(self, call: CallJob) -> None:
        """Tell the caller what has come of a call, whose code has stopped."""
        self._running = None
        if not self._is_restarting:
            self._answer(call)  # else it is lost, or waits for the next life
        if self._is_ending:
            self.end()
        elif self._queue:
            self._actors.note_calls(self)

    def _answer(self, call: CallJob) -> None:
        timer = self.actor.timers.get(call.id)
        if timer is not None and timer.when() <= self._actors.runner.loop.time():
            self._actors.overrun(self.actor, call.id)  # nothing could interrupt it
        asked, outcome = self.actor.calls.get(call.id), call.outcome
        receiver = None if asked is None else asked.receiver
        if outcome is None:
            self._answer_dropped(call.id)  # it was cancelled before it had begun
            return
        answer, error = outcome.answer, outcome.error
        if call.is_cancelled and isinstance(error, asyncio.CancelledError):
            if self.actor.state is ActorState.LEAVING:
                self._answer_dropped(call.id)  # another call has ended the actor
                return
            if receiver is not None:
                # Somebody wants it: the loop has cancelled all that runs, as it ends.
                receiver.settle(
                    NodeClosedError(f"the event loop of {self.actor.name} has ended.")
                )
                self.actor.cancel(call.id)  # its loop takes no more of it
        elif asked is not None and receiver is not None and error is not None:
            asked.receiver = FrameRestorer(receiver, call.name, error)
        self._actors.on_message(self.worker.id, answer)

    def _answer_dropped(self, number: int) -> None:
        stopped = Failed(number, STOPPED, "", "", "", None)
        self._actors.on_message(self.worker.id, stopped)

    # Its end.

    def end(self) -> None:
        """Let the object go, or do so as soon as no code of it runs."""
        self._is_ending = True
        if self._running is None and not self.is_over:
            self.let_go()
            creation, node = self.creation, self.creation.node
            creation.is_over, creation.instance = True, None
            if not self._is_restarting:
                self._actors.on_message(
                    self.worker.id, Done(creation.id, NONE_PAYLOAD, 0)
                )
            node.lose(self.worker.id)
            node.wake()

    def let_go(self) -> None:
        """Nothing of it goes on."""
        self.is_over, self.worker.peer = True, None
        if self.creation.environment is not None:
            with self.creation.environment.applied():
                # Its `__del__` may want to know where it is.
                was = _weak(self.object)
                self.object, self.methods = None, Methods(None)
            if was is not None and was() is not None:
                # It refers to itself, or code that is about to return does.
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
        """Never: its code is the loop's, and whoever waits lets that run."""
        return False

    def on_made(self) -> None:
        """Note that the constructor has returned."""
        self.creation.is_interleaved = True
        self._context.run(actor_job.set, self.creation)
        self._runner.task_tracker.begin()
        super().on_made()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # Not by the loop's factory, which would take it for the caller's.
        context = self._context.copy()
        return asyncio.Task(coroutine, loop=self._runner.loop, context=context)

    # What its actor tells its process.

    def post(self, message: Message) -> None:
        """Begin a call."""
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
        """Tell the caller what has come of a call, whose code has stopped."""
        del self._calls[call.id]
        super().on_call_ended(call)

    def drop(self, number: int) -> None:
        """Cancel a call."""
        call = self._calls.get(number)
        if call is not None:
            call.interrupt()

    def force_close(self) -> None:
        """End now, and leave behind what takes its time."""
        for task in (self._ending, *self._tasks(), *self.creation.started):
            if task is not None:
                task.cancel()
        self.end()

    # Its end.

    def end_within(self, seconds: float, is_orderly: bool = True) -> None:
        """Cancel all that runs, let it close if that is orderly, and end."""
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
        except BaseException as error:  # noqa: BLE001 - whatever it is, the actor ends
            if executor.ctrl_c.is_real(error):
                # To be raised where it ends the program; a task would keep it.
                self._runner.loop.call_soon(_raise, error, context=Context())
            elif not self.is_over:  # else it was cancelled, being left behind
                sys.excepthook(*sys.exc_info())

    def _give_up(self) -> None:
        _log.warning(
            "! %s was told to end and runs on. In a process of its own it would be "
            "killed; here it is left behind, and its code may run beside other code.",
            self.actor.name,
        )
        self.force_close()

    def let_go(self) -> None:
        """Nothing of it goes on."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self.worker.peer is not None:
            self._runner.task_tracker.end()
        super().let_go()


def _raise(error: BaseException) -> NoReturn:
    raise error


class InlineActors(Actors):
    """The actors of one node; see `ActorsPort`.

    Attributes:
        runner: carries what they start, on the program's loop.
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
    def are_there(self) -> bool:
        """True if there is any that has not ended."""
        return any(isinstance(job, ConstructorJob) for job in self._node.jobs.values())

    def check_class(self, func: FunctionSpec, payload: bytes) -> None:
        """Refuse an actor that this node can never have.

        Raises:
            NodeError: it would need threads, or the node is being shut down.
            InfeasibleError: it asks for more than there is.
        """
        if func.actor is not None and func.actor.mode == THREADED:
            raise NodeError(
                f"{func.spec.name} asks for plain methods that run at once, by "
                f"max_concurrency or concurrency_groups. A node of "
                f"init(address='inline') runs all code in one thread: leave these out, "
                f"make the methods `async def`, or open a node with address='local'."
            )
        self._node.check(func, payload)

    def job_of(self, task: TaskId, func: FunctionSpec, actor: object) -> ConstructorJob:
        """The job that makes an actor."""
        assert isinstance(actor, Actor), actor
        return ConstructorJob(self._node, task, func, actor, self)

    def known(self, actor: int) -> Actor:
        """Return an actor that lives or has handles.

        Raises:
            ActorDiedError: nobody has one any more.
        """
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        return found

    # Calls.

    def end_calls(self, instance: ActorInstance) -> None:
        """None of its calls run any more."""
        self._with_calls.pop(instance, None)

    def note_calls(self, instance: ActorInstance) -> None:
        """One has calls that may run now."""
        self._with_calls[instance] = None
        self._node.wake()

    def next_call(self) -> CallJob | None:
        """The call whose turn it is, None without one."""
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
        """Let a call that is a stream yield so many items in all."""
        found = self.called_by(number)
        if found is not None:
            found.demand(number, limit)

    def cancel_call(self, number: int) -> None:
        """Cancel a call whose actor is not known."""
        actor = self.called_by(number)
        if actor is not None:
            self.cancel(actor.id, number)

    def called_by(self, number: int) -> Actor | None:
        """The living actor that has this call before it."""
        if number < FIRST_CALL:
            return None
        return next((one for one in self.all() if number in one.calls), None)

    def caller_here(self) -> int:
        """Tell the callers of this process apart."""
        return id_of_caller()

    # Which jobs wait for calls.

    def begin_wait(self, number: int) -> None:
        """The code that runs now waits for a call, which fails if it is in vain."""
        actor, job = self.called_by(number), running_job.get()
        if actor is None:
            return
        instance: Any = None if actor.worker is None else actor.worker.peer
        if job is not None:
            self._waiting[number] = job
            job.calls_awaited[number] = job.calls_awaited.get(number, 0) + 1
            if instance is None:
                # What does not fit may now be what can never begin.
                self._node.jobs[TaskId(actor.id)].waiters = 1
                self._node.wake()
            self._node.tell_waits(job)
        if instance is not None and instance.waits_for_running_code:
            method = actor.calls[number].method
            self._fail_wait(
                actor,
                number,
                f"{actor.name}.{method} was called by code for which a method of "
                f"{actor.name} waits, and these run one at a time. Call it directly, "
                f"by self, or let the first one return before.",
            )

    def end_wait(self, number: int, is_over: bool = False) -> None:
        """Note that a wait for a call has ended, or all of them with the call."""
        job = self._waiting.get(number)
        if job is not None:
            job.calls_awaited[number] -= 1
            if is_over or not job.calls_awaited[number]:
                del job.calls_awaited[number], self._waiting[number]
                self._node.tell_waits(job)

    def fail_waits(self, actor: Actor, reason: str) -> None:
        """Tell the code that waits for calls of an actor that it waits in vain."""
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
        """End an actor; one without restarts left is dead before its code has ended."""
        found = self.get(actor)
        record = self._node.scheduler.tasks.get(TaskId(found.id)) if found else None
        is_last = record is not None and not record.retries_left
        is_ended = is_last and not no_restart
        if is_ended and found is not None and found.state is ActorState.ALIVE:
            found.is_killed = True
            died = ActorDiedError(f"{found.name} was killed.", found.name)
            found.settle(died)
            self._results.note_stop(found.id, type(died).__name__, str(died))
            self._node.cancel(found.id)
        super().kill(actor, no_restart)

    def collect_soon(self) -> None:
        """Have what refers to itself let go, so that its `__del__` is called."""
        self.runner.loop.call_soon(gc.collect, context=Context())
