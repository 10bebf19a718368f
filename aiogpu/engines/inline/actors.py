"""Actors in the calling process: made, called, let go.

To `runtime.actors` the object of an actor is its process, for one life. Plain methods
run one at a time, each as a job on top of whatever runs. Coroutine methods interleave
on the program's loop, as many at once as their groups may; each step of their code
finds the actor's surroundings, which the program's code between two steps does not see.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from aiogpu.client.current import method_called
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskState, WorkerRecord
from aiogpu.core.resources.placement_group import room_for
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.engines.inline.tasks import (
    Job,
    Outcome,
    Raising,
    acting_job,
    id_of_caller,
    running_job,
    supplied,
)
from aiogpu.errors import ActorDiedError, DeadlockError, NodeClosedError, NodeError
from aiogpu.runtime.actors.actor import Actor, ActorState, died
from aiogpu.runtime.actors.registry import FIRST_CALL, LEAVE_LIMIT, Register
from aiogpu.runtime.pending_tasks import Call
from aiogpu.runtime.workers.death import describe_loss
from aiogpu.serialization.exceptions import LEFT, STOPPED, unpack_failure
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import ASYNC, THREADED, Demand, Failed, Invoke, Leave, Message
from aiogpu.worker.chunk import method_of, plain_name

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.base import Room
    from aiogpu.engines.inline.tasks import Executor, InlineNode, Runner
    from aiogpu.runtime.workers.slots import LiveWorker


class Creation(Job):
    """The task that an actor is to the scheduler: its constructor, then its life.

    Attributes:
        actor: its calls and who waits for it.
        resident: what is made; None before it is its turn.
    """

    def __init__(
        self,
        id_: TaskId,
        call: Call,
        runner: Runner,
        actor: Actor,
        residents: Residents,
    ) -> None:
        super().__init__(id_, call, runner, is_urgent=True)
        self.actor = actor
        self.resident: Resident | None = None
        self._residents = residents

    @property
    def actor_id(self) -> int:
        """The number of the actor that it makes."""
        return self.id

    def begin(self, worker: WorkerRecord) -> None:
        """It is its turn, once more maybe."""
        super().begin(worker)
        self.started = set()
        self.resident = self._residents.begin_life(self)

    def function(self, executor: Executor) -> Callable[..., Any]:
        """What makes the object and keeps it; raises what unpickling the class does."""
        cls, resident = executor.function(self.call.func), self.resident
        assert resident is not None, self

        def make(*args: Any, **kwargs: Any) -> None:
            resident.object = cls(*args, **kwargs)

        return make

    def goes_on(self, outcome: Outcome) -> bool:
        """Whether it has made what goes on living."""
        record, resident = self.record, self.resident
        if type(outcome.answer) is Failed or record is None:
            return False
        if record.state is not TaskState.RUNNING:
            return False
        assert resident is not None, self
        resident.on_made()
        payload = self.call.payload
        if type(payload) is Payload and not record.retries_left:
            payload.let_go_of_actors()  # it is not called again
        return True

    def tell(self, outcome: Outcome) -> None:
        """Tell who waits for the actor that it has ended, or was never made."""
        if type(outcome.answer) is Failed:
            error = unpack_failure(outcome.answer, self.name)
            outcome.show_frames(error)
            self.actor.break_down(outcome.answer, error)
        elif self.actor.state is ActorState.LEAVING:
            self.actor.receive(b"")

    def interrupt(self) -> None:
        """Have it end, with what its object has started."""
        resident, scheduler = self.resident, self.runner.node.scheduler
        if resident is None or resident.peer is None:
            super().interrupt()
        elif scheduler.is_closing:
            resident.close_down(scheduler.config.cancel_grace)
        else:
            resident.kill()

    def fail_wait(self, reason: str) -> None:
        """Tell who waits for calls; the program may still place the actor."""
        self.waiters = 0
        self._residents.waits.fail(self.actor, reason)

    def end(self) -> None:
        """Its constructor has failed, or nobody wants what it has made."""
        if self.resident is not None:
            self.resident.let_go()
        super().end()

    def on_forgotten(self) -> None:
        """Nothing is left of it."""
        if self.actor.state is ActorState.DEAD:
            self.actor.note_gone()
            self._residents.forget(self.actor)


class Invocation(Job):
    """A call of an actor; the scheduler knows nothing of it.

    Attributes:
        resident: the actor's object.
        method: name of the method.
    """

    def __init__(
        self, id_: TaskId, call: Call, runner: Runner, resident: Resident, method: str
    ) -> None:
        super().__init__(id_, call, runner)
        self.resident = resident
        self.method = method
        self.worker = resident.creation.worker

    @property
    def task(self) -> TaskId:
        """The number by which the scheduler knows its actor."""
        return self.resident.creation.id

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"{self.call.func.spec.name}.{self.method}"

    @property
    def has_ended(self) -> bool:
        """True if its code has stopped."""
        return self.is_over

    @property
    def is_blocked(self) -> bool:
        """False: it holds no CPU that others could have meanwhile."""
        return any(child.waiters for child in self.children())

    @property
    def task_name(self) -> str:
        """What its code is told that it is called."""
        return f"{self.call.func.spec.name}.{plain_name(self.method)}"

    @property
    def actor_id(self) -> int:
        """The number of the actor whose method it is."""
        return self.resident.actor.id

    def function(self, executor: Executor) -> Callable[..., Any]:
        """The method; where it cannot be had, the call raises why."""
        resident, method = self.resident, self.method

        def call(*args: Any, **kwargs: Any) -> Any:
            return method_of(resident.object, method)(*args, **kwargs)

        return call

    def tell(self, outcome: Outcome) -> None:
        """Tell the caller what has come of it."""
        self.resident.answer(outcome)

    def pass_item(self, payload: bytes) -> None:
        """Give an item to the caller."""
        asked = self.resident.actor.calls.get(self.id)
        self.call.receiver = None if asked is None else asked.receiver
        if asked is not None:
            asked.passed += 1
        super().pass_item(payload)

    def stop(self) -> None:
        """Stop it, if it awaits something, and leave it behind after a while."""
        self.interrupt()
        if self.main is not None and self.timer is None:
            grace = self.runner.node.scheduler.config.cancel_grace
            give_up = partial(self.runner.give_up, self)
            self.timer = self.runner.loop.call_later(grace, give_up, context=Context())

    def end(self) -> None:
        """Its code has stopped: the next call may run."""
        if self.timer is not None:
            self.timer.cancel()
        if self.outcome is not None:
            self.tell(self.outcome)

    def leave(self) -> None:
        """Nothing of it lies on the stack any more."""
        self.resident.on_call_ended(self)


class Resident:
    """The object of an actor, for one life; to the actor, its process.

    Attributes:
        creation: the job that makes it.
        actor: its calls and who waits for it; it may outlive this life.
        id: stands for its process in `status()`.
        peer: itself, to the actor; None before and after its life.
        object: what its class has made; None before and after its life.
        begun: number of the call that was begun last.
        is_restarting: another life follows.
        is_over: whether nothing is left of it.
    """

    def __init__(self, creation: Creation, residents: Residents) -> None:
        assert creation.worker is not None, creation
        self.creation = creation
        self.actor = creation.actor
        self.id = creation.worker.id
        self.peer: Resident | None = None
        self.object: Any = None
        self.begun = 0
        self.is_restarting = False
        self.is_over = False
        self._residents = residents
        self._queue: deque[Invoke] = deque()
        self._running: Invocation | None = None
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<Resident {self.id} of {self.actor!r}>"

    @property
    def is_busy_below(self) -> bool:
        """True if code of it waits for the code that runs now to return."""
        running = self._running
        return running is not None and running.main is None

    @property
    def _is_current(self) -> bool:
        """True if the actor lives this life, and no other one."""
        return self.actor.worker is cast("LiveWorker", self)

    def surroundings(self) -> Surroundings:
        """Return what its code finds around it, to be put on once more."""
        assert self.creation.surroundings is not None, self
        return self.creation.surroundings.again()

    def on_made(self) -> None:
        """Its constructor has returned."""
        self.peer = self
        # An actor looks at the peer of its worker, and at nothing else of it.
        self.actor.worker = cast("LiveWorker", self)
        terms = self.actor.func.actor
        assert terms is not None, self
        if not terms.keeps_cpus:
            self.creation.runner.node.feed(Scheduler.release_cpus, self.creation.id)
        self.actor.on_created()

    # What its actor tells its process.

    def borrow(self, payload: bytes) -> bytes:
        """The payload that it is sent, with the values that it needs."""
        return supplied(payload)

    def post(self, message: Message) -> None:
        """Have a call run when its turn comes."""
        if type(message) is Invoke:
            self._queue.append(message)
            self._residents.note_calls(self)
        elif type(message) is Demand:
            self.creation.runner.node.beside.rise(message.task, message.limit)

    def send(self, message: Message) -> None:
        """End in an orderly way."""
        if type(message) is Leave:
            self._queue.clear()
            self.end()

    def drop(self, number: int) -> None:
        """Nobody wants a call's answer any more: run it no more, or stop it."""
        running = self._running
        if running is not None and running.id == number:
            running.call.receiver = None
            running.stop()
            return
        for message in self._queue:
            if message.call == number:
                self._queue.remove(message)
                self._answer_dropped(number)
                return

    def kill(self) -> None:
        """End at once, or as soon as its code has returned."""
        self._queue.clear()
        if self._running is not None:
            self._running.stop()
        self.end()

    def close_down(self, _grace: float) -> None:
        """End with the node."""
        self.kill()

    def hasten(self) -> None:
        """End now, and leave behind what takes its time."""
        self.kill()

    # Its calls.

    def next_call(self) -> Invocation | None:
        """The call whose turn it is; None if there is none, or one runs."""
        if self._running is not None or not self._queue:
            return None
        message = self._queue.popleft()
        self._running = call = self._invocation(message)
        call.surroundings = self.surroundings().named(call.task_name)
        self.begun = message.call
        return call

    def _invocation(self, message: Invoke) -> Invocation:
        creation, func = self.creation, self.actor.func
        sent = self.actor.calls.get(message.call)
        receiver = sent.receiver if sent is not None else None
        limit, passed = message.limit, message.skip
        call = Call(func, message.payload, receiver, limit=limit, passed=passed)
        id_ = TaskId(message.call)
        return Invocation(id_, call, creation.runner, self, message.method)

    def answer(self, outcome: Outcome) -> None:
        """Tell the caller what has come of a call; it finds the frames of an error."""
        if not self._is_current:
            return  # the call is lost, or waits for the next life
        answer = outcome.answer
        call = self.actor.calls.get(answer.task)
        is_raised = type(answer) is Failed and answer.kind != LEFT
        if is_raised and call is not None and call.receiver is not None:
            assert isinstance(answer, Failed), outcome
            error = unpack_failure(answer, f"{self.actor.name}.{call.method}")
            outcome.show_frames(error)
            call.receiver = Raising(call.receiver, error)
        self.actor.on_answer(answer)

    def _answer_dropped(self, number: int) -> None:
        if self._is_current:
            self.actor.on_answer(Failed(number, STOPPED, "", "", "", None))

    def on_call_ended(self, call: Invocation) -> None:
        """A call's code has stopped."""
        self._running = None
        # If it was stopped, nobody has answered yet.
        self._answer_dropped(call.id)
        if self._is_ending:
            self.end()
        elif self._queue:
            self._residents.note_calls(self)

    # Its end.

    def end(self) -> None:
        """Let the object go, or do so as soon as no code of it runs."""
        self._is_ending = True
        if self._running is None and not self.is_over:
            self.let_go()
            self._residents.on_gone(self)

    def let_go(self) -> None:
        """Nothing of it goes on."""
        self.is_over, self.peer = True, None
        if self.creation.surroundings is not None:
            with self.surroundings().on():
                # Its `__del__` may want to know where it is.
                was, self.object = _weak(self.object), None
            if was is not None and was() is not None:
                # It refers to itself, or code that is about to return does.
                self._residents.collect_soon()
        if self._is_current:
            self.actor.worker = None
        self._residents.end_life(self)


