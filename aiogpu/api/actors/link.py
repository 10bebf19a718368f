"""A program's tie to one actor, shared by all handles to it in this process.

The actor knows how many hold a tie, and ends when nobody does. This file imports
asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from _thread import get_ident
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.api.actors.methods import PendingInterface, interface_in, stranger
from aiogpu.api.calls import host_beside_loop, may_use, request
from aiogpu.client.current import host_of_task, note_passed, passing, take_kept
from aiogpu.client.function_spec import placeholder_func
from aiogpu.errors import ActorNameError, AiogpuError, MisuseError, NodeClosedError
from aiogpu.observe.why import Why
from aiogpu.runtime.callers.caller import Then, carrying

if TYPE_CHECKING:
    from aiogpu.api.actors.methods import ActorInterface
    from aiogpu.api.calls import ResultGroup
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.session import Awaited, Session
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Client, Host, Receiver
    from aiogpu.engines.base import ActorPort, ActorsPort, Engine, Room


class NearSeveral(NamedTuple):
    """A call with several results that is made in a program's process.

    Attributes:
        link: the tie to the actor.
        method: what is called.
        payload: the pickled arguments.
    """

    link: ActorLink
    method: str
    payload: bytes

    def in_program(self, _session: object, several: ResultGroup) -> None:
        """Make it on the program's node."""
        several.stop, several.ask = self.link.cancel, self.link.why
        self.link.ask_actor(partial(self._call, several), several.fail)

    def _call(self, several: ResultGroup, actor: ActorPort) -> None:
        if not several.done():
            several.note(actor.call(self.method, self.payload, several))

    def by_client(self, client: Client, several: ResultGroup) -> None:
        """Make it for a task that runs in its program's process."""
        several.stop, several.ask = client.cancel, client.why
        self.link.ask_actor(
            lambda actor: several.note(
                client.call(actor.id, self.method, self.payload, several)
            ),
            several.fail,
        )


UNCHECKED: Final = 1 << 20
"""Bytes that any call may carry."""


