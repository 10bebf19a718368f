"""Actors in the program's thread: an object with a queue of calls.

Plain methods run one at a time. The methods of a class with `async def` methods run on
the program's loop, up to the limits of their groups. The calls of one caller begin in
the order in which they were made.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from contextvars import Context
from enum import Enum
from typing import TYPE_CHECKING, Any

from aiogpu.client.current import no_call_to_report
from aiogpu.core.resources.placement_group import room_for
from aiogpu.engines.inline.calls import (
    Call,
    InlineNode,
    Place,
    Runner,
    State,
    driven,
    running_call,
)
from aiogpu.errors import ActorDiedError, AiogpuError, NodeClosedError, NodeError
from aiogpu.serialization.exceptions import LEFT, why_not_made
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_whole
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    ASYNC,
    DEFAULT_GROUP,
    ENDED,
    LOST,
    READY,
    THREADED,
    Failed,
    plain_name,
)
from aiogpu.worker.actors import Methods
from aiogpu.worker.async_actor import cancel_all, close_method
from aiogpu.worker.invoke import Callables, Constructor

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Outcome, Receiver


def died(name: str, why: str, cause: BaseException | None = None) -> ActorDiedError:
    """Return the error of calls to a dead actor."""
    from aiogpu.runtime.actors.actor import died  # late: few programs need it

    error = died(name, why)
    error.__cause__ = cause
    return error


class CallOfActor(Call):
    """A constructor or method: what its code starts belongs to the actor.

    Attributes:
        actor: the actor.
    """

    def __init__(
        self,
        actor: InlineActor,
        payload: bytes,
        receiver: Receiver | None,
        parent: Call | None = None,
    ) -> None:
        super().__init__(actor.node, actor.func, payload, receiver, parent)
        self.actor = actor
        self.actor_id = actor.id or self.id
        self.children, self.started = actor.children, actor.started
        self.limit = self._retries = 0

    def end_started(self) -> None:
        """Do nothing: the actor stops them at its end."""


class Creation(CallOfActor):
    """The call of an actor's constructor; its receiver is the actor."""

    def __init__(self, actor: InlineActor, payload: bytes) -> None:
        super().__init__(actor, payload, actor)
        self.is_coroutine = False

    def target(self) -> tuple[Callables, Any]:
        """Return the constructor, which passes the object to the actor."""
        cls = self.node.learn(self.func)
        return Constructor(self.node.functions, self._keep), cls

    def _keep(self, made: object) -> None:
        if self.receiver is not None:  # else the actor was killed meanwhile
            self.actor.keep(made, self.place)

    def report(self, payload: bytes) -> None:
        """Refuse: no caller waits for a constructor.

        Raises:
            MisuseError: always.
        """
        raise no_call_to_report()

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Let the actor die of its constructor's error."""
        self.deliver(died(self.actor.name, why_not_made(failed), error))