def _weak(thing: object) -> weakref.ref[object] | None:
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


T = TypeVar("T")


_log: Final = logging.getLogger(__name__)


class AsyncResident(Resident):
    """See above."""

    def __init__(self, creation: Creation, residents: Residents) -> None:
        super().__init__(creation, residents)
        self._runner = residents.runner
        self._context = Context()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._ending: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._is_made = False

    @property
    def is_busy_below(self) -> bool:
        """Never: its code is the loop's, and whoever waits lets that run."""
        return False

    def on_made(self) -> None:
        """Its constructor has returned."""
        self._is_made = True
        self.creation.worn = self.surroundings()
        self._context.run(acting_job.set, self.creation)
        self._runner.offspring.begin()
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
        call = self._invocation(message)
        call.worn = self.creation.worn
        self.begun = message.call
        task = self._start(self._run(call))
        self._calls[message.call] = task
        ended = partial(self._on_ended, message.call)
        task.add_done_callback(ended, context=Context())

    async def _run(self, call: Invocation) -> None:
        # Neither the task's result nor a name here: a loop that ends keeps its tasks
        # for a while, and an error the frames that awaited it, so it would hold itself
        # and the actor's object until the garbage is collected.
        method_called.set(call.method)
        self._outcomes[call.id] = await self._runner.node.executor.interleave(call)

    def _on_ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        outcome = self._outcomes.pop(number, None)
        if outcome is None:
            self._answer_dropped(number)  # it was cancelled before it had begun
            return
        if task.cancelling() and isinstance(outcome.error, asyncio.CancelledError):
            self._tell_cancelled(number)
        self.answer(outcome)
        if outcome.is_ctrl_c and outcome.error is not None:
            raise outcome.error

    def _tell_cancelled(self, number: int) -> None:
        """If somebody wants it, the loop has cancelled all that runs, since it ends."""
        if self.actor.state is ActorState.LEAVING:
            self._answer_dropped(number)  # another call has ended the actor
            return
        call = self.actor.calls.get(number) if self._is_current else None
        if call is not None and call.receiver is not None:
            call.receiver.fail(
                NodeClosedError(f"the event loop of {self.actor.name} has ended.")
            )
            self.actor.cancel(number)

    def drop(self, number: int) -> None:
        """Nobody wants a call's answer any more: cancel it."""
        task = self._calls.get(number)
        if task is not None:
            task.cancel()

    def send(self, message: Message) -> None:
        """End in an orderly way."""
        if type(message) is Leave:
            self._end_within(LEAVE_LIMIT, is_orderly=True)

    def kill(self) -> None:
        """Cancel all that runs, and end."""
        grace = self._runner.node.scheduler.config.cancel_grace
        self._end_within(grace, is_orderly=False)

    def close_down(self, grace: float) -> None:
        """End with the node, which waits for nobody beyond its grace."""
        self._end_within(grace, is_orderly=True)

    def hasten(self) -> None:
        """End now, and leave behind what takes its time."""
        rest = [*self._calls.values(), *self.creation.started]
        for task in (self._ending, *rest):
            if task is not None:
                task.cancel()
        self.end()

    # Its end.

    def _end_within(self, seconds: float, is_orderly: bool) -> None:
        if self.is_over:
            return
        if self._ending is None:
            self._ending = self._start(self._end(is_orderly))
        if self._alarm is not None:
            self._alarm.cancel()
        loop = self._runner.loop
        self._alarm = loop.call_later(seconds, self._give_up, context=Context())

    async def _end(self, is_orderly: bool) -> None:
        await _cancelled(self._calls.values())
        if is_orderly:
            await self._close()
        await _cancelled(self.creation.started)
        self.end()

    async def _close(self) -> None:
        executor = self._runner.node.executor
        try:
            close = getattr(self.object, "close", None)
            if iscoroutinefunction(close) and not signature(close).parameters:
                await executor.dressed(self.creation, close())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the actor ends
            if executor.is_ctrl_c(error):
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
        self.hasten()

    def let_go(self) -> None:
        """Nothing of it goes on."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._is_made:
            self._runner.offspring.end()
        super().let_go()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they do about it."""
    rest = list(tasks)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _raise(error: BaseException) -> NoReturn:
    raise error


