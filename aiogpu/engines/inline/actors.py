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
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import iscoroutinefunction, signature
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from aiogpu.client.current import method_called
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord, TaskState, WorkerRecord, WorkerState
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.resources.placement_group import room_for
from aiogpu.engines.inline.surroundings import Surroundings
from aiogpu.engines.inline.tasks import (
    Job,
    Outcome,
    Raising,
    acting_job,
    hold_for,
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
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import ASYNC, THREADED, Demand, Failed, Invoke, Leave, Message
from aiogpu.worker.chunk import method_of, plain_name

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.base import Room
    from aiogpu.engines.inline.tasks import Executor, InlineNode, Runner
    from aiogpu.runtime.workers.slots import LiveWorker


@dataclass(slots=True, eq=False)
class Creation(Job):
    """See above.

    Attributes:
        resident: what is made; it keeps what the job holds.
    """

    resident: Resident = field(kw_only=True)

    @property
    def actor_id(self) -> int:
        """The number of the actor that it makes."""
        return self.id

    def worker_id(self, depth: int) -> WorkerId:
        """By which number its code and `status()` know where it runs."""
        return self.resident.worker_id

    def function(self, executor: Executor) -> Callable[..., Any]:
        """What makes the object and keeps it; raises what unpickling the class does."""
        cls, resident = executor.function(self.call.func), self.resident

        def make(*args: Any, **kwargs: Any) -> None:
            resident.object = cls(*args, **kwargs)

        return make

    def tell(self, outcome: Outcome) -> None:
        """Tell who waits for the actor that it was made, or why it never will be."""
        self.call.receiver = None
        if type(outcome.answer) is Failed:
            error = unpack_failure(outcome.answer, self.name)
            outcome.show_frames(error)
            self.resident.actor.break_down(outcome.answer, error)
        else:
            self.resident.on_made()

    def fail_wait(self, reason: str) -> bool:
        """Tell who waits for calls; the program may still place the actor."""
        self.waiters = 0
        self.resident.fail_waits(reason)
        return False

    def on_end(self) -> None:
        """The constructor has ended, or never began."""
        self.resident.on_creation_ended()


@dataclass(slots=True, eq=False)
class Invocation(Job):
    """See above.

    Attributes:
        resident: the actor's object.
        method: name of the method.
    """

    resident: Resident = field(kw_only=True)
    method: str = field(kw_only=True)

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"{self.record.spec.name}.{self.method}"

    @property
    def task_name(self) -> str:
        """What its code is told that it is called."""
        return f"{self.record.spec.name}.{plain_name(self.method)}"

    @property
    def actor_id(self) -> int:
        """The number of the actor whose method it is."""
        return self.resident.actor.id

    @property
    def at_work(self) -> WorkerRecord | None:
        """What stands for the actor's process."""
        record = self.resident.record
        return record.worker if record is not None else None

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
        Job.pass_item(self, payload)  # slots have made this another class

    def on_end(self) -> None:
        """Its code has stopped: the next call may run."""
        self.resident.on_call_ended(self)


class Resident:
    """See above.

    Attributes:
        actor: its calls and who waits for it; it may outlive this life.
        worker_id: stands for its process in `status()`.
        restarts_left: how often it may be made anew; -1 without end.
        peer: itself, to the actor; None before and after its life.
        creation: the job that makes it.
        object: what its class has made; None before and after its life.
        lease: what it holds.
        record: what `status()` shows of it, None before its life.
        begun: number of the call that was begun last.
        is_over: whether nothing is left of it.
    """

    def __init__(
        self,
        actor: Actor,
        residents: Residents,
        worker_id: WorkerId,
        restarts_left: int,
    ) -> None:
        self.actor = actor
        self.worker_id = worker_id
        self.restarts_left = restarts_left
        self.peer: Resident | None = None
        self.creation: Creation
        self.object: Any = None
        self.lease: Lease | None = None
        self.record: TaskRecord | None = None
        self.begun = 0
        self.is_over = False
        self._residents = residents
        self._queue: deque[Invoke] = deque()
        self._running: Invocation | None = None
        self._is_ending = False

    def __repr__(self) -> str:
        return f"<Resident {self.worker_id} of {self.actor!r}>"

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
        creation = self.creation
        self.lease, creation.lease = creation.lease, None
        self.record = replace(creation.record, state=TaskState.RUNNING)
        self.record.worker = WorkerRecord(
            self.worker_id, state=WorkerState.BUSY, task=self.record, lease=self.lease
        )
        self.peer = self
        # An actor looks at the peer of its worker, and at nothing else of it.
        self.actor.worker = cast("LiveWorker", self)
        self.actor.on_created()

    def on_creation_ended(self) -> None:
        """Its constructor has ended, one way or the other."""
        if self.lease is None and not self.is_over:
            self._let_go()

    def fail_waits(self, reason: str) -> None:
        """Tell the code that waits for its calls now that the wait can never end."""
        self._residents.waits.fail(self.actor, reason)

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
            running.runner.stop(running)
            return
        for message in self._queue:
            if message.call == number:
                self._queue.remove(message)
                self._answer_dropped(number)
                return

    def kill(self) -> None:
        """End at once, or as soon as its code has returned."""
        self._queue.clear()
        if self.peer is None:
            self.creation.runner.stop(self.creation)
            return
        running = self._running
        if running is not None:
            running.runner.stop(running)
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
        record = TaskRecord(TaskId(message.call), func.spec, creation.record.since)
        return Invocation(
            record,
            Call(
                func,
                message.payload,
                receiver,
                limit=message.limit,
                passed=message.skip,
            ),
            creation.runner,
            resident=self,
            method=message.method,
        )

    def answer(self, outcome: Outcome) -> None:
        """Tell the caller what has come of a call; it finds the frames of an error."""
        if not self._is_current:
            return  # the call is lost, or waits for the next life
        answer = outcome.answer
        call = self.actor.calls.get(answer.task)
        if call is not None and call.receiver is not None:
            hold_for(outcome.carried, call.receiver)
            if type(answer) is Failed and answer.kind != LEFT:
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
            self._let_go()

    def _let_go(self) -> None:
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
        if self.lease is not None:
            lease, self.lease = self.lease, None
            self._residents.give_back(lease)
        self.creation.runner.disown(self.creation)
        self._residents.on_gone(self)


def _weak(thing: object) -> weakref.ref[object] | None:
    try:
        return weakref.ref(thing)
    except TypeError:
        return None


T = TypeVar("T")


_log: Final = logging.getLogger(__name__)


class AsyncResident(Resident):
    """See above."""

    def __init__(
        self,
        actor: Actor,
        residents: Residents,
        worker_id: WorkerId,
        restarts_left: int,
    ) -> None:
        super().__init__(actor, residents, worker_id, restarts_left)
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
        if self._is_made:
            self._end_within(self._runner.node.cancel_grace, is_orderly=False)
        else:
            super().kill()

    def close_down(self, grace: float) -> None:
        """End with the node, which waits for nobody beyond its grace."""
        if self._is_made:
            self._end_within(grace, is_orderly=True)
        else:
            super().kill()

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

    def _let_go(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._is_made:
            self._runner.offspring.end()
        super()._let_go()


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
        resident = None if actor is None else self._actors.life(actor.id)
        if actor is None or resident is None:
            return
        if job is not None:
            self._waiting[number] = job
            if resident.peer is None:
                # What does not fit may now be what can never begin.
                resident.creation.waiters = 1
                self._node.wake()
        if resident.is_busy_below:
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
        self._waiting.pop(number, None)

    def are_by(self, job: Job) -> bool:
        """Return whether this job's code waits for a call."""
        return job in self._waiting.values()

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


FIRST_WORKER: Final = 1000
"""Number of the first of them in `status()`: tasks never lie as deep as that."""


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
        self._new_worker = count(FIRST_WORKER).__next__
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __repr__(self) -> str:
        return f"<Residents {len(self._living)}>"

    @property
    def are_there(self) -> bool:
        """True if there is any that has not ended."""
        return bool(self._living)

    def living(self) -> list[Resident]:
        """Those that have not ended, in the order in which they were wanted."""
        return list(self._living.values())

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
        refusal = self._node.refusal(Call(func, payload, None), None)
        if get_if_exists and key is not None and (found := self.find(key)):
            return found
        self.check_name(key)
        actor = Actor(func, self, key)
        self.name(actor)
        if func.spec.is_detached:
            actor.holders += 1  # the node's own, until it is killed
        self._make(actor, payload, func.spec.max_retries)
        if refusal is not None:
            actor.fail(refusal)
            self._living[actor.id].kill()
        return actor

    def _make(self, actor: Actor, payload: bytes, restarts_left: int) -> None:
        node, func = self._node, actor.func
        record = node.new_record(func)
        if actor.id:
            record.id = TaskId(actor.id)
        actor.id, actor.is_killed = record.id, False
        kind = AsyncResident if func.actor and func.actor.mode == ASYNC else Resident
        worker = WorkerId(self._new_worker())
        resident = kind(actor, self, worker, restarts_left)
        resident.creation = Creation(
            record,
            Call(func, payload, actor),
            self.runner,
            is_urgent=True,
            resident=resident,
        )
        self.add(actor, 0)
        self._living[actor.id] = resident
        self._is_empty.clear()
        self.runner.add(resident.creation)
        node.wake()

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
        room = room_for(self._node.ledger, request, not func.actor.keeps_cpus)
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
        residents = self._living.values()
        actors = (one.actor for one in residents if number in one.actor.calls)
        return next(actors, None)

    # Their ends.

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor at once, or have it made anew if it may be."""
        found, resident = self._actors.get(actor), self._living.get(actor)
        if found is None or resident is None or found.state is ActorState.DEAD:
            return
        if no_restart:
            found.die(ActorDiedError(f"{found.name} was killed.", found.name))
            resident.kill()
        elif resident.peer is not None and found.state is ActorState.ALIVE:
            self._restart(found, resident)

    def _restart(self, actor: Actor, resident: Resident) -> None:
        lost = actor.lose(resident.begun)
        actor.is_killed = True
        if not resident.restarts_left:
            actor.fail(ActorDiedError(f"{actor.name} was killed.", actor.name))
        is_restarting = actor.state is not ActorState.DEAD
        for receiver in lost:
            receiver.fail(describe_loss(actor.name, None, is_restarting))
        resident.kill()

    def on_gone(self, resident: Resident) -> None:
        """Nothing is left of an actor's life; another one may follow."""
        actor = resident.actor
        del self._living[actor.id]
        self._with_calls.pop(resident, None)
        if actor.state is ActorState.LEAVING:
            actor.receive(b"")
        if actor.state is ActorState.DEAD:
            actor.note_gone()
            self.forget(actor)
        else:
            left, payload = resident.restarts_left, resident.creation.call.payload
            self._make(actor, payload, left - (left > 0))
            actor.look_if_idle()
        if not self._living:
            self._is_empty.set()

    def give_back(self, lease: Lease) -> None:
        """An actor holds no longer what it held."""
        self._node.ledger.give_back(lease)
        self._node.wake()

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
            self._living[actor.id].kill()
        else:
            actor.leave(actor.why_idle)

    def on_dead(self, actor: Actor) -> None:
        """An actor is dead."""
        self.free_name(actor)
        self.forget(actor)

    def close_down(self) -> None:
        """End all in an orderly way; nobody gets an answer any more."""
        for resident in self.living():
            actor = resident.actor
            actor.fail(
                NodeClosedError(
                    f"the node was shut down before {actor.name} had ended."
                )
            )
            resident.close_down(self._node.cancel_grace)

    def hasten(self) -> None:
        """Leave those behind that would take their time."""
        for resident in self.living():
            resident.hasten()

    async def closed(self) -> None:
        """Wait until nothing is left of any."""
        await self._is_empty.wait()


def _refuse_threads(func: FunctionSpec) -> None:
    if func.actor is not None and func.actor.mode == THREADED:
        raise NodeError(
            f"{func.spec.name} asks for plain methods that run at once, by "
            f"max_concurrency or concurrency_groups. A node of init(address='inline') "
            f"runs all code in one thread: leave these out, make the methods "
            f"`async def`, or open a node with address='local'."
        )
