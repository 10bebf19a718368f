"""Actors in the program's thread.

`runtime.actors` keeps their names, handles, calls and ends, as on a local node. A
`Process` takes the place of an actor's process: it runs the constructor and the calls
that were sent to it. Plain methods run one at a time. The methods of a class with
`async def` methods run on the program's loop.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from contextvars import Context
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from aiogpu.client.current import no_call_to_report
from aiogpu.client.interface import Outcome, Receiver
from aiogpu.core.mailbox import CallId
from aiogpu.core.model.ids import ClientId
from aiogpu.core.resources.placement_group import room_for
from aiogpu.engines.inline.calls import (
    NOT_SET,
    Call,
    InlineNode,
    Runner,
    State,
    driven,
    end_started,
    running_call,
)
from aiogpu.errors import ActorDiedError, NodeClosedError, NodeError
from aiogpu.runtime.actors.actor import (
    Actor,
    ActorState,
    Register,
    died,
    killed_for_good,
)
from aiogpu.runtime.objects.store import Borrower
from aiogpu.runtime.pending_tasks import settle
from aiogpu.runtime.slices import Slices
from aiogpu.runtime.workers.death import describe_loss
from aiogpu.serialization.exceptions import LEFT, why_not_made
from aiogpu.wire.messages import (
    READY,
    THREADED,
    Demand,
    Done,
    Failed,
    Invoke,
    Items,
    Leave,
    plain_name,
)
from aiogpu.worker.actors import Methods, dropped
from aiogpu.worker.async_actor import cancel_all, close_method
from aiogpu.worker.invoke import Callables, Constructor

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec


class ActorCode(Call):
    """A constructor or method: what its code starts belongs to the actor.

    Attributes:
        process: runs it.
    """

    def __init__(
        self, process: Process, payload: bytes, receiver: Receiver | None, number: int
    ) -> None:
        actor, node = process.actor, process.node
        super().__init__(node, actor.func, payload, receiver, number=number)
        self.process = process
        self.actor_id = actor.id
        self.children, self.started = process.children, process.started
        self.limit = self._retries = 0

    def end_started(self) -> None:
        """Do nothing: the actor stops them at its end."""


class Creation(ActorCode):
    """The call of an actor's constructor; its receiver is the process."""

    def __init__(self, process: Process) -> None:
        super().__init__(process, process.actor.payload, process, 0)
        self.is_coroutine = False

    def target(self) -> tuple[Callables, Any]:
        """Return the constructor, which passes the object to the process."""
        cls = self.node.learn(self.func)
        return Constructor(self.node.functions, self._keep), cls

    def begin(self) -> None:
        """Begin: from now on, the actor does not end before its constructor."""
        self.process.actor.worker = self.process
        super().begin()

    def _keep(self, made: object) -> None:
        if self.receiver is not None:  # else the actor was killed meanwhile
            self.process.keep(made, self)

    def report(self, payload: bytes) -> None:
        """Refuse: no caller waits for a constructor.

        Raises:
            MisuseError: always.
        """
        raise no_call_to_report()

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Let the actor die of its constructor's error."""
        death = died(self.func.spec.name, why_not_made(failed))
        death.__cause__ = error
        self.deliver(death)


class Answer(NamedTuple):
    """Receives the answer to a call, and passes on what the caller gets.

    For a failure that is the exception itself, with the frames of the call's code.
    """

    outcome: Outcome
    receiver: Receiver

    def settle(self, _answer: Outcome) -> None:
        """Settle the caller's receiver."""
        settle(self.receiver, self.outcome)


class MethodCall(ActorCode):
    """One call of a method, which begins at once."""

    def __init__(self, process: Process, message: Invoke) -> None:
        actor, method = process.actor, message.method
        call = actor.calls[message.call]
        super().__init__(process, message.payload, call.receiver, message.call)
        self.name = f"{actor.name}.{plain_name(method)}"
        self.called = method, self.id
        self.is_coroutine = not actor.is_serial
        self.run_timeout = actor.terms.run_limits.get(method)
        self.limit = call.limit
        self.passed = message.skip
        self.place = process.place
        self._call = call

    def target(self) -> tuple[Callables, Any]:
        """Return the object's methods, and the name of this one."""
        return self.process.methods, self.called[0]

    def demand(self, limit: int) -> None:
        """Set the number of items; a retry after a kill has the same."""
        self._call.limit = limit
        super().demand(limit)

    def on_items(self, items: Items) -> None:
        """Pass items on; a retry after a kill skips them."""
        super().on_items(items)
        self._call.passed = self.passed

    def end(self) -> None:
        """Note that the code has stopped."""
        super().end()
        del self._call

    def deliver(self, outcome: Outcome) -> None:
        """Settle the receiver, and let the code go on without it."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            self.node.cancel(self.id)
            settle(receiver, outcome)

    def on_done(self, done: Done) -> None:
        """Answer with the result."""
        self._answer(done, done.payload)

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Answer with the failure; a call that nobody wants was dropped."""
        if failed.kind == LEFT:
            self.process.on_ended(self, failed)
        elif self.receiver is None:
            self.process.on_ended(self, dropped(self.id))
        else:
            self._answer(failed, error)

    def _answer(self, answer: Done | Failed, outcome: Outcome) -> None:
        self.process.actor.delay(self.id, partial(Answer, outcome))
        self.process.on_ended(self, answer)


