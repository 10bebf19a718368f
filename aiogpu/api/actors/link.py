"""A process's link to one actor, shared by all handles to it in this process.

The actor counts its links and ends when there is none. A program's link uses its
session, a worker's the worker's own socket. This file must not import asyncio, which
plain functions of a worker do not need.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakValueDictionary

from aiogpu.api.actors.methods import ActorInterface, no_method
from aiogpu.api.calls import (
    may_use,
    request,
    results_for,
    session_of_caller,
)
from aiogpu.client.current import (
    client_of_caller,
    client_of_process,
    current,
    inline_client,
)
from aiogpu.client.function_spec import placeholder_func
from aiogpu.errors import ActorNameError, AiogpuError, MisuseError, NodeClosedError
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.messages import AFTER_ALL, AGAIN, AT_ONCE, CAPACITY, ENDED, READY

if TYPE_CHECKING:
    from asyncio import Future

    from aiogpu.api.results.handle import Handle
    from aiogpu.api.session import Awaited, Session
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Client, InlineClient, Receiver
    from aiogpu.engines.base import ActorPort, ActorsPort, Engine, Room
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


def stranger(name: str) -> MisuseError:
    """The error for a handle to an actor of another node."""
    return MisuseError(
        f"the handle of {name} belongs to another node, or to one that was closed. "
        f"Give tasks an actor of this node, as an argument: a function that uses a "
        f"handle of the program's keeps the one that it had at its first .remote()."
    )


def interface_in(func: FunctionSpec) -> ActorInterface:
    """Return the interface of an actor's class; from another process it is pickled.

    Raises:
        DeserializationError: what it refers to cannot be imported here.
    """
    assert func.actor is not None, func
    interface = func.actor.interface
    return cast(
        "ActorInterface",
        load_result(interface) if type(interface) is bytes else interface,
    )


def check_late_call(interface: ActorInterface, name: str) -> None:
    """Refuse a call that was made before the class was known, and that it cannot serve.

    Raises:
        AttributeError: the class has no such method.
        MisuseError: the method is a generator or has several results.
    """
    method = interface.methods.get(name)
    if method is None:
        raise no_method(interface, name)
    if method.window or method.returns:
        what = "is a generator" if method.window else "has several results"
        raise MisuseError(
            f"{method.label} {what}, which was not known yet when it was called: the "
            f"node had not answered. Await the handle first: `actor = await "
            f"aiogpu.get_actor(...)`."
        )


UNCHECKED: Final = 1 << 20
"""Bytes of arguments up to which their size need not be checked."""


class ActorLink:
    """A program's link to an actor.

    Attributes:
        name: how errors call the actor.
        func: its class.
        interface: of its class; None until the node has answered.
        own: the interface of the class to make if no actor has the name that is looked
            up; None if none is made.
    """

    def __init__(
        self, session: Session, func: FunctionSpec, interface: ActorInterface | None
    ) -> None:
        from aiogpu.api.session import EarlyRequests

        self.name = func.spec.name
        self.func = func
        self.interface = interface
        self.own: ActorInterface | None = None
        self._session = session
        self._actor: ActorPort | None = None
        self._hold: object = None
        self._actors: ActorsPort  # known when the actor is, or before
        self._error: Exception | None = None
        self._early: EarlyRequests[ActorPort] = EarlyRequests()

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
            from asyncio import Future

            link._actors = engine.actors
            actor = link._actors.create(func, payload, key, get_if_exists)
            if isinstance(actor, Future):
                link._await(actor, partial(_no_actor, link.name, ""))
            else:
                link._take(actor)

        session.when_open(make, link._fail)
        return link

    @classmethod
    def find(cls, name: str, namespace: str) -> ActorLink:
        """Find the living actor of a name; the node may answer later.

        Raises:
            ActorNameError: no actor has that name, as far as that is known now.
            NodeError: the node is not open.
        """
        from asyncio import Future

        session = session_of_caller("aiogpu.get_actor()")
        actors = session.engine.actors
        found = actors.find((namespace, name))
        missing = partial(_no_actor, name, namespace)
        if found is None:
            raise missing()
        if isinstance(found, Future):
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
        """Link to an actor whose handle was unpickled here.

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

    def _await(self, answer: Future[Any], missing: Callable[[], Exception]) -> None:
        """Take the actor when the node answers; None means that there is none."""
        self.interface = None

        def take(answer: Future[Any]) -> None:
            error = NodeClosedError("the node was left before it had answered.")
            told = error if answer.cancelled() else answer.exception()
            actor = None if told is not None else answer.result()
            if actor is None:
                self._fail(told if isinstance(told, Exception) else missing())
            else:
                self._take(actor)

        answer.add_done_callback(take)

    def _take(self, actor: ActorPort) -> None:
        """The actor is known: make the requests that waited for it."""
        self._actor, self._hold = actor, actor.holder()
        if self.interface is None or actor.func is not self.func:
            # An actor of this name may have lived already, and be of another class.
            self.func, self.name = actor.func, actor.func.spec.name
            try:
                self.interface = interface_in(actor.func)
            except AiogpuError as error:
                self._fail(error)
                return
        self._early.make(actor)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._early.fail(error)

    def reference(self) -> tuple[int, str, str]:
        """Return what a handle is pickled as; its receiver counts as a holder.

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
            from aiogpu.engines.base import check_arguments

            check_arguments(self.func, payload)
        session, actor = self._session, self._actor
        if actor is not None and not session.is_open:
            raise session.unusable()
        # Cheaper than asking for the running loop, which asks for the process id.
        if get_ident() != session.thread or inline_client.get() is not None:
            client = self._client(f"{label}.remote()")
            if client is not None and actor is not None:
                call = partial(client.call, actor.id, method, payload)
                return request(client, label, call, returns, window)
        if returns or window:
            start = partial(self._start, method, payload)
            return results_for(session, label, self, returns, window, start)
        handle = session.new_handle(label, self)
        if actor is not None:
            handle.task_id = actor.call(method, payload, handle)
        else:
            self._start(method, payload, handle)
        return handle

    def _client(self, what: str) -> Client | None:
        """The client of the running code; None if the session serves it.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        client = client_of_caller()
        if client is None:
            self._session.check_thread(what)
        return client

    def _start(self, method: str, payload: bytes, handle: Awaited) -> None:
        if self._actor is not None:
            handle.task_id = self._actor.call(method, payload, handle)
            return

        def call(actor: ActorPort) -> None:
            if handle.done():
                return
            if self.own is None and self.interface is not None:
                check_late_call(self.interface, method)
            handle.task_id = actor.call(method, payload, handle)

        self._ask(call, handle.settle)

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
        """A handle without a call behind it, so that cancelling it stops nothing."""
        name = f"{self.name}()"

        def start(receiver: Receiver) -> int:
            self._ask(lambda actor: ask(actor, receiver), receiver.settle)
            return 0

        client = self._client(f"Awaiting {name}")
        if client is not None:
            # In a worker another link is used, so that this is an inline task's.
            cast("InlineClient", client).serve_loop()
            return request(client, name, start)  # type: ignore[no-any-return]
        handle = self._session.new_handle(name, self)
        start(handle)
        return handle

    def _ask(
        self, ask: Callable[[ActorPort], object], fail: Callable[[Exception], object]
    ) -> None:
        """Make a request to the actor, now or as soon as it is known.

        `fail` is called with the reason if it never will be.
        """
        if self._session.is_forked:
            raise self._session.unusable()
        if self._error is not None:
            fail(self._error)
        elif self._actor is not None:
            ask(self._actor)
        else:
            self._early.add(ask, fail)

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
        """Cancel a call. In a fork the call is the parent's, and goes on."""
        if self._actor is not None and number and not self._session.is_forked:
            self._actors.cancel(self._actor.id, number)

    async def why(self, name: str, number: int) -> Why:
        """Return why a call waits: what its actor does, if that has no process yet."""
        from aiogpu.observe.why import Why

        if self._actor is None:
            return Why(name, number, "opening")
        found = await self._session.why(self.name, self._actor.id)
        if found.state == "running":
            found = replace(found, state="sent", actor=self.name)
        return replace(found, name=name)


