"""A node of another process, which this program has joined: tasks, actors, leases.

What is asked of it goes over a Unix socket as a worker's own requests do. Requests are
checked here against what the node has, so that what it can never give is refused at
`.remote()`, as everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiogpu.client.function_spec import placeholder_func
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.membership import Membership
from aiogpu.errors import ActorNameError, DeserializationError, NodeError, ProtocolError
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.codec import LARGEST_PAYLOAD
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    AT_ONCE,
    AVAILABLE,
    CAPACITY,
    ENDED,
    READY,
    RESOURCES,
    STATUS,
    TIMELINE,
    WHY,
    WHY_TASK,
    ChildDemand,
    ChildFailed,
    Failed,
    Inquire,
    Submit,
    TakeLease,
    Withdraw,
)

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.client.references import Loan
    from aiogpu.observe.recorder import Span
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.serialization.references import PickledValue


class RemoteLink:
    """The way to values that have come from elsewhere; see `port.ValueLink`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self.fetch = engine.fetch
        self.discard = engine.discard
        self.cancel = engine.cancel

    async def why(self, name: str, task: int) -> Why:
        """Say why a task waits."""
        from aiogpu.observe.why import Why

        return await self._engine.why(task) or Why(name, task, "ended")


class FutureReceiver:
    """Waits for what was asked of the node.

    Attributes:
        future: has the answer.
    """

    def __init__(
        self,
        future: asyncio.Future[Any],
        load: Callable[[bytes], Any] | None = None,
    ) -> None:
        """Wait.

        Args:
            future: gets the answer.
            load: reads it; as what a node says of itself unless given.
        """
        self.future = future
        self._load = load

    def receive(self, payload: bytes) -> None:
        """It has come."""
        load = self._load
        if load is None:
            # Late: who only runs tasks never needs it.
            from aiogpu.observe.status_codec import status_codec

            load = status_codec.load
        try:
            answer = load(payload)
        except ProtocolError as error:
            self.fail(
                DeserializationError(
                    f"what the node says of itself cannot be read: {error}. Use the "
                    f"same version of aiogpu in the program and the node."
                )
            )
            return
        if not self.future.done():
            self.future.set_result(answer)

    def reject(self, failed: Failed) -> None:
        """The node cannot tell."""
        self.fail(unpack_failure(failed, "the node"))

    def fail(self, error: Exception) -> None:
        """It will not come."""
        if not self.future.done():
            self.future.set_exception(error)


class RemoteLeases:
    """Those that were granted and not given back; others wait as tasks do."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        self._held: dict[int, LeaseReceiver] = {}

    def __repr__(self) -> str:
        return f"<RemoteLeases {len(self._held)} held>"

    def take(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        engine = self._engine
        engine.know(func)
        asking = _Asking(self._held, receiver)
        asking.number = engine.expect(asking)
        engine.send(TakeLease(asking.number, func.id))
        return asking.number

    def give_back(self, number: int) -> None:
        """Give back one that was granted; nothing happens for others."""
        if self._held.pop(number, None) is not None:
            self._engine.send(Withdraw(0, number))

    def lose(self, failed: ChildFailed) -> None:
        """Somebody else has removed what was granted; nothing happens for others."""
        receiver = self._held.pop(failed.child, None)
        if receiver is not None:
            receiver.reject(Failed(*failed))

    def end(self, error: Exception) -> None:
        """The node has gone, and all leases with it."""
        held, self._held = list(self._held.values()), {}
        for receiver in held:
            receiver.fail(error)


class _Asking:
    """Waits for one lease."""

    def __init__(self, held: dict[int, LeaseReceiver], receiver: LeaseReceiver) -> None:
        self.number = 0
        self._held = held
        self._receiver = receiver

    def receive(self, payload: bytes) -> None:
        """It is granted."""
        self._held[self.number] = self._receiver
        self._receiver.receive(payload)

    def reject(self, failed: Failed) -> None:
        """It is refused."""
        self._receiver.reject(failed)

    def fail(self, error: Exception) -> None:
        """It will not come."""
        self._receiver.fail(error)


class RemoteActor:
    """One actor, as its calls reach it from here; see `ActorPort`."""

    def __init__(self, engine: RemoteEngine, hold: Loan, func: FunctionSpec) -> None:
        self.id = hold.id
        self.func = func
        self._engine = engine
        self._hold = hold

    def __repr__(self) -> str:
        return f"<RemoteActor {self.func.spec.name} {self.id}>"

    def holder(self) -> Loan:
        """What counts as a handle to it; see `ActorPort.holder`."""
        return self._hold

    def pass_on(self, hold: object) -> None:
        """A handle to it is being pickled; see `ActorPort.pass_on`."""
        add_actor(self.id, hold)

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; gives the call's number."""
        return self._engine.call(self.id, method, payload, receiver)

    def await_ready(self, receiver: Receiver) -> None:
        """Tell it when the constructor has returned, or why it never will."""
        self.call(READY, NONE_PAYLOAD, receiver)

    def await_end(self, receiver: Receiver) -> None:
        """Tell it when the actor's process has ended."""
        self.call(ENDED, NONE_PAYLOAD, receiver)