class Process(Borrower):
    """Takes the place of an actor's process, for one life of the actor.

    Attributes:
        actor: the actor.
        node: the node.
        creation: the call of the constructor.
        children, started: see `Call`.
        place: what the actor's code sees.
        methods: the methods of the object.
        running: calls that have begun.
        begun: the number of the last of them.
        is_closing: it runs the actor's `close()`, and ends after that.
    """

    def __init__(self, actor: InlineActor, node: InlineNode) -> None:
        super().__init__(actor.id)
        self.peer: Any = self
        self.actor = actor
        self.node = node
        self.children: dict[int, Call] = {}
        self.started: set[asyncio.Task[Any]] = set()
        self.place = NOT_SET
        self.methods = Methods(None)
        self.running: dict[int, MethodCall] = {}
        self.begun = 0
        self.is_closing = False
        self._object: Any = None
        self._queue: deque[Invoke] = deque()
        self._is_over = False
        self.creation = Creation(self)

    def __repr__(self) -> str:
        return f"<Process of {self.name} {len(self._queue)} calls>"

    @property
    def name(self) -> str:
        """The actor's name in errors."""
        return self.actor.name

    def keep(self, made: object, creation: Creation) -> None:
        """Keep the object that the constructor has made."""
        self._object, self.methods = made, Methods(made)
        self.place = creation.place

    def settle(self, outcome: Outcome) -> None:
        """Note that the constructor has returned or failed."""
        if isinstance(outcome, bytes):
            self.actor.on_created()
        else:
            self.actor.settle(outcome)

    def post(self, message: Invoke | Demand) -> None:
        """Queue a call, or let its stream yield more items."""
        if type(message) is Invoke:
            self._queue.append(message)
            self.node.runner_here().add(self)
        elif type(message) is Demand and message.task in self.running:
            self.running[message.task].demand(message.limit)

    def send(self, _message: Leave) -> None:
        """End in an orderly way; the calls that were sent have ended."""
        if self.actor.is_serial:
            self.actor.settle(b"")
        else:
            self.close_soon()

    def step(self, runner: Runner) -> None:
        """Begin the next call, unless one runs."""
        is_serial = self.actor.is_serial
        if not is_serial and runner is not self.node.program:
            self.node.program.add(self)
        elif self._queue and not self.is_closing and not (is_serial and self.running):
            message = self._queue.popleft()
            self.begun = message.call
            call = self.running[message.call] = MethodCall(self, message)
            call.step(runner)

    def move_to(self, runner: Runner) -> bool:
        """Let a runner run the next calls; see `Call.move_to`."""
        if self.creation.state is not State.ENDED:
            return self.creation.move_to(runner)
        if not self.actor.is_serial:
            return runner is self.node.program
        runner.add(self)
        return all(call.runner is runner for call in self.running.values())

    def drop(self, number: int) -> None:
        """Stop a call, or do not begin it."""
        if number in self.running:
            self.running[number].stop()
            return
        self._queue = deque(each for each in self._queue if each.call != number)
        self.actor.on_answer(dropped(number))

    def on_ended(self, call: MethodCall, answer: Done | Failed) -> None:
        """Answer a call whose code has ended; the next may begin."""
        del self.running[call.id]
        call.receiver = None  # only the collector frees the call, perhaps late
        if self._queue:
            call.runner.add(self)
        if self.actor.worker is self:
            self.actor.on_answer(answer)
        self._free()

    def close_soon(self) -> None:
        """Stop the coroutines of the actor, run its `close()`, and end."""
        self.is_closing = True
        closing = asyncio.Task(
            self._close(), loop=self.node.loop, name=f"close of {self.name}"
        )
        self.node.closing.add(closing)
        closing.add_done_callback(self.node.closing.discard)

    async def _close(self) -> None:
        for call in list(self.running.values()):
            call.stop()
        try:
            close = close_method(self._object)
            if close is not None:
                await driven(self.place, close())
        except Exception:  # noqa: BLE001 - shown; the actor ends in any case
            sys.excepthook(*sys.exc_info())
        await cancel_all(self.started)
        self.actor.settle(b"")
        self.end()

    def end(self) -> None:
        """Stop what runs, and free the object."""
        if self._is_over:
            return
        self._is_over, self.peer = True, None
        self._queue.clear()
        self.creation.stop()
        for call in list(self.running.values()):
            call.stop()
        end_started(self.children, self.started)
        self._free()

    def _free(self) -> None:
        """Free the object once no code of it runs."""
        if not self._is_over or self.running:
            return
        if self._object is not None:
            with self.place:  # its `__del__` may read the environment
                self._object, self.methods = None, Methods(None)
            if not self.actor.is_serial:
                # Its asyncio tasks refer to it, and it to them.
                self.node.loop.call_soon(gc.collect, context=Context())
        if self.actor.state is ActorState.DEAD:
            self.actor.note_gone()


