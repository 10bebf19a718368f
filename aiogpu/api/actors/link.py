"""A process's link to one actor, shared by all handles to it in this process.

The actor counts its links and ends when the last one is dropped. A program's link uses
the program's session, a worker's link the worker's own socket. This file must not
import asyncio, which plain functions of a worker do not need.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from weakref import WeakSet, WeakValueDictionary

from aiogpu.api.actors.methods import ActorInterface, no_method
from aiogpu.api.calls import (
    may_use,
    request,
    results_for,
)
from aiogpu.client.current import (
    client_of_caller,
    client_of_process,
    current,
    inline_client,
)
from aiogpu.client.function_spec import placeholder_func
from aiogpu.errors import ActorNameError, AiogpuError, MisuseError, NodeClosedError
from aiogpu.serialization.references import add_actor, is_for_one_node
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    AT_ONCE,
    CAPACITY,
    ENDED,
    LOST,
    READY,
)

if TYPE_CHECKING:
    from asyncio import Future

    from aiogpu.api.results.base import Owner
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.session import Awaited, Session
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Client
    from aiogpu.engines.base import ActorPort, ActorsPort, Engine, Room
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


def wrong_node(name: str) -> MisuseError:
    """Return the error for a handle to an actor of another node."""
    return MisuseError(
        f"the handle of {name} belongs to another node, or to one that was closed. "
        f"Pass an actor of this node to the task as an argument: a function that uses "
        f"a global handle keeps the handle of its first .remote()."
    )


def interface_in(func: FunctionSpec) -> ActorInterface:
    """Return the interface of an actor's class; unpickle it if from another process.

    Raises:
        DeserializationError: the interface needs a module that cannot be imported.
    """
    assert func.actor is not None, func
    interface = func.actor.interface
    return cast(
        "ActorInterface",
        load_result(interface) if type(interface) is bytes else interface,
    )


def check_late_call(interface: ActorInterface, name: str) -> None:
    """Refuse an early call, made before the class was known, if it does not fit.

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
            f"{method.label} {what}, and was called before the node had answered. "
            f"Await the handle first: `actor = await aiogpu.get_actor(...)`."
        )


class Watcher(Protocol):
    """Learns at once that this program ends an actor or an actor's process."""

    def on_ended_here(self, is_final: bool) -> None:
        """Handle a kill, or the end of an actor's block; `is_final`: no restart."""


class LossOwner:
    """The owner of a wait for the loss of an actor's process.

    Unlike a link, it does not keep the actor alive.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cancel: Callable[[int], None] | None = None

    def send(self, actors: ActorsPort, receiver: Awaited, actor: ActorPort) -> None:
        """Send the request, unless it was cancelled."""
        if not receiver.done():
            self._cancel = partial(actors.cancel, actor.id)
            receiver.on_submitted(actor.ask(LOST, receiver))

    def cancel(self, number: int) -> None:
        """Withdraw the request; do nothing in a fork, where it is the parent's."""
        if self._cancel is not None and number and not self._session.is_forked:
            self._cancel(number)

    async def why(self, name: str, number: int) -> Why:
        """Return the state of the request."""
        from aiogpu.observe.why import Why

        return Why(name, number, "sent")


UNCHECKED: Final = 1 << 20
"""Bytes of arguments that are always small enough to be sent."""


class LinkBase:
    """Queries and ends an actor; the common base of links."""

    def ready(self) -> Handle[None]:
        """Return a handle that is settled when the constructor has returned."""
        return self._request(READY)

    def ended(self) -> Handle[None]:
        """Return a handle that is settled when the actor's process has ended."""
        return self._request(ENDED)

    def room(self) -> Handle[Room]:
        """Return a handle of the number of such actors that can live at once."""
        return self._request(CAPACITY)

    def kill(self, no_restart: bool) -> None:
        """End the actor's process at once."""
        self._end(AT_ONCE if no_restart else AGAIN)

    def terminate(self) -> None:
        """End the actor after the calls made so far."""
        self._end(AFTER_ALL)

    def _request(self, query: str) -> Handle[Any]:
        """Send a query; return the handle of its answer."""
        raise NotImplementedError

    def _end(self, how: str) -> None:
        """End the actor, and tell its watchers."""
        raise NotImplementedError