class RemoteActors:
    """All actors that can be reached; see `ActorsPort`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> RemoteActor | asyncio.Future[RemoteActor]:
        """Make an actor, or find the one of that name; see `ActorsPort.create`.

        The node refuses a name that is taken, and the actor's calls tell.
        """
        self._engine.check_open()
        self._engine.know(func)
        if key is not None and get_if_exists:
            return self._find_or_make(func, payload, key)
        return self._make(func, payload, key, False)

    def _find_or_make(
        self, func: FunctionSpec, payload: bytes, key: tuple[str, str]
    ) -> asyncio.Future[RemoteActor]:
        # Not a task: `asyncio.run` cancels all tasks before the program leaves.
        found, made = self.find(key), self._engine.loop.create_future()

        def take(answer: asyncio.Future[RemoteActor | None]) -> None:
            if made.done():
                return  # nobody waits for it any more
            try:
                found = answer.result() or self._make(func, payload, key, True)
                made.set_result(found)
            except Exception as error:  # noqa: BLE001 - it is told to who has asked
                made.set_exception(error)

        found.add_done_callback(take)
        self._note_lookup(made)
        return made

    def _note_lookup(self, lookup: asyncio.Future[Any]) -> None:
        """Have this program leave only after it is done."""
        lookups = self._engine.lookups
        lookups.add(lookup)
        lookup.add_done_callback(lookups.discard)

    def _make(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> RemoteActor:
        engine = self._engine
        actor = engine.make(func, payload, key, get_if_exists)
        return RemoteActor(engine, engine.own(actor), func)

    def find(self, key: tuple[str, str]) -> asyncio.Future[RemoteActor | None]:
        """The living actor of that name; asks the node."""
        engine = self._engine
        namespace, name = key
        found: asyncio.Future[RemoteActor | None] = engine.loop.create_future()
        engine.find(name, namespace, _Sought(engine, found))
        self._note_lookup(found)
        return found

    def held(self, actor: int, name: str = "actor") -> RemoteActor:
        """An actor of which a handle has come; see `ActorsPort.held`."""
        self._engine.check_open()
        hold = self._engine.actor(actor)
        return RemoteActor(self._engine, hold, placeholder_func(name))

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many of its kind can live at once; see `ActorsPort.tell_room`."""
        self._engine.call(actor, CAPACITY, NONE_PAYLOAD, receiver)

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        self._engine.send(ChildDemand(number, limit))

    def cancel(self, _actor: int, number: int) -> None:
        """Nobody wants a call's answer any more."""
        self._engine.cancel(number)

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End its process at once, and the actor unless it may restart."""
        self._engine.stop(actor, AT_ONCE if no_restart else AGAIN)

    def terminate(self, actor: int) -> None:
        """Have it end after what it was sent."""
        self._engine.stop(actor, AFTER_ALL)


def _found(engine: RemoteEngine, payload: bytes) -> RemoteActor:
    identity, of_class, interface = load_result(payload)
    func = placeholder_func(of_class, interface)
    return RemoteActor(engine, engine.own(identity), func)


class _Sought(FutureReceiver):
    """Waits for the actor of a name; None is for nobody."""

    def __init__(
        self, engine: RemoteEngine, future: asyncio.Future[RemoteActor | None]
    ) -> None:
        super().__init__(future, partial(_found, engine))

    def reject(self, failed: Failed) -> None:
        """Nobody has the name, or the node cannot tell."""
        error = unpack_failure(failed, "the node")
        if not isinstance(error, ActorNameError):
            self.fail(error)
        elif not self.future.done():
            self.future.set_result(None)


class RemoteEngine(Membership):
    """See above."""

    waits = None

    def __init__(
        self, path: str, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(path, options, loop)
        self.leases = RemoteLeases(self)
        self._actors: RemoteActors | None = None

    @property
    def link(self) -> RemoteLink:
        """The way to them."""
        return RemoteLink(self)

    @property
    def actors(self) -> RemoteActors:
        """The node's actors; see `Engine.actors`."""
        if self._actors is None:
            self._actors = RemoteActors(self)
        return self._actors

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self._loans.pack(outgoing)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`.

        As `NodeClient.submit` does, in fewer steps: a program submits by thousands, and
        from one thread.
        """
        if func.id not in self._declared:
            self.declare(func)
        if len(payload) > LARGEST_PAYLOAD:
            self._check(func, payload)
        number = self.new_number()
        self._receivers[number] = receiver
        message = Submit(0, number, func.id, payload)
        if self._loans.unnamed:
            self._loans.name(message)
        self._line.send(message)
        return number

    def know(self, func: FunctionSpec) -> None:
        """Have the node know a function; raises as `declare` does."""
        if func.id not in self._declared:
            self.declare(func)

    def declare(self, func: FunctionSpec) -> None:
        """Check what is the same for all calls of a function, and tell the node of it.

        Raises:
            InfeasibleError: the node can never give what it asks for.
            NodeError: the node has gone.
        """
        from aiogpu.engines.admission import check_func

        self.check_open()
        assert self._ledger is not None, self
        check_func(func, self._ledger)
        super().declare(func)

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        return self.leases.take(func, receiver)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        if not self.withdraw(task):
            self.leases.give_back(task)

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        found: dict[str, float] = await self._inquire(RESOURCES)
        return found

    async def available(self) -> dict[str, float]:
        """Return what is free of each."""
        found: dict[str, float] = await self._inquire(AVAILABLE)
        return found

    async def status(self) -> NodeStatus:
        """Who holds what, what waits and why, whosever it is."""
        found: NodeStatus = await self._inquire(STATUS)
        return found

    async def why(self, task: int) -> Why | None:
        """Return why a task of this program waits; see `Engine.why`."""
        found: Why | None = await self._inquire(WHY, task)
        return found

    async def timeline(self) -> list[Span]:
        """Return what has run on the node, where and when; see `observe.recorder`."""
        from aiogpu.observe.recorder import Span

        return [Span(*one) for one in await self._inquire(TIMELINE)]

    async def why_task(self, number: int) -> Why | None:
        """Return why a task waits, whosever it is; see `Engine.why_task`."""
        found: Why | None = await self._inquire(WHY_TASK, number)
        return found

    async def _inquire(self, what: str, number: int = 0) -> Any:
        self.check_open()
        told = FutureReceiver(self.loop.create_future())
        self.send(Inquire(self.expect(told), what, number))
        return await told.future

    def _take_stray(self, failed: ChildFailed) -> None:
        super()._take_stray(failed)
        self.leases.lose(failed)  # it was granted, and is no more

    def _end(self, error: NodeError) -> None:
        self._declared.clear()
        super()._end(error)
        self.leases.end(error)