class MethodCall(CallOfActor):
    """One call of a method.

    Attributes:
        group: its concurrency group.
    """

    def __init__(
        self,
        actor: InlineActor,
        method: str,
        payload: bytes,
        receiver: Receiver,
        parent: Call | None,
    ) -> None:
        super().__init__(actor, payload, receiver, parent)
        terms = actor.terms
        self.name = f"{self.func.spec.name}.{plain_name(method)}"
        self.called = method, self.id
        self.is_coroutine = actor.is_async
        self.run_timeout = terms.run_limits.get(method)
        self.group = terms.groups.get(method, DEFAULT_GROUP)
        self.limit = terms.windows.get(method, 0)

    def target(self) -> tuple[Callables, Any]:
        """Return the object's methods, and the name of this one."""
        return self.actor.methods, self.called[0]

    def make_ready(self) -> None:
        """Let the actor run its next call."""
        self.runner.add(self.actor)

    def move_to(self, runner: Runner) -> bool:
        """Let a runner run the calls of the actor up to this one; see `Call`."""
        actor = self.actor
        if self.state is not State.WAITING:
            return super().move_to(runner)
        if actor.creation is not None:
            return actor.creation.move_to(runner)
        runner.add(actor)
        return all(call.runner is runner for call in actor.running.values())

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Fail the call; `exit_actor()` also ends the actor."""
        if failed.kind == LEFT:
            why = "a call ended it by exit_actor()."
            self.actor.leave(died(self.actor.name, why))
            error = died(self.actor.name, "this call ended it by exit_actor().")
        self.deliver(error)

    def end(self) -> None:
        """Note that the code has stopped, or never begins; the next may begin."""
        super().end()
        self.actor.on_call_ended(self)


class Hold:
    """Counts as one handle of an actor until it is collected."""

    __slots__ = ("_actor",)

    def __init__(self, actor: InlineActor) -> None:
        self._actor = actor

    def __del__(self) -> None:
        self._actor.node.soon(self._actor.release)


class Life(Enum):
    """The state of an actor."""

    PENDING = "pending"
    """Its constructor has not returned; also during a restart."""
    ALIVE = "alive"
    LEAVING = "leaving"
    """It runs its `close()`, and takes no calls."""
    DEAD = "dead"


class InlineActor:
    """One actor; see `engines.base.ActorPort`. Receives the end of its constructor.

    Attributes:
        node: the node.
        func: the class.
        key: its namespace and name, or None.
        holders: the number of handles; it ends with the last.
        terms: how its calls run.
        is_async: the class has coroutine methods.
        life: see `Life`.
        children, started: see `Call`.
        creation: the call of its constructor; None once that has returned.
        id: its number, which is that of the first `creation`.
        methods: the methods of the object.
        queue: calls that have not begun.
        running: calls that have begun.
    """

    def __init__(
        self,
        actors: InlineActors,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
    ) -> None:
        assert func.actor is not None, func
        self.node = actors.node
        self.func = func
        self.key = key
        self.holders = 1 + func.spec.is_detached
        self.terms = func.actor
        self.is_async = func.actor.mode == ASYNC
        self.life = Life.PENDING
        self.children: dict[int, Call] = {}
        self.started: set[asyncio.Task[Any]] = set()
        self.queue: deque[MethodCall] = deque()
        self.running: dict[int, MethodCall] = {}
        self.methods = Methods(None)
        self._actors = actors
        self._payload = payload
        self._object: Any = None
        self._place: Place
        self._error: Exception | None = None
        self._is_ending = False  # its `async with` block was left
        self._restarts = func.spec.max_retries
        self._wait_for_start: list[Receiver] = []
        self._wait_for_loss: list[Receiver] = []
        self._wait_for_end: list[Receiver] = []
        self.id = 0
        self.creation: Creation | None = Creation(self, payload)
        self.id = self.creation.id
        self.creation.enqueue(self.node.runner_here())

    def __repr__(self) -> str:
        return f"<InlineActor {self.id} {self.name} {self.life.value}>"

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.func.spec.name

    # Its object.

    def keep(self, made: object, place: Place) -> None:
        """Keep the object that the constructor has made in a place."""
        self._object, self.methods, self._place = made, Methods(made), place

    def settle(self, outcome: Outcome) -> None:
        """Note that the constructor has returned or failed."""
        if not isinstance(outcome, bytes):
            error: Any = outcome
            if not isinstance(error, ActorDiedError | NodeClosedError):
                error = died(self.name, str(error), error)
            self.die(error)
            return
        creation, self.creation = self.creation, None
        assert creation is not None, self
        self.life = Life.ALIVE
        _settle(self._wait_for_start)
        if self.queue:
            creation.runner.add(self)
        self.end_if_idle()

    def _drop_object(self) -> None:
        if self._object is not None:
            with self._place:  # its `__del__` may read the environment
                self._object, self.methods = None, Methods(None)
            if self.is_async:  # its asyncio tasks refer to it, and it to them
                self.node.loop.call_soon(gc.collect, context=Context())

    # Its calls.

    def submit(
        self,
        method: str,
        payload: bytes,
        receiver: Receiver,
        parent: Call | None,
        runner: Runner,
    ) -> int:
        """Queue a call; return its number, 0 if the actor takes no more calls."""
        if self._takes_no_calls:
            self._refuse(receiver)
            return 0
        call = MethodCall(self, method, payload, receiver, parent)
        self.queue.append(call)
        call.enqueue(runner)
        return call.id

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method, from the program's loop; see `ActorPort.call`."""
        parent, program = running_call.get(), self.node.program
        return self.submit(method, payload, receiver, parent, program)

    def step(self, runner: Runner) -> None:
        """Begin the next call, if one may begin."""
        if self.is_async and runner is not self.node.program:
            self.node.program.add(self)
            return
        call = self._next_call()
        if call is None:
            return
        self.queue.remove(call)
        self.running[call.id] = call
        call.place = self._place
        if self.is_async and self.queue:
            runner.add(self)
        call.step(runner)

    def _next_call(self) -> MethodCall | None:
        """Return the first call that may begin.

        A call that waits for arguments holds back the later calls of its caller only:
        the arguments may depend on calls of others.
        """
        if self.life is not Life.ALIVE:
            return None
        held_back: set[Call | None] = set()
        for call in self.queue:
            if not call.is_ready:
                held_back.add(call.parent)
            elif call.parent not in held_back and self._has_room(call.group):
                return call
        return None

    def _has_room(self, group: str) -> bool:
        if not self.is_async:
            return not self.running
        running = sum(call.group == group for call in self.running.values())
        return running < self.terms.limits[group]

    def on_call_ended(self, call: MethodCall) -> None:
        """Note that a call has ended, or will never begin."""
        if self.running.pop(call.id, None) is None and call in self.queue:
            self.queue.remove(call)
        if self.queue:
            call.runner.add(self)
        self.end_if_idle()

    # Its handles, and waits for it.

    def holder(self) -> Hold:
        """Return what counts as a handle; see `ActorPort.holder`."""
        return Hold(self)

    def release(self) -> None:
        """Count one handle less."""
        self.holders -= 1
        self.end_if_idle()
        self._actors.forget(self)

    @property
    def _takes_no_calls(self) -> bool:
        return self._is_ending or self.life in (Life.LEAVING, Life.DEAD)

    def _refuse(self, receiver: Receiver) -> None:
        from aiogpu.runtime.actors.actor import _copy, leaving

        # A copy, since raising an error extends its traceback.
        error = self._error
        receiver.settle(leaving(self.name) if error is None else _copy(error))

    def ask(self, query: str, receiver: Receiver) -> int:
        """Settle a receiver with the answer to a query; see `ActorPort.ask`."""
        if query == READY:
            self._await_ready(receiver)
        elif query == LOST:
            self._await_loss(receiver)
        elif query == ENDED:
            self._wait_for_end.append(receiver)
            self._note_end()
        else:
            request, keeps_cpus = self.func.spec.shape.request, self.terms.keeps_cpus
            room = room_for(self.node.ledger, request, not keeps_cpus)
            receiver.settle(dump_whole((room, str(request))))
        return 0

    def _await_ready(self, receiver: Receiver) -> None:
        """Settle a receiver when the constructor has returned or failed."""
        if self._takes_no_calls:
            self._refuse(receiver)
        elif self.creation is None:
            receiver.settle(NONE_PAYLOAD)
        else:
            self._wait_for_start.append(receiver)
            self.creation.move_to(self.node.runner_here())

    def _await_loss(self, receiver: Receiver) -> None:
        """Settle a receiver when the object is lost, or takes no more calls."""
        if self._takes_no_calls or self.creation is not None:
            receiver.settle(NONE_PAYLOAD)
        else:
            self._wait_for_loss.append(receiver)

    def _note_end(self) -> None:
        if self.life is Life.DEAD and not self.running:
            self._drop_object()
            _settle(self._wait_for_end)
            self._actors.forget(self)

    # Its end.

    def terminate(self) -> None:
        """End after the calls made so far."""
        self._is_ending = True
        _settle(self._wait_for_loss)
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """End if no more calls can come and none is left."""
        self._note_end()
        if (self.holders > 0 and not self._is_ending) or self.queue or self.running:
            return
        why = "its last handle was released."
        if self.holders > 0:
            why = "its `async with` block was left."
        if self.life is Life.ALIVE:
            self.leave(died(self.name, why))
        elif self.creation is not None and self.creation.state is State.WAITING:
            self.die(died(self.name, why))

    def leave(self, error: Exception) -> None:
        """End in an orderly way: stop its calls, and run `async def close`.

        Args:
            error: fails present and later calls.
        """
        if self.life is not Life.ALIVE:
            return
        self.life = Life.LEAVING
        _settle(self._wait_for_loss)
        self._actors.free_name(self)
        if self.is_async:
            self._actors.start_close(self, error)
        else:
            self.die(error)

    async def close(self, error: Exception) -> None:
        """Stop the coroutines of an actor that leaves, and run its `close()`."""
        for call in list(self.running.values()):
            call.stop(error)
        try:
            close = close_method(self._object)
            if close is not None:
                await driven(self._place, close())
        except Exception:  # noqa: BLE001 - shown; the actor ends in any case
            sys.excepthook(*sys.exc_info())
        await cancel_all(self.started)
        self.die(error)

    def close_with_node(self) -> None:
        """End with the node: run `close()`, or fail what waits."""
        why = f"the node was shut down before {self.name} had ended."
        if self.life is Life.ALIVE:
            self.leave(NodeClosedError(why))
        elif self.life is Life.PENDING:
            self.die(NodeClosedError(why))

    def die(self, error: Exception) -> None:
        """Fail all present and later calls, and stop what runs."""
        if self.life is Life.DEAD:
            return
        self.life, self._error = Life.DEAD, error
        self._actors.free_name(self)
        _settle(self._wait_for_loss)
        waiting, self._wait_for_start = self._wait_for_start, []
        for receiver in waiting:
            self._refuse(receiver)
        for call in (*self.running.values(), *list(self.queue)):
            if call.receiver is not None:
                self._refuse(call.receiver)
            call.stop()
        self._stop_started()
        self._note_end()

    def _stop_started(self) -> None:
        """Stop the constructor, asyncio tasks and children of the object."""
        creation, self.creation = self.creation, None
        if creation is not None:
            creation.stop()
        for task in self.started:
            task.cancel()
        for child in list(self.children.values()):
            if not child.is_kept:
                child.disown()

    def kill(self, no_restart: bool) -> None:
        """End at once; make another object if the actor may restart."""
        if self.life is Life.DEAD:
            return
        if no_restart:
            self.die(ActorDiedError(f"{self.name} was killed.", self.name))
        elif not self._restarts:
            self.die(died(self.name, "it was killed, and has no restarts left."))
        else:
            self._restarts -= self._restarts > 0
            self._restart()

    def _restart(self) -> None:
        from aiogpu.runtime.workers.death import describe_loss

        self.life = Life.PENDING
        _settle(self._wait_for_loss)
        lost, self.running = self.running, {}
        for call in lost.values():
            call.stop(describe_loss(self.name, None, is_restarting=True))
        self._stop_started()
        self._drop_object()
        self.creation = Creation(self, self._payload)
        self.creation.enqueue(self.node.program)