class CallWaits:
    """See above."""

    def __init__(self, node: InlineNode, actors: Residents) -> None:
        self._node = node
        self._actors = actors
        self._waiting: dict[int, Job] = {}

    def __repr__(self) -> str:
        return f"<CallWaits {self._waiting!r}>"

    def begin(self, number: int) -> None:
        """The code that runs now waits for a call, which fails if it is in vain."""
        actor, job = self._actors.called_by(number), running_job.get()
        if actor is None:
            return
        resident = self._actors.life(actor.id)
        if job is not None:
            self._waiting[number] = job
            job.calls_awaited += 1
            if resident is None:
                # What does not fit may now be what can never begin.
                self._node.jobs[TaskId(actor.id)].waiters = 1
                self._node.wake()
            self._node.tell_waits(job)
        if resident is not None and resident.is_busy_below:
            method = actor.calls[number].method
            self._fail(
                actor,
                number,
                f"{actor.name}.{method} was called by code for which a method of "
                f"{actor.name} waits, and these run one at a time. Call it directly, "
                f"by self, or let the first one return before.",
            )

    def end(self, number: int) -> None:
        """Nobody waits for a call any more."""
        job = self._waiting.pop(number, None)
        if job is not None:
            job.calls_awaited -= 1
            self._node.tell_waits(job)

    def are_by(self, job: Job) -> bool:
        """Return whether this job's code waits for a call."""
        return job.calls_awaited > 0

    def fail(self, actor: Actor, reason: str) -> None:
        """Tell the code that waits for calls of an actor that it waits in vain."""
        for number in list(actor.calls):
            if number in self._waiting:
                self._fail(actor, number, f"{reason}. The wait could never end.")

    def _fail(self, actor: Actor, number: int, why: str) -> None:
        receiver = actor.calls[number].receiver
        self._actors.cancel(actor.id, number)
        if receiver is not None:
            receiver.fail(DeadlockError(why))