class ActorLink(LinkBase):
    """A program's link to an actor.

    Attributes:
        name: the actor's name for error messages.
        func: the actor's class.
        interface: the interface of the class; None until the node has answered.
        own: the interface of the class that this program asked for; None if the actor
            was only looked up.
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
        self._watchers: WeakSet[Watcher] | None = None  # `actor_watchers` is weak
        self._actors: ActorsPort  # known when the actor is, or before
        self._error: Exception | None = None
        self._answer: Future[Any] | None = None  # the node's, while it is awaited
        self._public = 0  # the id that was promised before the node was open
        self._is_looked_up = True

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
        from aiogpu.api.session import find_session

        session = find_session()
        link = cls(session, func, interface_in(func))
        link.own = link.interface
        # A node in another process must look the name up first.
        link._is_looked_up = get_if_exists and session.remote_values is not None

        def make(engine: Engine) -> None:
            from asyncio import Future

            link._actors = engine.actors
            actor = link._actors.create(func, payload, key, get_if_exists, link._public)
            if isinstance(actor, Future):
                link._await(actor, partial(_no_actor, link.name, ""))
            else:
                link._take(actor)

        session.when_open(make, link._fail)
        return link

    @classmethod
    def find(cls, name: str, namespace: str) -> ActorLink:
        """Find the living actor with a name; the node may answer later.

        Raises:
            ActorNameError: no actor has the name. A node in another process reports
                this later.
            NodeError: the node is not open.
        """
        from asyncio import Future

        from aiogpu.api.session import find_session

        session = find_session("aiogpu.get_actor()")
        actors = session.engine.actors
        actor = actors.find((namespace, name))
        missing = partial(_no_actor, name, namespace)
        if actor is None:
            raise missing()
        if isinstance(actor, Future):
            link = cls(session, placeholder_func(f"the actor {name!r}"), None)
            link._await(actor, missing)
        else:
            link = cls(session, actor.func, interface_in(actor.func))
            link._actor, link._hold = actor, actor.holder()
        link._actors = actors
        return link

    @classmethod
    def known(
        cls, actor: int, name: str, home: str, interface: ActorInterface
    ) -> ActorLink:
        """Make the link of a handle that was unpickled in this process.

        Raises:
            ActorDiedError: the actor has ended.
            MisuseError: the actor belongs to another node.
        """
        from aiogpu.api.session import find_session

        session = find_session()
        if home not in ("", session.engine.home):
            raise wrong_node(name)
        actors = session.engine.actors
        port = actors.held(actor, name)
        link = cls(session, port.func, interface)
        link._actor, link._actors, link._hold = port, actors, port.holder()
        return link

    def _await(self, answer: Future[Any], missing: Callable[[], Exception]) -> None:
        """Take the actor when the node answers; the answer None means no actor."""
        self.interface = None

        def take(answer: Future[Any]) -> None:
            closed = NodeClosedError("the node was closed before it answered.")
            error = closed if answer.cancelled() else answer.exception()
            actor = None if error is not None else answer.result()
            if actor is None:
                self._fail(error if isinstance(error, Exception) else missing())
            else:
                self._take(actor)

        self._answer = answer
        answer.add_done_callback(take)

    def _take(self, actor: ActorPort) -> None:
        """Note the actor."""
        self._actor, self._hold = actor, actor.holder()
        if self.interface is None or actor.func is not self.func:
            # With get_if_exists, an existing actor may be of another class.
            self.func, self.name = actor.func, actor.func.spec.name
            try:
                self.interface = interface_in(actor.func)
            except AiogpuError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error

    @property
    def identity(self) -> tuple[int, object] | None:
        """The actor's id and its node; None while the node has not answered."""
        return None if self._actor is None else (self._actor.id, self._session)

    async def html(self, title: str) -> str:
        """Return the actor's state for a notebook."""
        from aiogpu.notebook.display import code, html_of

        if self._error is not None or self._actor is None:
            return code(f"{title}: {self._error or 'its node has not answered yet'}")
        engine = self._session.engine
        why = await engine.why(self._actor.id)
        return await html_of(title, why, engine.status, is_actor=True)

    def reference(self) -> tuple[int, str, str]:
        """Return the pickled form of a handle, and count its receiver as a holder.

        Raises:
            MisuseError: the actor's node is not open yet, or is not the caller's.
        """
        if self._error is not None:
            raise self._error
        if self._actor is None:
            return self._promise(), self.name, ""
        if not may_use(self._session):
            raise wrong_node(self.name)
        self._actors.pass_on(self._actor.id, self)
        return self._actor.id, self.name, self._session.engine.home

    def _promise(self) -> int:
        """Return the id that the actor will have; what is sent with it waits too.

        Not for a function, which may outlive the node: without the node's name, a
        worker of another node would take the id for one of its own actors.
        """
        if not self._is_looked_up and is_for_one_node():
            self._public = self._public or self._session.promise_actor()
        if not self._public:
            until = "has answered" if self.interface is None else "is open"
            raise MisuseError(
                f"the handle of {self.name} cannot be passed on before its node "
                f"{until}; wait for it first: `await actor`, or "
                f"`aiogpu.sync.get(actor)` without an event loop."
            )
        add_actor(self._public, self)
        return self._public

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Any:
        """Call a method; return its handle, a tuple of handles, or its stream.

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
        # Cheaper than `_get_running_loop`, which calls `getpid`.
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
        """Return the client of the running code; None if the session serves it.

        Raises:
            NoLoopError: called in a thread other than the event loop's.
        """
        client = client_of_caller()
        if client is None:
            self._session.check_thread(what)
        return client

    def _start(self, method: str, payload: bytes, handle: Awaited) -> None:
        if self._actor is not None:
            handle.on_submitted(self._actor.call(method, payload, handle))
            return

        def call(actor: ActorPort) -> None:
            if handle.done():
                return
            if self.own is None and self.interface is not None:
                check_late_call(self.interface, method)
            handle.on_submitted(actor.call(method, payload, handle))

        self._when_known(call, handle.settle)

    def lost(self) -> Handle[None]:
        """Return a handle that is settled when the process is lost; see `LOST`.

        Cancelling the handle withdraws the request.
        """
        owner = LossOwner(self._session)
        return self._ask(
            owner, lambda receiver, actor: owner.send(self._actors, receiver, actor)
        )

    def watch(self, watcher: Watcher) -> None:
        """Tell the watcher, while it exists, when this program ends the actor."""

        def register(actor: ActorPort) -> None:
            all_watchers = self._session.actor_watchers
            self._watchers = all_watchers.setdefault(actor.id, WeakSet())
            self._watchers.add(watcher)

        self._when_known(register, lambda _: None)

    def _request(self, query: str) -> Handle[Any]:
        """Send a query; cancelling its handle stops nothing, as it is not a call."""
        return self._ask(self, lambda receiver, actor: actor.ask(query, receiver))

    def _ask(
        self, owner: Owner, send: Callable[[Any, ActorPort], object]
    ) -> Handle[Any]:
        """Return a handle that `send` gives to the actor once it is known."""
        name = f"{self.name}()"

        def start(receiver: Any) -> int:
            self._when_known(partial(send, receiver), receiver.settle)
            return int(receiver.task_id)

        client = self._client(f"Awaiting {name}")
        if client is not None:
            return request(client, name, start)  # type: ignore[no-any-return]
        handle = self._session.new_handle(name, owner)
        start(handle)
        return handle

    def _when_known(
        self, send: Callable[[ActorPort], object], fail: Callable[[Exception], object]
    ) -> None:
        """Send a request to the actor, now or as soon as the actor is known.

        `fail` is called with the reason if there will be no actor.
        """
        if self._session.is_forked:
            raise self._session.unusable()
        if self._error is not None:
            fail(self._error)
        elif self._actor is not None:
            send(self._actor)
        elif self._session.is_opening:
            # In the order of all calls: the arguments of this call may contain actors
            # that the program made after this one.
            self._session.when_open(lambda _: self._when_known(send, fail), fail)
        else:
            self._send_after_answer(send, fail)

    def _send_after_answer(
        self, send: Callable[[ActorPort], object], fail: Callable[[Exception], object]
    ) -> None:
        def answered(_: object) -> None:
            try:
                self._when_known(send, fail)
            except Exception as error:  # noqa: BLE001 - the handle reports it
                fail(error)

        # In the order of the calls, and after `take`, which was added first.
        assert self._answer is not None, self
        self._answer.add_done_callback(answered)

    def _end(self, how: str) -> None:
        def send_and_tell(actor: ActorPort) -> None:
            self._actors.stop(actor.id, how)
            for watcher in tuple(self._session.actor_watchers.get(actor.id, ())):
                watcher.on_ended_here(is_final=how != AGAIN)

        if not self._session.is_forked:
            what = f"The end of {self.name}, as by kill(),"
            self._session.check_thread(what)
        self._when_known(send_and_tell, lambda _: None)

    def demand(self, number: int, limit: int) -> None:
        """Let a stream of a call yield up to `limit` items in all."""
        if self._actor is not None and not self._session.is_forked:
            self._actors.demand(self._actor.id, number, limit)

    def cancel(self, number: int) -> None:
        """Cancel a call; do nothing in a fork, where the call is the parent's."""
        if self._actor is not None and number and not self._session.is_forked:
            self._actors.cancel(self._actor.id, number)

    async def why(self, name: str, number: int) -> Why:
        """Return why a call waits, or why its actor waits for a process."""
        from aiogpu.observe.why import Why

        if self._actor is None:
            return Why(name, number, "opening")
        why = await self._session.why(self.name, self._actor.id)
        if why.state == "running":
            why = replace(why, state="sent", actor=self.name)
        return replace(why, name=name)