class InlineActor(Actor):
    """An actor of an inline node.

    Attributes:
        payload: the arguments of its constructor.
        restarts: how often it may be made again after a kill; -1 for no limit.
        process: its present or last one.
    """

    payload = b""
    restarts = 0
    process: Process

    def call(
        self, method: str, payload: bytes, receiver: Receiver, caller: int = 0
    ) -> CallId:
        """Call a method; the running code is the caller."""
        running = running_call.get()
        if running is not None:
            caller = running.actor_id or running.id
        return super().call(method, payload, receiver, caller)

    def ask(self, query: str, receiver: Receiver) -> CallId:
        """Answer a query; let code that waits run the constructor."""
        number = super().ask(query, receiver)
        if query == READY:
            self.process.creation.move_to(self.process.node.runner_here())
        return number


class InlineActors(Register):
    """The actors of one node; see `engines.base.ActorsPort`."""

    def __init__(self, node: InlineNode) -> None:
        # All at once: plain code that waits holds up the loop.
        super().__init__(node.loop, self._check, Slices(node.loop, inf))
        self._node = node

    def _check(self, func: FunctionSpec, payload: bytes) -> None:
        if func.actor is not None and func.actor.mode == THREADED:
            raise NodeError(
                f"{func.spec.name} has plain methods that run concurrently, by "
                f"max_concurrency or concurrency_groups. A node of "
                f"init(address='inline') runs all code in one thread: leave these "
                f"options out, make the methods `async def`, or open a node with "
                f"address='local'."
            )
        self._node.check(func, payload)

    def known(self, actor: int) -> Actor:
        """Return an actor that lives or has handles.

        Raises:
            ActorDiedError: it has ended.
        """
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        return found

    def owner_of(self, number: int) -> InlineActor | None:
        """Return the actor of an unanswered call."""
        for actor in self.all():
            if actor.waiting.number_of(number) in actor.calls:
                assert isinstance(actor, InlineActor), actor
                return actor
        return None

    def new_actor(self, func: FunctionSpec, key: tuple[str, str] | None) -> InlineActor:
        """See `Register`."""
        return InlineActor(func, self, key)

    def start(self, actor: Actor, payload: bytes, _client: ClientId) -> int:
        """See `Register`."""
        assert isinstance(actor, InlineActor), actor
        actor.id = self._node.new_id()
        actor.payload, actor.restarts = payload, actor.func.spec.max_retries
        self._make(actor)
        return actor.id

    def _make(self, actor: InlineActor) -> None:
        actor.process = Process(actor, self._node)
        actor.process.creation.enqueue(self._node.runner_here())

    def drop(self, actor: Actor, number: CallId) -> None:
        """See `Register`."""
        assert isinstance(actor, InlineActor), actor
        actor.process.drop(number)

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor at once; make another object if it may restart."""
        found = self.get(actor)
        if not isinstance(found, InlineActor) or found.state is ActorState.DEAD:
            return
        if no_restart:
            found.die(ActorDiedError(f"{found.name} was killed.", found.name))
        elif not found.restarts:
            found.die(killed_for_good(found.name))
        else:
            found.restarts -= found.restarts > 0
            if found.worker is not None:  # else its constructor has not begun
                self._restart(found)

    def _restart(self, actor: InlineActor) -> None:
        actor.on_killed()
        lost = actor.lose(actor.process.begun)
        actor.process.end()
        for receiver in lost:
            settle(receiver, describe_loss(actor.name, None, is_restarting=True))
        actor.is_killed = False
        self._make(actor)

    def room(self, actor: int) -> tuple[int | None, str]:
        """See `Register`."""
        func = self.known(actor).func
        assert func.actor is not None, func
        request, lends = func.spec.shape.request, not func.actor.keeps_cpus
        return room_for(self._node.ledger, request, lends), str(request)

    def on_idle(self, actor: Actor) -> None:
        """See `Register`."""
        if actor.state is ActorState.PENDING:
            actor.die(died(actor.name, actor.why_idle))
        else:
            actor.leave(actor.why_idle)

    def on_dead(self, actor: Actor) -> None:
        """See `Register`."""
        super().on_dead(actor)
        assert isinstance(actor, InlineActor), actor
        if not actor.process.is_closing:
            actor.process.end()

    def close(self) -> None:
        """Fail all calls, and end the actors; those that have one run `close()`."""
        for actor in self.all():
            assert isinstance(actor, InlineActor), actor
            if actor.state is ActorState.ALIVE and not actor.is_serial:
                actor.process.close_soon()
            why = f"the node was shut down before {actor.name} had ended."
            actor.die(NodeClosedError(why))
