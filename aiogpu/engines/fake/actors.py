"""Actors in the program's thread: an object with a queue of calls.

Plain methods run one at a time. The methods of a class with `async def` methods run on
the program's loop, up to the limits of their groups. The calls of one caller begin in
the order in which they were made.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import method_called, no_call_to_report
from aiogpu.core.resources.placement_group import room_for
from aiogpu.engines.fake.calls import (
    Call,
    InlineNode,
    Place,
    Runner,
    State,
    driven,
    running_call,
)
from aiogpu.errors import (
    ActorDiedError,
    AiogpuError,
    DeadlockError,
    NodeClosedError,
    NodeError,
)
from aiogpu.serialization.exceptions import LEFT, why_not_made
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_whole
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED, Failed, plain_name
from aiogpu.worker.actors import Methods
from aiogpu.worker.async_actor import cancel_all, close_method
from aiogpu.worker.invoke import Callables, Constructor

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver

_NO_HANDLE: Final = "its last handle was released."


class Creation(Call):
    """The call of an actor's constructor.

    Attributes:
        actor: the actor.
    """

    def __init__(self, actor: InlineActor, number: int, payload: bytes) -> None:
        super().__init__(actor.node, number, actor.func, payload, None, None)
        self.actor = actor
        self.limit = 0

    @property
    def is_coroutine(self) -> bool:
        """False: a constructor is plain code."""
        return False

    def target(self) -> tuple[Callables, Any]:
        """Return the constructor, which passes the object to the actor."""
        cls = self.node.learn(self.func)
        return Constructor(self.node.functions, self.actor.keep), cls

    def make_place(self) -> Place:
        """Return what all code of the actor sees."""
        self.actor.place = self.node.place(self.func, self.actor.id, self.actor.id)
        return self.actor.place

    def report(self, payload: bytes) -> None:
        """Refuse: no caller waits for a constructor.

        Raises:
            MisuseError: always.
        """
        raise no_call_to_report()

    def cancel_started(self) -> None:
        """Do nothing: the asyncio tasks are the actor's."""

    def stop_children(self) -> None:
        """Do nothing: the children are the actor's."""

    def stop(self, outcome: Exception | Failed | None = None) -> None:
        """End the actor, if an outcome is given; see `Call.stop`."""
        super().stop()
        if outcome is not None and self.actor.creation is self:
            self.on_failed(outcome, outcome)  # type: ignore[arg-type]

    def on_done(self, payload: bytes) -> None:
        """Note that the actor can take calls."""
        self.actor.on_made(self)

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Note that the actor could not be made."""
        from aiogpu.runtime.actors.actor import died

        if self.actor.creation is self:
            why = why_not_made(failed) if type(failed) is Failed else str(error)
            dead = died(self.actor.name, why)
            dead.__cause__ = error
            self.actor.die(dead)


class MethodCall(Call):
    """One call of a method.

    Attributes:
        actor: the actor.
        method: name of the method on the wire.
        group: its concurrency group.
        retries_left: how often it is repeated if the actor restarts.
    """

    def __init__(
        self,
        actor: InlineActor,
        number: int,
        method: str,
        payload: bytes,
        receiver: Receiver,
        parent: Call | None,
    ) -> None:
        super().__init__(actor.node, number, actor.func, payload, receiver, parent)
        self.actor = actor
        self.method = method
        self.group = actor.terms.groups.get(method, DEFAULT_GROUP)
        self.limit = actor.terms.windows.get(method, 0)
        self.retries_left = actor.terms.max_task_retries
        self.children, self.started = actor.children, actor.started
        self._retries = 0

    @property
    def name(self) -> str:
        """The name in errors."""
        return f"{self.func.spec.name}.{plain_name(self.method)}"

    @property
    def is_coroutine(self) -> bool:
        """True for a class with coroutine methods."""
        return self.actor.is_async

    @property
    def run_timeout(self) -> float | None:
        """Seconds that the method may run."""
        return self.actor.terms.run_limits.get(self.method)

    def target(self) -> tuple[Callables, Any]:
        """Return the object's methods, and the name of this one."""
        return self.actor.methods, self.method

    def make_place(self) -> Place:
        """Return what all code of the actor sees."""
        return self.actor.place

    def set_context(self) -> None:
        """Set the variables of the context in which the code runs."""
        super().set_context()
        method_called.set((self.method, self.id))

    def make_ready(self) -> None:
        """Let the actor run its next call."""
        self.runner.add(self.actor)

    def producers(self) -> list[int]:
        """Return the calls that must end before this one."""
        actor = self.actor
        if self.state is not State.WAITING:
            return []
        if actor.creation is not None:
            return [actor.creation.id, *super().producers()]
        earlier = [call for call in actor.queue if call.id <= self.id]
        return [task for call in earlier for task in Call.producers(call)]

    def move_to(self, runner: Runner) -> list[int]:
        """Let a runner run this call; return the calls that must end before it."""
        if self.state is State.WAITING and self.runner is not runner:
            self.runner = runner
            runner.add(self.actor)
            return self.producers()
        return super().move_to(runner)

    def is_blocked(self, runner: Runner) -> bool:
        """Return True if it, or an earlier call, cannot go on; see `Call`."""
        if self.state is State.WAITING:
            running = self.actor.running.values()
            return not self.actor.is_async and any(
                call.is_blocked(runner) for call in running
            )
        return super().is_blocked(runner)

    def deadlock(self, why: str) -> DeadlockError:
        """Return the error of a wait for this call that could never end."""
        if not self.actor.running or self in self.actor.running.values():
            return super().deadlock(why)
        name = self.func.spec.name
        return DeadlockError(
            f"{self.name} was called by code for which a method of {name} waits, and "
            f"its methods run one at a time. The wait could never end. Call the method "
            f"directly, by self, or let the first method return before."
        )

    def cancel_started(self) -> None:
        """Do nothing: the asyncio tasks are the actor's."""

    def stop_children(self) -> None:
        """Do nothing: the children are the actor's."""

    def on_failed(self, failed: Failed, error: Exception) -> None:
        """Fail the call; `exit_actor()` also ends the actor."""
        if failed.kind == LEFT:
            from aiogpu.runtime.actors.actor import died

            self.actor.leave("a call ended it by exit_actor().")
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
    """One actor; see `engines.base.ActorPort`.

    Attributes:
        node: the node.
        id: its number.
        func: the class.
        key: its namespace and name, or None.
        holders: the number of handles; it ends with the last.
        terms: how its calls run.
        is_async: the class has coroutine methods.
        life: see `Life`.
        creation: the call of its constructor; None once that has returned.
        methods: the methods of the object.
        place: what its code sees.
        queue: calls that have not begun.
        running: calls that have begun.
        children, started: see `Call`.
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
        self.id = actors.node.new_id()
        self.func = func
        self.key = key
        self.holders = 1 + func.spec.is_detached
        self.terms = func.actor
        self.is_async = func.actor.mode == ASYNC
        self.life = Life.PENDING
        self.creation: Creation | None = None
        self.methods: Methods
        self.place: Place
        self.queue: deque[MethodCall] = deque()
        self.running: dict[int, MethodCall] = {}
        self.children: dict[int, Call] = {}
        self.started: set[asyncio.Task[Any]] = set()
        self._actors = actors
        self._payload = payload
        self._object: Any = None
        self._error: Exception | None = None
        self._why_left = ""
        self._is_ending = False  # its `async with` block was left
        self._is_gone = False
        self._restarts = func.spec.max_retries
        self._ready: list[Receiver] = []
        self._gone: list[Receiver] = []
        self._lost: dict[int, Receiver] = {}
        self._create(self.id)

    def __repr__(self) -> str:
        return f"<InlineActor {self.id} {self.name} {self.life.value}>"

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.func.spec.name

    @property
    def class_name(self) -> str:
        """The name of the class."""
        named = "" if self.key is None else f" {self.key[1]!r}"
        return self.name.removesuffix(named)

    # Its object.

    def _create(self, number: int) -> None:
        self.creation = Creation(self, number, self._payload)
        self.creation.children, self.creation.started = self.children, self.started
        self.creation.enqueue(self.node.runner_here())

    def keep(self, made: object) -> None:
        """Keep the object that the constructor has made."""
        self._object, self.methods = made, Methods(made)

    def on_made(self, creation: Creation) -> None:
        """Note that the constructor has returned."""
        if self.creation is not creation:
            self._drop_object()  # the actor was killed meanwhile
            return
        self.creation, self.life = None, Life.ALIVE
        self._settle(self._ready)
        if self.queue:
            creation.runner.add(self)
        self.end_if_idle()

    def _drop_object(self) -> None:
        with self.place:  # its `__del__` may read the environment
            self._object, self.methods = None, Methods(None)

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
        number = self.node.new_id()
        call = MethodCall(self, number, method, payload, receiver, parent)
        self.queue.append(call)
        call.enqueue(runner)
        return number

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method for code on the program's loop; see `ActorPort.call`."""
        caller = running_call.get()
        return self.submit(method, payload, receiver, caller, self.node.program)

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

    @property
    def _takes_no_calls(self) -> bool:
        return self._is_ending or self.life in (Life.LEAVING, Life.DEAD)

    def _refuse(self, receiver: Receiver) -> None:
        from aiogpu.runtime.actors.actor import leaving

        receiver.settle(self._copy_of_error() or leaving(self.name))

    def _copy_of_error(self) -> Exception | None:
        """Return a copy of the error, since raising an error extends its traceback."""
        error = self._error
        if error is None:
            return None
        copy = NodeClosedError(str(error))
        if isinstance(error, ActorDiedError):
            copy = ActorDiedError(str(error), error.actor)
        copy.__cause__ = error.__cause__
        return copy

    # Its handles.

    def holder(self) -> Hold:
        """Return what counts as a handle; see `ActorPort.holder`."""
        return Hold(self)

    def pass_on(self, hold: object) -> None:
        """Note that a handle is being pickled; see `ActorPort.pass_on`."""
        add_actor(self.id, hold)

    def release(self) -> None:
        """Count one handle less."""
        self.holders -= 1
        self.end_if_idle()
        self._actors.forget(self)

    def await_ready(self, receiver: Receiver) -> None:
        """Settle a receiver when the constructor has returned or failed."""
        if self._takes_no_calls:
            self._refuse(receiver)
        elif self.creation is None:
            receiver.settle(NONE_PAYLOAD)
        else:
            self._ready.append(receiver)
            self.node.move((self.creation.id,), self.node.runner_here())

    def await_loss(self, receiver: Receiver) -> int:
        """Settle a receiver when the object is lost; see `ActorPort.await_loss`."""
        if self._takes_no_calls or self.creation is not None:
            receiver.settle(NONE_PAYLOAD)
            return 0
        number = self.node.new_id()
        self._lost[number] = receiver
        return number

    def forget_wait(self, number: int) -> None:
        """Withdraw a request of `await_loss`."""
        self._lost.pop(number, None)

    def await_end(self, receiver: Receiver) -> None:
        """Settle a receiver when no code of the actor runs any more."""
        if self._is_gone:
            receiver.settle(NONE_PAYLOAD)
        else:
            self._gone.append(receiver)

    @staticmethod
    def _settle(receivers: list[Receiver]) -> None:
        waiting, receivers[:] = receivers[:], []
        for receiver in waiting:
            receiver.settle(NONE_PAYLOAD)

    def _tell_loss(self) -> None:
        waiting, self._lost = self._lost, {}
        self._settle(list(waiting.values()))

    # Its end.

    def terminate(self) -> None:
        """End after the calls made so far."""
        self._is_ending = True
        self._tell_loss()
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """End if no more calls can come and none is left."""
        if self.life is Life.DEAD and not self.running and self._object is not None:
            self._be_gone()
        if (self.holders and not self._is_ending) or self.queue or self.running:
            return
        why = _NO_HANDLE
        if self.holders:
            why = "its `async with` block was left."
        if self.life is Life.ALIVE:
            self.leave(why)
        elif self.life is Life.PENDING and self._has_not_begun:
            from aiogpu.runtime.actors.actor import died

            self.die(died(self.name, why))

    @property
    def _has_not_begun(self) -> bool:
        return self.creation is not None and self.creation.state is State.WAITING

    def leave(self, why: str) -> None:
        """End in an orderly way: stop its calls, and run `async def close`."""
        if self.life is not Life.ALIVE:
            return
        self.life, self._why_left = Life.LEAVING, why
        self._tell_loss()
        self._actors.free_name(self)
        if self.is_async:
            self._actors.close_soon(self)
        else:
            self.die_of_leaving()

    def die_of_leaving(self) -> None:
        """End an actor that has left."""
        from aiogpu.runtime.actors.actor import died

        self.die(died(self.name, self._why_left))

    async def close(self) -> None:
        """Stop the coroutines of an actor, and run its `close()` if it has one."""
        for call in list(self.running.values()):
            from aiogpu.runtime.actors.actor import died

            call.stop(died(self.name, self._why_left))
        try:
            close = close_method(self._object)
            if close is not None:
                await driven(self.place, close())
        except Exception:  # noqa: BLE001 - the actor ends in any case
            sys.excepthook(*sys.exc_info())
        await cancel_all(self.started)
        self.die_of_leaving()

    def die(self, error: Exception) -> None:
        """Fail all present and later calls, and stop what runs."""
        if self.life is Life.DEAD:
            return
        self.life, self._error = Life.DEAD, error
        self._actors.free_name(self)
        self._tell_loss()
        creation, self.creation = self.creation, None
        if creation is not None:
            creation.stop()
        waiting, self._ready = self._ready, []
        for receiver in waiting:
            self._refuse(receiver)
        for call in (*self.running.values(), *list(self.queue)):
            call.stop(self._copy_of_error())
        for task in self.started:
            task.cancel()
        for child in list(self.children.values()):
            if not child.is_kept:
                child.disown()
        if not self.running:
            self._be_gone()

    def death_by(self, error: Exception) -> ActorDiedError:
        """Return the error of an actor that another error has ended."""
        from aiogpu.runtime.actors.actor import died

        death = died(self.name, str(error))
        death.__cause__ = error
        return death

    def close_with_node(self) -> None:
        """End with the node: run `close()`, and fail all calls."""
        if self.life is Life.ALIVE and self.is_async:
            self.leave("its node was shut down.")
        elif self.life is not Life.LEAVING:
            self.die(
                NodeClosedError(f"the node was shut down before {self.name} had ended.")
            )

    def _be_gone(self) -> None:
        """Note that no code of the actor runs any more."""
        if self._object is not None:
            self._drop_object()
        self._is_gone = True
        self._settle(self._gone)
        self._actors.forget(self)

    def kill(self, no_restart: bool) -> None:
        """End at once; make another object if the actor may restart."""
        if self.life is Life.DEAD:
            return
        if no_restart:
            self.die(ActorDiedError(f"{self.name} was killed.", self.name))
        elif not self._restarts:
            from aiogpu.runtime.actors.actor import killed_for_good

            self.die(killed_for_good(self.name))
        else:
            self._restarts -= self._restarts > 0
            self._restart()

    def _restart(self) -> None:
        from aiogpu.runtime.workers.death import describe_loss

        self.life = Life.PENDING
        self._tell_loss()
        running, self.running = self.running, {}
        for call in reversed(running.values()):
            receiver = call.receiver
            if call.retries_left and receiver is not None:
                again = MethodCall(
                    *(self, self.node.new_id(), call.method, call.payload),
                    *(receiver, call.parent),
                )
                again.retries_left = call.retries_left - (call.retries_left > 0)
                self.queue.appendleft(again)
                again.enqueue(self.node.program)
                call.stop()
            else:
                call.stop(describe_loss(self.name, None, is_restarting=True))
        for task in self.started:
            task.cancel()
        creation = self.creation
        if creation is not None:
            creation.stop()
        elif self._object is not None:
            self._drop_object()
        self._create(self.node.new_id())


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

    def __repr__(self) -> str:
        return f"<InlineActors {len(self._actors)}>"

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
            actor = self._create(func, payload, key, get_if_exists)
        except AiogpuError as error:
            if public:  # the caller may have passed the actor on already
                self._refused[public] = error
            raise
        if public:
            self._actors[public] = actor
        return actor

    def _create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> InlineActor:
        if func.actor is not None and func.actor.mode == THREADED:
            raise NodeError(
                f"{func.spec.name} has plain methods that run concurrently, by "
                f"max_concurrency or concurrency_groups. A node of "
                f"init(address='inline') runs all code in one thread: leave these "
                f"options out, make the methods `async def`, or open a node with "
                f"address='local'."
            )
        self.node.check(func, payload)
        if key is not None and key in self._named:
            if get_if_exists:
                return self.find(key)  # type: ignore[return-value]
            from aiogpu.runtime.actors.actor import name_taken

            raise name_taken(key[1])
        actor = InlineActor(self, func, payload, key)
        self._actors[actor.id] = actor
        if key is not None:
            self._named[key] = actor
        return actor

    def find(self, key: tuple[str, str]) -> InlineActor | None:
        """Find a living actor by its name; see `ActorsPort.find`."""
        actor = self._named.get(key)
        if actor is not None:
            actor.holders += 1
        return actor

    def held(self, actor: int, name: str) -> InlineActor:
        """Return an actor for which the caller holds a handle; see `ActorsPort.held`."""
        found = self.held_by_caller(actor)
        found.holders += 1
        return found

    def held_by_caller(self, actor: int) -> InlineActor:
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

    def free_name(self, actor: InlineActor) -> None:
        """Free the name of an actor that ends."""
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]

    def forget(self, actor: InlineActor) -> None:
        """Forget an actor that is dead and has no handles."""
        if actor.life is Life.DEAD and actor.holders <= 0:
            for number in [key for key, one in self._actors.items() if one is actor]:
                del self._actors[number]

    def close_soon(self, actor: InlineActor) -> None:
        """Run the `close()` of an actor on the program's loop."""
        closing = asyncio.Task(
            actor.close(), loop=self.node.loop, name=f"close of {actor.name}"
        )
        self.closing.add(closing)
        closing.add_done_callback(self.closing.discard)

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """See `ActorsPort.tell_room`."""
        func = self.held_by_caller(actor).func
        assert func.actor is not None, func
        request = func.spec.shape.request
        room = room_for(self.node.ledger, request, not func.actor.keeps_cpus)
        receiver.settle(dump_whole((room, str(request))))

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        self.node.demand(number, limit)

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call, or a request of `await_loss`."""
        self.node.cancel(number)
        found = self._actors.get(actor)
        if found is not None:
            found.forget_wait(number)

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor at once; see `ActorsPort.kill`."""
        found = self._actors.get(actor)
        if found is not None:
            found.kill(no_restart)

    def terminate(self, actor: int) -> None:
        """End an actor after the calls that it was sent."""
        found = self._actors.get(actor)
        if found is not None:
            found.terminate()