class ActorLink:
    """See above.

    Attributes:
        name: how errors call the actor.
        func: its class.
    """

    def __init__(self, session: Session, name: str, func: FunctionSpec) -> None:
        self.name = name
        self.func = func
        self._session = session
        self._actor: ActorPort | None = None
        self._actors: ActorsPort | None = None
        self._error: Exception | None = None
        self._late: PendingInterface | None = None
        self._early: list[Callable[[ActorPort], object]] = []
        self._early_fails: list[Callable[[Exception], None]] = []

    def __repr__(self) -> str:
        return f"<ActorLink {self.name} {self._actor!r}>"

    @classmethod
    def create(
        cls,
        session: Session,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> ActorLink:
        """Make an actor, now or as soon as the node is open."""
        link = cls(session, func.spec.name, func)
        passed = take_kept() if passing else []
        make = partial(link._make, payload, key, get_if_exists)
        session.when_open(make, link._fail)
        if passed:
            receiver = Then(passed.clear)
            if link._actor is not None:
                link._actor.await_ready(receiver)
            else:
                link._early.append(lambda actor: actor.await_ready(receiver))
        return link

    @classmethod
    def to(cls, session: Session, actor: ActorPort, actors: ActorsPort) -> ActorLink:
        """Tie an actor that exists; it counts the tie already."""
        link = cls(session, actor.func.spec.name, actor.func)
        link._actor, link._actors = actor, actors
        return link

    @classmethod
    def find(cls, session: Session, name: str, namespace: str) -> ActorLink:
        """Tie the living actor of a name, which the node may have yet to tell.

        Raises:
            ActorNameError: no actor has that name, as far as that is known now.
            NodeError: the node is not open.
        """
        actors = session.actors()
        found = actors.find((namespace, name))
        missing = partial(_no_actor, name, namespace)
        if found is None:
            raise missing()
        if not isinstance(found, asyncio.Future):
            return cls.to(session, found, actors)
        called = f"the actor {name!r}"
        link = cls(session, called, placeholder_func(called))
        link._actors = actors
        link._await(found, PendingInterface(called), missing)
        return link

    def interface(self) -> ActorInterface | PendingInterface:
        """Return what handles are made of."""
        if self._late is not None:
            return self._late
        assert self.func.actor is not None, self
        return interface_in(self.func.actor)

    def _await(
        self,
        answer: asyncio.Future[Any],
        interface: PendingInterface,
        missing: Callable[[], Exception],
    ) -> None:
        """Take the actor that the node tells later; None means that it has none."""
        self._late = interface

        def take(answer: asyncio.Future[Any]) -> None:
            error = NodeClosedError("the node was left before it had answered.")
            told = error if answer.cancelled() else answer.exception()
            actor = None if told is not None else answer.result()
            if actor is None:
                self._fail(told if isinstance(told, Exception) else missing())
            else:
                self._take(actor)

        answer.add_done_callback(take)

    def _take(self, actor: ActorPort) -> None:
        """The actor is known: do what was asked of it until now."""
        self._actor = actor
        # It may be one of that name that lives already, and of another class.
        self.func, self.name = actor.func, actor.func.spec.name
        if self._late is not None:
            assert actor.func.actor is not None, actor
            try:
                self._late.known = interface_in(actor.func.actor)
            except AiogpuError as error:
                self._fail(error)
                return
        early, self._early = self._early, []
        self._early_fails.clear()
        for ask in early:
            ask(actor)

    @classmethod
    def known(cls, session: Session, actor: int, name: str, home: str) -> ActorLink:
        """Tie an actor of which a handle has come.

        Raises:
            ActorDiedError: it has ended.
            MisuseError: it is another node's.
        """
        if home != session.home:
            raise stranger(name)
        actors = session.actors()
        return cls.to(session, actors.held(actor, name), actors)

    def reference(self) -> tuple[int, str, str]:
        """Return what a handle is pickled as; whoever gets it counts as a holder.

        Raises:
            MisuseError: its node is not open yet, or is not the caller's.
        """
        if self._error is not None:
            raise self._error
        if self._actor is None:
            until = "is open" if self._late is None else "has answered"
            raise MisuseError(
                f"the handle of {self.name} cannot be passed on before its node "
                f"{until}; await it first."
            )
        if not may_use(self._session):
            raise stranger(self.name)
        note_passed(self._actor.id, self)
        if asyncio._get_running_loop() is not None:
            # What is sent is sent before the loop turns: not what `put` was given, nor
            # what turned out not to be picklable.
            asyncio.get_running_loop().call_soon(take_kept)
        self._actor.pass_on()
        return self._actor.id, self.name, self._session.home

    def _make(
        self,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
        engine: Engine,
    ) -> None:
        self._actors = engine.actors
        actor = self._actors.create(self.func, payload, key, get_if_exists)
        if isinstance(actor, asyncio.Future):
            assert self.func.actor is not None, self
            interface = PendingInterface(self.name, interface_in(self.func.actor))
            self._await(actor, interface, partial(_no_actor, self.name, ""))
        else:
            self._take(actor)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._early.clear()
        fails, self._early_fails = self._early_fails, []
        for fail in fails:
            fail(error)

    def call(self, label: str, method: str, payload: bytes) -> Handle[Any]:
        """Call a method.

        Raises:
            SerializationError: the arguments are too large to be sent.
            NodeError: the node is closed, or belongs to another process.
        """
        self._check(payload)
        session = self._session
        # Cheaper than asking for the running loop, which asks for the process id.
        if get_ident() != session.thread or host_of_task.get() is not None:
            host = self._host(label)
            if host is not None and self._actor is not None:
                start = partial(host.call, self._actor.id, method, payload)
                return request(host, label, start)  # type: ignore[no-any-return]
        handle = session.new_handle(label, self)
        self._start(method, payload, handle)
        return handle

    def call_late(self, label: str, method: str, payload: bytes) -> Handle[Any]:
        """Call a method that the class may have, which the node has yet to tell."""
        self._check(payload)
        handle = self._session.new_handle(label, self)
        receiver = carrying(handle) if passing else handle
        start = partial(_call_early, method, payload, handle, receiver)

        def ask(actor: ActorPort) -> None:
            assert self._late is not None, self
            problem = self._late.problem(method)
            if problem is None:
                start(actor)
            else:
                handle.fail(problem)

        self._ask(handle, ask)
        return handle

    def stream(self, label: str, size: int, method: str, payload: bytes) -> Any:
        """Call a method that is a generator; raises as `call` does."""
        self._check(payload)
        host = self._host(label)
        if host is not None and self._actor is not None:
            from aiogpu.api.calls import request_stream

            start = partial(host.call, self._actor.id, method, payload)
            return request_stream(host, label, size, start)
        stream = self._session.new_stream(label, self, size)
        self._start(method, payload, stream.inflow)
        return stream

    def _host(self, label: str) -> Host | None:
        """The host of the task whose code calls, if no loop with a session runs it.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        host = host_beside_loop()
        if host is None:
            self._session.check_thread(f"{label}.remote()")
        return host

    def _check(self, payload: bytes) -> None:
        if len(payload) > UNCHECKED:
            from aiogpu.engines.admission import check_arguments

            check_arguments(self.func, payload)
        if self._actor is not None and not self._session.is_open:
            raise self._session.unusable()

    def _start(self, method: str, payload: bytes, handle: Awaited) -> None:
        receiver = carrying(handle) if passing else handle
        if self._actor is not None:
            handle.task_id = self._actor.call(method, payload, receiver)
        else:
            self._ask(handle, partial(_call_early, method, payload, handle, receiver))

    def several(self, method: str, payload: bytes) -> NearSeveral:
        """How to call a method that has several results."""
        self._host(f"{self.name}.{method}")
        return NearSeveral(self, method, payload)

    def ask_actor(
        self, ask: Callable[[ActorPort], object], fail: Callable[[Exception], None]
    ) -> None:
        """Ask something of the actor, now or as soon as it is known.

        `fail` is told why it never will be.
        """
        if self._error is not None:
            fail(self._error)
        elif self._actor is not None:
            ask(self._actor)
        else:
            self._early.append(ask)
            self._early_fails.append(fail)

    def ready(self) -> Handle[None]:
        """Settled when the constructor has returned."""
        return self._asked(lambda actor, handle: actor.await_ready(handle))

    def ended(self) -> Handle[None]:
        """Settled when the actor's process has ended."""
        return self._asked(lambda actor, handle: actor.await_end(handle))

    def room(self) -> Handle[Room]:
        """Return how many actors of its kind can live at once."""

        def ask(actor: ActorPort, receiver: Receiver) -> None:
            self._known_actors().tell_room(actor.id, receiver)

        return self._asked(ask)

    def _asked(self, ask: Callable[[ActorPort, Receiver], None]) -> Handle[Any]:
        """A handle behind which there is no call."""
        name = f"{self.name}()"
        host = host_beside_loop()
        if host is None:
            self._session.check_thread(f"Awaiting {name}")
        else:
            return request(host, name, partial(self._ask_now, ask))  # type: ignore[no-any-return]
        handle = self._session.new_handle(name, _Watcher(self))
        self._ask(handle, lambda actor: ask(actor, handle))
        return handle

    def _ask_now(
        self, ask: Callable[[ActorPort, Receiver], None], receiver: Receiver
    ) -> int:
        if self._actor is not None:
            ask(self._actor, receiver)
        elif self._error is not None:
            receiver.fail(self._error)
        return 0

    def _ask(self, handle: Awaited, ask: Callable[[ActorPort], object]) -> None:
        if self._session.is_forked:
            raise self._session.unusable()
        self.ask_actor(ask, handle.fail)

    def kill(self, no_restart: bool) -> None:
        """End its process at once."""
        self._tell(lambda actors, actor: actors.kill(actor, no_restart))

    def terminate(self) -> None:
        """Have it end after what it was sent."""
        self._tell(lambda actors, actor: actors.terminate(actor))

    def _tell(self, tell: Callable[[ActorsPort, int], None]) -> None:
        if self._session.is_forked:
            raise self._session.unusable()
        self._session.check_thread(f"The end of {self.name}, as by kill(),")
        if self._actor is not None and self._actors is not None:
            tell(self._actors, self._actor.id)
        elif self._error is None:
            self._early.append(lambda actor: tell(self._known_actors(), actor.id))

    def _known_actors(self) -> ActorsPort:
        assert self._actors is not None, self
        return self._actors

    def demand(self, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        if self._session.is_forked:
            return
        if self._actor is not None and self._actors is not None:
            self._actors.demand(self._actor.id, number, limit)

    def cancel(self, number: int) -> None:
        """Nobody wants a call's answer any more. In a fork the call is the parent's."""
        if self._session.is_forked:
            return
        if self._actor is not None and self._actors is not None and number:
            self._actors.cancel(self._actor.id, number)

    async def why(self, name: str, number: int) -> Why:
        """Return why a call waits: what its actor does."""
        if self._actor is None:
            return Why(name, number, "opening")
        found = await self._session.why(self.name, self._actor.id)
        return replace(found, name=name)

    def __del__(self) -> None:
        # Wherever the collector runs: in another thread, or amid the loop's own work.
        actor, actors = self._actor, self._actors
        if actor is not None and actors is not None:
            self._session.call_soon(partial(_release, actors, actor.id))


def _no_actor(name: str, namespace: str) -> ActorNameError:
    where = f" in the namespace {namespace!r}" if namespace else ""
    return ActorNameError(
        f"no actor named {name!r}{where} lives on this node. Make one by "
        f".options(name={name!r}).remote(...)."
    )


def _release(actors: ActorsPort, actor: int) -> None:
    actors.release(actor)


def _call_early(
    method: str,
    payload: bytes,
    handle: Awaited,
    receiver: Receiver,
    actor: ActorPort,
) -> None:
    if not handle.done():
        try:
            handle.task_id = actor.call(method, payload, receiver)
        except AiogpuError as error:
            handle.fail(error)  # the others go on


class _Watcher:
    """Owns handles behind which there is no call: cancelling them stops nothing."""

    def __init__(self, link: ActorLink) -> None:
        self._link = link

    def cancel(self, number: int) -> None:
        """Nothing."""

    async def why(self, name: str, number: int) -> Why:
        """Return what the actor does."""
        return await self._link.why(name, number)