class Residents(Register):
    """The actors of one node; see `ActorsPort`.

    Attributes:
        runner: carries what they start, on the program's loop.
        waits: who waits for their calls.
    """

    def __init__(self, node: InlineNode, runner: Runner) -> None:
        super().__init__(runner.loop)
        self.runner = runner
        self.waits = CallWaits(node, self)
        self._node = node
        self._living: dict[int, Resident] = {}
        self._with_calls: dict[Resident, None] = {}

    def __repr__(self) -> str:
        return f"<Residents {len(self._living)}>"

    @property
    def are_there(self) -> bool:
        """True if there is any that has not ended."""
        return any(isinstance(job, Creation) for job in self._node.jobs.values())

    def life(self, actor: int) -> Resident | None:
        """That of an actor which has not ended."""
        return self._living.get(actor)

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> Actor:
        """Make an actor; see `ActorsPort.create`.

        Raises:
            NodeError: it would need threads, or the node is being shut down.
        """
        _refuse_threads(func)
        if get_if_exists and key is not None and (found := self.find(key)):
            return found
        self.check_name(key)
        actor = Actor(func, self, key)

        def make(task: TaskId, call: Call) -> Creation:
            actor.id = task
            self.add(actor, 0)
            self.name(actor)
            return Creation(task, call, self.runner, actor, self)

        if func.spec.is_detached:
            actor.holders += 1  # the node's own, until it is killed
        self._node.submit(func, payload, actor, self.runner, make)
        return actor

    def begin_life(self, creation: Creation) -> Resident:
        """An actor's constructor begins."""
        actor, terms = creation.actor, creation.call.func.actor
        actor.is_killed = False
        is_async = terms is not None and terms.mode == ASYNC
        kind = AsyncResident if is_async else Resident
        resident = self._living[actor.id] = kind(creation, self)
        return resident

    def end_life(self, resident: Resident) -> None:
        """Nothing of an actor's object goes on; another life may follow."""
        del self._living[resident.actor.id]
        self._with_calls.pop(resident, None)
        self._node.disown(resident.creation)

    def on_gone(self, resident: Resident) -> None:
        """An actor that was made has ended."""
        feed, task = self._node.feed, resident.creation.id
        worker, creation = WorkerId(resident.id), resident.creation
        creation.is_over = True
        creation.resident = None
        if resident.is_restarting:
            feed(Scheduler.worker_gone, worker, task)
            resident.actor.look_if_idle()
        else:
            feed(Scheduler.finish, task, worker)
            feed(Scheduler.worker_gone, worker)
        self._node.wake()

    def known(self, actor: int) -> Actor:
        """An actor that lives, or to which somebody has a handle.

        Raises:
            ActorDiedError: nobody has one any more.
        """
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        return found

    def room(self, actor: int) -> Room:
        """See `ActorsPort.room`."""
        func = self.known(actor).func
        assert func.actor is not None, func
        request = func.spec.shape.request
        room = room_for(self._node.scheduler.ledger, request, not func.actor.keeps_cpus)
        return room, str(request)

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """See `ActorsPort.tell_room`."""
        receiver.receive(dump_whole(self.room(actor)))

    # Calls.

    def note_calls(self, resident: Resident) -> None:
        """One has calls that may run now."""
        self._with_calls[resident] = None
        self._node.wake()

    def next_call(self) -> Invocation | None:
        """The call whose turn it is, None without one."""
        while self._with_calls:
            resident = next(iter(self._with_calls))
            del self._with_calls[resident]
            call = resident.next_call()
            if call is not None:
                return call
        return None

    def cancel(self, actor: int, number: int) -> None:
        """Nobody wants a call's answer any more."""
        found = self._actors.get(actor)
        if found is None:
            return
        self.waits.end(number)
        resident = self._living.get(actor)
        if found.cancel(number) and resident is not None:
            resident.drop(number)
        found.look_if_idle()

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        found = self.get(actor)
        if found is not None:
            found.demand(number, limit)

    def demand_call(self, number: int, limit: int) -> None:
        """The same, where it is not said of which actor."""
        found = self.called_by(number)
        if found is not None:
            found.demand(number, limit)

    def cancel_call(self, number: int) -> None:
        """The same where the actor is not known."""
        actor = self.called_by(number)
        if actor is not None:
            self.cancel(actor.id, number)

    def called_by(self, number: int) -> Actor | None:
        """The living actor that has this call before it."""
        if number < FIRST_CALL:
            return None
        return next((one for one in self.all() if number in one.calls), None)

    # Their ends.

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor at once, or have it made anew if it may be."""
        found, resident = self._actors.get(actor), self._living.get(actor)
        if found is None or found.state is ActorState.DEAD:
            return
        if no_restart:
            found.die(ActorDiedError(f"{found.name} was killed.", found.name))
            self._node.cancel(found.id)
        elif resident is not None and found.state is ActorState.ALIVE:
            self._restart(found, resident)

    def _restart(self, actor: Actor, resident: Resident) -> None:
        lost = actor.lose(resident.begun)
        actor.is_killed = True
        record = resident.creation.record
        if record is None or not record.retries_left:
            actor.fail(ActorDiedError(f"{actor.name} was killed.", actor.name))
        resident.is_restarting = actor.state is not ActorState.DEAD
        for receiver in lost:
            receiver.fail(describe_loss(actor.name, None, resident.is_restarting))
        resident.kill()

    def collect_soon(self) -> None:
        """Have what refers to itself let go, so that its `__del__` is called."""
        self.runner.loop.call_soon(gc.collect, context=Context())

    def terminate(self, actor: int) -> None:
        """Have an actor end after what it was sent, whoever still holds a handle."""
        found = self._actors.get(actor)
        if found is not None:
            found.is_ending = True
            found.look_if_idle()

    def caller_here(self) -> int:
        """Tell the callers of this process apart."""
        return id_of_caller()

    def on_leaving(self, actor: Actor) -> None:
        """An actor was told to end."""
        self.free_name(actor)

    def on_idle(self, actor: Actor) -> None:
        """Nobody can call an actor any more, and all its calls were answered."""
        if actor.state is ActorState.PENDING:
            # It waits to be made, for nobody.
            actor.die(died(actor.name, actor.why_idle))
            self._node.cancel(actor.id)
        else:
            actor.leave(actor.why_idle)

    def on_dead(self, actor: Actor) -> None:
        """An actor is dead."""
        self.free_name(actor)
        self.forget(actor)

    def hasten(self) -> None:
        """Leave those behind that would take their time."""
        for resident in list(self._living.values()):
            resident.hasten()


def _refuse_threads(func: FunctionSpec) -> None:
    if func.actor is not None and func.actor.mode == THREADED:
        raise NodeError(
            f"{func.spec.name} asks for plain methods that run at once, by "
            f"max_concurrency or concurrency_groups. A node of init(address='inline') "
            f"runs all code in one thread: leave these out, make the methods "
            f"`async def`, or open a node with address='local'."
        )