def _no_actor(name: str, namespace: str) -> ActorNameError:
    where = f" in the namespace {namespace!r}" if namespace else ""
    return ActorNameError(
        f"no actor named {name!r}{where} lives on this node. Make one by "
        f".options(name={name!r}).remote(...)."
    )


# In a worker.


_links: Final[WeakValueDictionary[int, WorkerActorLink]] = WeakValueDictionary()


class WorkerActorLink:
    """A worker's link to an actor.

    Attributes:
        name: how errors call the actor.
        actor: its id.
        interface: of its class.
    """

    own = None

    def __init__(
        self, name: str, hold: Reference, interface: ActorInterface | None
    ) -> None:
        self.name = name
        self.actor = hold.id
        self._hold = hold
        self.interface = interface
        self._client = client_of_process()
        _links[self.actor] = self

    def __repr__(self) -> str:
        return f"<WorkerActorLink {self.name} {self.actor}>"

    @classmethod
    def known(
        cls, actor: int, name: str, home: str, interface: ActorInterface
    ) -> WorkerActorLink:
        """Link to an actor whose handle was unpickled here; raises `MisuseError`."""
        if home != current.home:
            raise stranger(name)
        return _links.get(actor) or cls(
            name, client_of_process().actor(actor, name), interface
        )

    @classmethod
    def create(
        cls,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None,
        get_if_exists: bool,
    ) -> WorkerActorLink:
        """Make an actor; it ends with this process unless others have handles."""
        hold = client_of_process().make(func, payload, key, get_if_exists)
        return cls(func.spec.name, hold, interface_in(func))

    @classmethod
    def find(cls, name: str, namespace: str) -> WorkerActorLink:
        """Find the living actor of a name; waits for the node's answer.

        Raises:
            ActorNameError: no actor has that name.
            DeserializationError: what its class refers to cannot be imported here.
        """
        from aiogpu.api.results.wait import get

        return cls._found(*get(_ask_for(name, namespace)))

    @classmethod
    async def find_on_loop(cls, name: str, namespace: str) -> WorkerActorLink:
        """Find an actor on the running event loop; raises as `find` does."""
        return cls._found(*await _ask_for(name, namespace))

    @classmethod
    def _found(cls, actor: int, of_class: str, interface: bytes) -> WorkerActorLink:
        hold = client_of_process().own(actor)
        return _links.get(actor) or cls(of_class, hold, load_result(interface))

    def reference(self) -> tuple[int, str, str]:
        """Return what a handle is pickled as; its receiver counts as a holder."""
        self._client.pass_on(self._hold)
        return self.actor, self.name, current.home

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Any:
        """Call a method; gives the kind of handle, handles or stream that fits.

        Raises:
            MisuseError: no task runs any more.
            SerializationError: the arguments are too large to be sent.
        """
        call = partial(self._client.call, self.actor, method, payload)
        return request(self._client, label, call, returns, window)

    def ready(self) -> Any:
        """Settled when the constructor has returned."""
        return self.call(f"{self.name}()", READY, NONE_PAYLOAD)

    def ended(self) -> Any:
        """Settled when the actor's process has ended."""
        return self.call(f"{self.name}()", ENDED, NONE_PAYLOAD)

    def room(self) -> Any:
        """Return how many actors of its kind can live at once."""
        return self.call(f"{self.name}()", CAPACITY, NONE_PAYLOAD)

    def kill(self, no_restart: bool) -> None:
        """End its process at once."""
        self._client.stop(self.actor, AT_ONCE if no_restart else AGAIN)

    def terminate(self) -> None:
        """Have it end after what it was sent."""
        self._client.stop(self.actor, AFTER_ALL)


def _ask_for(name: str, namespace: str) -> Any:
    client = client_of_process()
    start = partial(client.find, name, namespace)
    return request(client, f"get_actor({name!r})", start)


Link = ActorLink | WorkerActorLink
"""What a handle holds."""
