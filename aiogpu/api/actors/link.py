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
from typing import TYPE_CHECKING, Any, Final

from aiogpu.api.actors.methods import (
    interface_in,
    late_call_problem,
    stranger,
)
from aiogpu.api.calls import (
    host_beside_loop,
    may_use,
    request,
    results_for,
    session_of_caller,
)
from aiogpu.client.current import host_of_task
from aiogpu.client.function_spec import placeholder_func
from aiogpu.errors import ActorNameError, AiogpuError, MisuseError, NodeClosedError
from aiogpu.observe.why import Why

if TYPE_CHECKING:
    from aiogpu.api.actors.methods import ActorInterface
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.session import Awaited, Session
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Host, Receiver
    from aiogpu.engines.base import ActorPort, ActorsPort, Engine, Room


UNCHECKED: Final = 1 << 20
"""Bytes that any call may carry."""

EarlyCall = tuple[Callable[[Any], object], Callable[[Exception], object]]
"""What asks something of an actor once it is known, and is told if it never is."""


class ActorLink:
    """See above.

    Attributes:
        name: how errors call the actor.
        func: its class.
        interface: what handles are made of; None until the node has told it.
        own: the class that is made if there is no actor of the name that is looked
            up; None where none is.
    """

    def __init__(
        self, session: Session, func: FunctionSpec, interface: ActorInterface | None
    ) -> None:
        self.name = func.spec.name
        self.func = func
        self.interface = interface
        self.own: ActorInterface | None = None
        self._session = session
        self._actor: ActorPort | None = None
        self._hold: object = None
        self._actors: ActorsPort  # known when the actor is, or before
        self._error: Exception | None = None
        self._early: list[EarlyCall] = []

    def __repr__(self) -> str:
        return f"<ActorLink {self.name} {self._actor!r}>"

    @classmethod
    def create(
        cls,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> ActorLink:
        """Make an actor, now or as soon as the node is open."""
        session = session_of_caller()
        link = cls(session, func, interface_in(func))
        link.own = link.interface

        def make(engine: Engine) -> None:
            link._actors = engine.actors
            actor = link._actors.create(func, payload, key, get_if_exists)
            if isinstance(actor, asyncio.Future):
                link._await(actor, partial(_no_actor, link.name, ""))
            else:
                link._take(actor)

        session.when_open(make, link._fail)
        return link

    @classmethod
    def find(cls, name: str, namespace: str) -> ActorLink:
        """Tie the living actor of a name, which the node may have yet to tell.

        Raises:
            ActorNameError: no actor has that name, as far as that is known now.
            NodeError: the node is not open.
        """
        session = session_of_caller("aiogpu.get_actor()")
        actors = session.engine.actors
        found = actors.find((namespace, name))
        missing = partial(_no_actor, name, namespace)
        if found is None:
            raise missing()
        if isinstance(found, asyncio.Future):
            link = cls(session, placeholder_func(f"the actor {name!r}"), None)
            link._await(found, missing)
        else:
            link = cls(session, found.func, interface_in(found.func))
            link._actor, link._hold = found, found.holder()
        link._actors = actors
        return link

    @classmethod
    def known(
        cls, actor: int, name: str, home: str, interface: ActorInterface
    ) -> ActorLink:
        """Tie an actor of which a handle has come.

        Raises:
            ActorDiedError: it has ended.
            MisuseError: it is another node's.
        """
        session = session_of_caller()
        if home != session.engine.home:
            raise stranger(name)
        actors = session.engine.actors
        found = actors.held(actor, name)
        link = cls(session, found.func, interface)
        link._actor, link._actors, link._hold = found, actors, found.holder()
        return link

    def _await(
        self, answer: asyncio.Future[Any], missing: Callable[[], Exception]
    ) -> None:
        """Take the actor that the node tells later; None means that it has none."""
        self.interface = None

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
        self._actor, self._hold = actor, actor.holder()
        if self.interface is None or actor.func is not self.func:
            # It may be one of that name that lives already, and of another class.
            self.func, self.name = actor.func, actor.func.spec.name
            try:
                self.interface = interface_in(actor.func)
            except AiogpuError as error:
                self._fail(error)
                return
        early, self._early = self._early, []
        for ask, _ in early:
            ask(actor)

    def _fail(self, error: Exception) -> None:
        self._error = error
        early, self._early = self._early, []
        for _, fail in early:
            fail(error)

    def reference(self) -> tuple[int, str, str]:
        """Return what a handle is pickled as; whoever gets it counts as a holder.

        Raises:
            MisuseError: its node is not open yet, or is not the caller's.
        """
        if self._error is not None:
            raise self._error
        if self._actor is None:
            until = "has answered" if self.interface is None else "is open"
            raise MisuseError(
                f"the handle of {self.name} cannot be passed on before its node "
                f"{until}; await it first."
            )
        if not may_use(self._session):
            raise stranger(self.name)
        self._actor.pass_on(self)
        return self._actor.id, self.name, self._session.engine.home

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Any:
        """Call a method; gives its handle, the handles of its results, or its stream.

        Raises:
            SerializationError: the arguments are too large to be sent.
            NodeError: the node is closed, or belongs to another process.
        """
        if len(payload) > UNCHECKED:
            from aiogpu.engines.admission import check_arguments

            check_arguments(self.func, payload)
        session, actor = self._session, self._actor
        if actor is not None and not session.is_open:
            raise session.unusable()
        # Cheaper than asking for the running loop, which asks for the process id.
        if get_ident() != session.thread or host_of_task.get() is not None:
            host = self._host(f"{label}.remote()")
            if host is not None and actor is not None:
                call = partial(host.call, actor.id, method, payload)
                return request(host, label, call, returns, window)
        if returns or window:
            start = partial(self._start, method, payload)
            return results_for(session, label, self, returns, window, start)
        handle = session.new_handle(label, self)
        if actor is not None:
            handle.task_id = actor.call(method, payload, handle)
        else:
            self._start(method, payload, handle)
        return handle

    def _host(self, what: str) -> Host | None:
        """The host of the task whose code asks, if no loop with a session runs it.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        host = host_beside_loop()
        if host is None:
            self._session.check_thread(what)
        return host

    def _start(self, method: str, payload: bytes, handle: Awaited) -> None:
        if self._actor is not None:
            handle.task_id = self._actor.call(method, payload, handle)
            return

        def call(actor: ActorPort) -> None:
            if handle.done():
                return
            problem: Exception | None = None
            if self.own is None and self.interface is not None:
                problem = late_call_problem(self.interface, method)
            if problem is None:
                try:
                    handle.task_id = actor.call(method, payload, handle)
                except AiogpuError as error:
                    problem = error  # the others go on
            if problem is not None:
                handle.fail(problem)

        self._ask(call, handle.fail)

    def ready(self) -> Handle[None]:
        """Settled when the constructor has returned."""
        return self._asked(lambda actor, receiver: actor.await_ready(receiver))

    def ended(self) -> Handle[None]:
        """Settled when the actor's process has ended."""
        return self._asked(lambda actor, receiver: actor.await_end(receiver))

    def room(self) -> Handle[Room]:
        """Return how many actors of its kind can live at once."""
        return self._asked(
            lambda actor, receiver: self._actors.tell_room(actor.id, receiver)
        )

    def _asked(self, ask: Callable[[ActorPort, Receiver], None]) -> Handle[Any]:
        """A handle behind which there is no call, so that cancelling stops nothing."""
        name = f"{self.name}()"

        def start(receiver: Receiver) -> int:
            self._ask(lambda actor: ask(actor, receiver), receiver.fail)
            return 0

        host = self._host(f"Awaiting {name}")
        if host is not None:
            return request(host, name, start)  # type: ignore[no-any-return]
        handle = self._session.new_handle(name, self)
        start(handle)
        return handle

    def _ask(
        self, ask: Callable[[ActorPort], object], fail: Callable[[Exception], object]
    ) -> None:
        """Ask something of the actor, now or as soon as it is known.

        `fail` is told why it never will be.
        """
        if self._session.is_forked:
            raise self._session.unusable()
        if self._error is not None:
            fail(self._error)
        elif self._actor is not None:
            ask(self._actor)
        else:
            self._early.append((ask, fail))

    def kill(self, no_restart: bool) -> None:
        """End its process at once."""
        self._tell(lambda actor: self._actors.kill(actor.id, no_restart))

    def terminate(self) -> None:
        """Have it end after what it was sent."""
        self._tell(lambda actor: self._actors.terminate(actor.id))

    def _tell(self, tell: Callable[[ActorPort], object]) -> None:
        if not self._session.is_forked:
            what = f"The end of {self.name}, as by kill(),"
            self._session.check_thread(what)
        self._ask(tell, lambda _: None)

    def demand(self, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        if self._actor is not None and not self._session.is_forked:
            self._actors.demand(self._actor.id, number, limit)

    def cancel(self, number: int) -> None:
        """Nobody wants a call's answer any more. In a fork the call is the parent's."""
        if self._actor is not None and number and not self._session.is_forked:
            self._actors.cancel(self._actor.id, number)

    async def why(self, name: str, number: int) -> Why:
        """Return why a call waits: what its actor does."""
        if self._actor is None:
            return Why(name, number, "opening")
        found = await self._session.why(self.name, self._actor.id)
        return replace(found, name=name)


def _no_actor(name: str, namespace: str) -> ActorNameError:
    where = f" in the namespace {namespace!r}" if namespace else ""
    return ActorNameError(
        f"no actor named {name!r}{where} lives on this node. Make one by "
        f".options(name={name!r}).remote(...)."
    )