def _no_actor(name: str, namespace: str) -> ActorNameError:
    where = f" in the namespace {namespace!r}" if namespace else ""
    return ActorNameError(
        f"there is no actor named {name!r}{where} on this node. Start one by "
        f".options(name={name!r}).remote(...)."
    )


# In a worker.


_links: Final[WeakValueDictionary[int, WorkerActorLink]] = WeakValueDictionary()


class WorkerActorLink(LinkBase):
    """A worker's link to an actor.

    Attributes:
        name: the actor's name for error messages.
        actor: the actor's id.
        interface: the interface of the actor's class.
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
        self._watchers: WeakSet[Watcher] = WeakSet()
        _links[self.actor] = self

    def __repr__(self) -> str:
        return f"<WorkerActorLink {self.name} {self.actor}>"

    @classmethod
    def known(
        cls, actor: int, name: str, home: str, interface: ActorInterface
    ) -> WorkerActorLink:
        """Make the link of an unpickled handle; refuse a handle of another node."""
        if home not in ("", current.home):
            raise wrong_node(name)
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
        """Start an actor; it ends with this process unless others have handles."""
        hold = client_of_process().make(func, payload, key, get_if_exists)
        return cls(func.spec.name, hold, interface_in(func))

    @classmethod
    def find(cls, name: str, namespace: str) -> WorkerActorLink:
        """Find the living actor with a name; wait for the node's answer.

        Raises:
            ActorNameError: no actor has the name.
            DeserializationError: the actor's class needs a module that cannot be
                imported.
        """
        from aiogpu.api.results.wait import get

        return cls._from_answer(*get(_find_request(name, namespace)))

    @classmethod
    async def find_on_loop(cls, name: str, namespace: str) -> WorkerActorLink:
        """Find an actor on the running event loop; raises like `find`."""
        return cls._from_answer(*await _find_request(name, namespace))

    @classmethod
    def _from_answer(
        cls, actor: int, class_name: str, interface: bytes
    ) -> WorkerActorLink:
        hold = client_of_process().own(actor)
        known = _links.get(actor)
        return known or cls(class_name, hold, load_result(interface))

    async def html(self, title: str) -> str:
        """Return the handle's text for a notebook: a task does not ask the node."""
        from aiogpu.notebook.display import code

        return code(title)

    @property
    def identity(self) -> tuple[int, object]:
        """The actor's id and its node."""
        return self.actor, current.home

    def reference(self) -> tuple[int, str, str]:
        """Return the pickled form of a handle, and count its receiver as a holder."""
        self._client.pass_on(self._hold)
        return self.actor, self.name, current.home

    def call(
        self, label: str, method: str, payload: bytes, returns: int = 0, window: int = 0
    ) -> Any:
        """Call a method; return its handle, a tuple of handles, or its stream.

        Raises:
            MisuseError: the calling task has ended.
            SerializationError: the arguments are too large to be sent.
        """
        call = partial(self._client.call, self.actor, method, payload)
        return request(self._client, label, call, returns, window)

    def lost(self) -> Any:
        """Return a handle that is settled when the process is lost; see `LOST`.

        Cancelling the handle withdraws the request.
        """
        return self._request(LOST)

    def _request(self, query: str) -> Any:
        return self.call(f"{self.name}()", query, NONE_PAYLOAD)

    def watch(self, watcher: Watcher) -> None:
        """Tell the watcher, while it exists, when this process ends the actor."""
        self._watchers.add(watcher)

    def _end(self, how: str) -> None:
        self._client.stop(self.actor, how)
        for watcher in tuple(self._watchers):
            watcher.on_ended_here(is_final=how != AGAIN)


def _find_request(name: str, namespace: str) -> Any:
    client = client_of_process()
    start = partial(client.find, name, namespace)
    return request(client, f"get_actor({name!r})", start)


Link = ActorLink | WorkerActorLink
"""The link of an `ActorHandle`."""