def _settle(receivers: list[Receiver]) -> None:
    """Settle receivers that wait for an event, and forget them."""
    waiting, receivers[:] = receivers[:], []
    for receiver in waiting:
        receiver.settle(NONE_PAYLOAD)


class InlineActors:
    """The actors of one node; see `engines.base.ActorsPort`.

    Attributes:
        node: the node.
        closing: the asyncio tasks that run `close()` of actors.
    """

    def __init__(self, node: InlineNode) -> None:
        self.node = node
        self.closing: set[asyncio.Task[None]] = set()
        self._actors: dict[int, InlineActor] = {}
        self._named: dict[tuple[str, str], InlineActor] = {}
        self._refused: dict[int, Exception] = {}

    def all(self) -> list[InlineActor]:
        """Return the actors that live or have handles."""
        return list(dict.fromkeys(self._actors.values()))

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
    ) -> InlineActor:
        """Make an actor, or find it by its name; see `ActorsPort.create`."""
        try:
            self._check(func, payload)
            actor = self._named.get(key) if key is not None else None
            if actor is None:
                actor = InlineActor(self, func, payload, key)
                self._actors[actor.id] = actor
            elif get_if_exists:
                actor.holders += 1
            else:
                from aiogpu.runtime.actors.actor import name_taken

                raise name_taken(actor.key[1])  # type: ignore[index]
        except AiogpuError as error:
            if public:  # the caller may have passed the actor on already
                self._refused[public] = error
            raise
        if key is not None:
            self._named[key] = actor
        if public:
            self._actors[public] = actor
        return actor

    def _check(self, func: FunctionSpec, payload: bytes) -> None:
        if func.actor is not None and func.actor.mode == THREADED:
            raise NodeError(
                f"{func.spec.name} has plain methods that run concurrently, by "
                f"max_concurrency or concurrency_groups. A node of "
                f"init(address='inline') runs all code in one thread: leave these "
                f"options out, make the methods `async def`, or open a node with "
                f"address='local'."
            )
        self.node.check(func, payload)

    def find(self, key: tuple[str, str]) -> InlineActor | None:
        """Find a living actor by its name; see `ActorsPort.find`."""
        actor = self._named.get(key)
        if actor is not None:
            actor.holders += 1
        return actor

    def known(self, actor: int) -> InlineActor:
        """Return an actor that lives or has handles.

        Raises:
            ActorDiedError: it has ended.
        """
        found = self._actors.get(actor)
        if found is None:
            raise self._refused.get(actor) or ActorDiedError(
                f"the actor {actor} has ended, since its last handle was released."
            )
        return found

    def held(self, actor: int, name: str) -> InlineActor:
        """Return an actor for a handle of the caller; see `ActorsPort.held`."""
        found = self.known(actor)
        found.holders += 1
        return found

    def free_name(self, actor: InlineActor) -> None:
        """Free the name of an actor that ends."""
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]

    def forget(self, actor: InlineActor) -> None:
        """Forget an actor that is dead and has no handles."""
        if actor.life is Life.DEAD and actor.holders <= 0:
            for number in [key for key, one in self._actors.items() if one is actor]:
                del self._actors[number]

    def start_close(self, actor: InlineActor, error: Exception) -> None:
        """Run the `close()` of an actor on the program's loop."""
        name = f"close of {actor.name}"
        closing = asyncio.Task(actor.close(error), loop=self.node.loop, name=name)
        self.closing.add(closing)
        closing.add_done_callback(self.closing.discard)

    def pass_on(self, actor: int, hold: object) -> None:
        """Note that a handle is being pickled; see `ActorsPort.pass_on`."""
        add_actor(actor, hold)

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        self.node.demand(number, limit)

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call."""
        self.node.cancel(number)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `ActorsPort.stop`."""
        found = self._actors.get(actor)
        if found is None:
            return
        if how == AFTER_ALL:
            found.terminate()
        else:
            found.kill(no_restart=how != AGAIN)
