"""The actors of a cluster, for a program or a task.

Ray counts the handles in all processes, and ends an actor with its last handle. A call
that fails shows the end of an actor's process, or that its constructor has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from aiogpu.client.function_spec import FunctionSpec, placeholder_func
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray import cluster, values
from aiogpu.engines.ray.actor_process import encode_call
from aiogpu.engines.ray.calls import Calls, PendingCall, Stream
from aiogpu.engines.ray.cluster import Handle
from aiogpu.engines.ray.resources import METHODS_GROUP, stream_options
from aiogpu.engines.ray.values import Terms, actor_death, window_of
from aiogpu.errors import ActorDiedError, ActorNameError, MisuseError, NodeError
from aiogpu.runtime.actors.actor import died, leaving, name_taken
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.references import add_reference
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_whole, load_result
from aiogpu.wire import messages as wire

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import PlacementGroupSpec, Request

# One actor

LOOK_AGAIN: Final = 0.05
"""Seconds between two queries of an actor that restarts, or that was killed."""


class _Answer(NamedTuple):
    """The receiver of a query to an actor: passes every outcome to `note`."""

    note: Callable[[Any], object]

    def settle(self, outcome: Any) -> None:
        """Pass on the answer, or the failure."""
        self.note(outcome)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RayActor:
    """One actor; see `ActorPort`.

    Attributes:
        reference: Ray's handle, and the terms of its calls.
        func: its class, as far as this client knows it.
        actors: all actors of this client.
        is_made_here: it ends with this program at the latest.
        end: why it takes no calls, as far as this process knows.
        is_gone: it does not exist: its constructor has failed, or its placement or the
            cluster has gone. Else it was told to end.
    """

    reference: values.ActorReference
    func: FunctionSpec
    actors: RayActors
    is_made_here: bool = False
    end: wire.Failed | None = None
    is_gone: bool = False
    _leaving: Any = None
    _watchers: list[int] = field(default_factory=list)
    _methods: dict[tuple[str, int, int], Callable[..., Any]] = field(
        default_factory=dict
    )

    def __repr__(self) -> str:
        return f"<RayActor {self.name} {self.id}>"

    @property
    def id(self) -> int:
        """The actor's number, the same in all processes."""
        return self.reference.id

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.func.spec.name

    @property
    def _calls(self) -> Calls:
        """The calls of the client."""
        return self.actors.calls

    def holder(self) -> None:
        """Return None: Ray counts its own handles; see `ActorPort.holder`."""

    # Calls

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; return the call's number."""
        calls = self._calls
        number = calls.begin(self._new_call(receiver))
        if self.end is not None:
            calls.end(number, self.end)
        else:
            calls.when_ready(number, payload, partial(self._send, number, method))
        return number

    def _new_call(self, receiver: Receiver, **attributes: Any) -> PendingCall:
        self.actors.engine.check_open()
        return PendingCall(
            self.name,
            receiver,
            self._calls.loop.time(),
            actor=self.id,
            group=self.func.spec.shape.request.placement_group,
            **{"explain": self._explain, **attributes},
        )

    def _send(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        calls = self._calls
        call = calls.live[number]
        window = window_of(call.receiver)
        returns = arguments[2] if len(arguments) > 2 else 0
        remote = self._methods.get((method, returns, window))
        if remote is None:
            remote = self._method(method, returns, window)
        is_async = self.reference.terms.mode == wire.ASYNC
        if len(arguments) == 1:
            made = remote(encode_call(method.encode(), arguments[0]))
        else:
            made = remote(encode_call(method.encode()), *arguments)
        if window:
            Stream(calls, number, made, window, may_be_cancelled=is_async)
            return
        # Ray 2.60 loses the order of an actor's calls if a waiting plain call is
        # cancelled: it hung after 30 pairs of calls, with the first of each cancelled
        # at once.
        call.goes_on = not is_async
        calls.watch(number, made)

    def _method(self, method: str, returns: int, window: int) -> Callable[..., Any]:
        """Return Ray's remote function for a method, from a cache."""
        options = stream_options(window) if window else {}
        if self.reference.terms.mode == wire.THREADED:
            group = self.reference.terms.groups.get(method, wire.DEFAULT_GROUP)
            options["concurrency_group"] = group or METHODS_GROUP
        if returns > 1:
            options["num_returns"] = returns
        handle = self.reference.handle
        called = handle.aiogpu_stream if window else handle.aiogpu_call
        remote: Callable[..., Any] = (
            called.options(**options) if options else called
        ).remote
        self._methods[method, returns, window] = remote
        return remote

    # Begin and end

    def ask(self, query: str, receiver: Receiver) -> int:
        """Settle a receiver with the answer to a query; see `ActorPort.ask`."""
        if query == wire.LOST:
            return self._await_loss(receiver)
        if query == wire.CAPACITY:
            room = self.actors.engine.room_for(self.func)
            receiver.settle(dump_whole((room, str(self.func.spec.shape.request))))
        elif query == wire.READY and self.end is not None:
            receiver.settle(self.end)
        elif query == wire.ENDED and self.is_gone:
            receiver.settle(NONE_PAYLOAD)
        else:
            self._ask_process(query, receiver)
        return 0

    def _ask_process(self, query: str, receiver: Receiver) -> None:
        """Ask whether the constructor has returned, or wait for the process to leave.

        Ray answers when the process has ended, too.
        """
        note = _Answer(partial(self._note, query, receiver))
        number = self._calls.begin(self._new_call(note, goes_on=True))
        ref = self._leaving or self.reference.handle.aiogpu_ready.remote()
        self._calls.watch(number, ref)

    def _note(self, query: str, receiver: Receiver, answer: Any) -> None:
        has_failed = isinstance(answer, wire.Failed | Exception)
        is_restarting = isinstance(answer, ActorDiedError) and answer.is_restarting
        if query == wire.READY and not is_restarting:
            receiver.settle(answer if has_failed else NONE_PAYLOAD)
        elif query == wire.ENDED and has_failed:
            if self._leaving is not None:
                left = died(self.name, "its `async with` block was left.")
                self.end = pack_own_error(left)
            receiver.settle(NONE_PAYLOAD)
        elif query == wire.ENDED and self.end is None:
            self._await_loss(receiver)
        else:  # it restarts; or it was killed, and Ray has still to do it
            self._calls.loop.call_later(LOOK_AGAIN, self._ask_again, query, receiver)

    def _ask_again(self, query: str, receiver: Receiver) -> None:
        try:
            self.ask(query, receiver)
        except NodeError as error:
            receiver.settle(error)

    def _await_loss(self, receiver: Receiver) -> int:
        """Settle a receiver when the process is lost, which a failed call shows."""
        number = self._calls.begin(self._new_call(receiver, explain=None))
        self._watchers.append(number)
        if self.end is not None:
            self._note_loss()
        return number

    def _note_loss(self) -> None:
        watchers, self._watchers = self._watchers, []
        for number in watchers:
            self._calls.end(number, NONE_PAYLOAD)

    def kill(self, *, may_restart: bool) -> None:
        """End its process at once."""
        if self.is_gone:
            return
        if not may_restart:
            killed = ActorDiedError(f"{self.name} was killed.", self.name)
            self.end, self._leaving = pack_own_error(killed), None
        cluster.kill(self.reference.handle, no_restart=not may_restart)
        self._note_loss()

    def leave(self) -> None:
        """End the actor after the calls sent before."""
        if self.end is not None:
            return
        self.end = pack_own_error(leaving(self.name))
        sent = self._calls.sent_to(self.id)
        self._leaving = self.reference.handle.aiogpu_leave.remote(sent)
        self._note_loss()

    def lose(self, failed: wire.Failed) -> None:
        """Note that the actor is gone, and why; Ray gets no further message."""
        self.end, self.is_gone, self._leaving = failed, True, None
        self._note_loss()

    def _explain(self, outcome: wire.Failed | Exception) -> wire.Failed | Exception:
        """Return why a call has failed, and note what this shows about the actor."""
        if isinstance(outcome, wire.Failed):
            if outcome.task == self.id and not self.is_gone:
                self.lose(outcome)  # its constructor has failed
                cluster.kill(self.reference.handle)
        elif isinstance(outcome, ActorDiedError):
            self._note_loss()
        else:
            return outcome
        return self.end if self.is_gone and self.end is not None else outcome


# All actors


class ActorsEngine(Protocol):
    """What actors need of their engine."""

    def check_open(self) -> None:
        """Raise `NodeError` if the cluster has gone."""

    def admit(self, func: FunctionSpec) -> Request:
        """Check that the cluster can run a function or class; see `Engine.submit`."""

    def needs_group(self, func: FunctionSpec) -> bool:
        """Return whether the placement group of a class is still to be found."""

    async def find_group(self, func: FunctionSpec) -> None:
        """Wait until the placement group of a class is found."""

    def new_actor(
        self, func: FunctionSpec, key: tuple[str, str] | None, arguments: Any
    ) -> Handle:
        """Make an actor; return Ray's handle."""

    def room_for(self, func: FunctionSpec) -> int | None:
        """Return how many such actors fit at the same time; None for any number."""


class RayActors:
    """All actors of a client; see `ActorsPort`.

    In this process Ray's handle is released with the last handle that refers to it.

    Attributes:
        calls: the calls of the client.
        engine: makes Ray's actors.
    """

    def __init__(self, calls: Calls, engine: ActorsEngine) -> None:
        self.calls = calls
        self.engine = engine
        self._actors: WeakValueDictionary[int, RayActor] = WeakValueDictionary()
        self._naming = asyncio.Lock()  # requests for a name keep their order

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
    ) -> RayActor | asyncio.Future[RayActor]:
        """Create an actor, or find it by its name; see `ActorsPort.create`."""
        assert not public, "Ray chooses the ids"
        self.engine.admit(func)
        if key is not None or self.engine.needs_group(func):
            made = self._create_later(func, payload, key, get_if_exists)
            return self.calls.loop.create_task(made)
        arguments = values.to_arguments(payload)
        return self._note_new(func, self.engine.new_actor(func, None, arguments))

    async def _create_later(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> RayActor:
        """Make an actor after queries of the cluster, which must not block the loop."""
        try:
            await self.engine.find_group(func)
        except Exception as error:
            raise actor_death(func.spec.name, error) from error
        arguments = values.to_arguments(payload)
        make = partial(self.engine.new_actor, func, key, arguments)
        if key is None:
            return self._note_new(func, make())
        async with self._naming:
            found = await self._find(key)
            if found is None:
                try:
                    return self._note_new(func, await cluster.in_thread(make))
                except ValueError:  # another process was faster
                    found = await self._find(key)
                    if found is None:
                        raise
        if not get_if_exists:
            raise name_taken(key[1])
        return found

    def _note_new(self, func: FunctionSpec, handle: Handle) -> RayActor:
        actor = self._note(values.refer_to(handle, _terms_of(func)), func)
        actor.is_made_here = not func.spec.is_detached
        return actor

    def _note(self, reference: values.ActorReference, func: FunctionSpec) -> RayActor:
        actor = self._actors.get(reference.id)
        if actor is None:
            actor = self._actors[reference.id] = RayActor(reference, func, self)
        elif actor.func.actor is None or actor.func.actor.interface is None:
            actor.func = func  # it has more facts than a received handle
        return actor

    def find(self, key: tuple[str, str]) -> asyncio.Future[RayActor | None]:
        """Find a living actor by its name, by a query of the cluster."""
        self.engine.check_open()
        return self.calls.loop.create_task(self._find_in_turn(key))

    async def _find_in_turn(self, key: tuple[str, str]) -> RayActor | None:
        async with self._naming:
            return await self._find(key)

    async def _find(self, key: tuple[str, str]) -> RayActor | None:
        namespace, name = key
        handle, described = await cluster.ask(partial(_look_up, name, namespace))
        if handle is None:
            return None
        if described is None:
            raise ActorNameError(
                f"the actor named {name!r} was made by plain Ray, and aiogpu has no "
                f"handle for it. Call it by Ray: `await ray.get_actor({name!r}, "
                f"namespace={namespace or cluster.NAMESPACE!r}).method.remote()`; in a "
                f"plain task `ray.get(...)`."
            )
        class_name, interface, terms = load_result(described)
        func = placeholder_func(class_name, interface)
        return self._note(values.refer_to(handle, Terms(*terms)), func)

    def held(self, actor: int, name: str = "actor") -> RayActor:
        """Return an actor that this process holds; see `ActorsPort.held`.

        Another thread's loop may have made it, or its handle was just received.
        """
        known = self._actors.get(actor)
        if known is None:
            reference = values.known_actors.get(actor)
            if reference is None:
                raise ActorDiedError(f"{name} is dead: it has no handle left.", name)
            known = self._note(reference, placeholder_func(name))
        return known

    def pass_on(self, actor: int, _hold: object) -> None:
        """Attach Ray's handle to the value that is being pickled.

        Raises:
            MisuseError: the value is neither part of a call nor of a result.
        """
        held = self.held(actor)
        if not add_reference(held.reference):
            raise MisuseError(
                f"on a Ray cluster the handle of {held.name} can only be pickled as a "
                f"part of arguments or results of tasks and actors. Pass it as an "
                f"argument."
            )

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        self.calls.demand(number, limit)

    def cancel(self, _actor: int, number: int) -> None:
        """Cancel a call."""
        self.calls.cancel(number)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `ActorsPort.stop`."""
        with suppress(NodeError):
            self.engine.check_open()
            if how == wire.AFTER_ALL:
                self.held(actor).leave()
            else:
                self.held(actor).kill(may_restart=how == wire.AGAIN)

    def evict(self, group: PlacementGroupSpec) -> None:
        """Note that the actors of a placement group end, since it is removed."""
        for actor in list(self._actors.values()):
            within = actor.func.spec.shape.request.placement_group
            if within is not None and within.key == group.key and not actor.is_gone:
                gone = removed(group.name, actor.name, REMOVED)
                actor.lose(pack_own_error(actor_death(actor.name, gone)))

    def lose(self, failed: wire.Failed) -> None:
        """Note that the cluster has gone: fail all calls without a message to Ray."""
        for actor in list(self._actors.values()):
            actor.lose(failed)

    def close(self) -> None:
        """End the actors that this program has made."""
        for actor in list(self._actors.values()):
            if actor.is_made_here and not actor.is_gone:
                cluster.kill(actor.reference.handle)
        self._actors.clear()


def _look_up(name: str, namespace: str) -> tuple[Handle | None, bytes | None]:
    """Return an actor by its name, and how aiogpu has described it, if it has."""
    handle = cluster.find_actor(name, namespace)
    if handle is None:
        return None, None
    return handle, cluster.load_bytes(f"{values.number_of(cluster.actor_id(handle))}")


def _terms_of(func: FunctionSpec) -> Terms:
    assert func.actor is not None, func
    return Terms(func.actor.mode, dict(func.actor.groups))


def describe(func: FunctionSpec, handle: Handle) -> None:
    """Store what another process needs to know of a named actor."""
    assert func.actor is not None, func
    terms = tuple(_terms_of(func))
    described = dump_whole((func.spec.name, func.actor.packed_interface(), terms))
    cluster.store_bytes(f"{values.number_of(cluster.actor_id(handle))}", described)
