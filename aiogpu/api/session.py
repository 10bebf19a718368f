"""A program's tie to a node, one for each event loop: opened, asked, closed, inherited.

A `.remote()` without one opens an embedded node with the defaults, which closes with
its loop. A fork of the program inherits an inert session: it neither works nor harms
the parent's. Where the engine itself is no process of ours (Ray), a task's process is
to its engine one program more: each event loop in it has a session, and plain code one
of its thread's own.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
from _thread import get_ident
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import WeakSet

from aiogpu.api.results.handle import Handle, Owner, check_node, sessions
from aiogpu.api.usage_errors import EnteredOnLoop
from aiogpu.client.current import current, passing
from aiogpu.client.interface import Receiver
from aiogpu.engines.base import ActorsPort, Engine, NodeOptions
from aiogpu.engines.registry import create_engine
from aiogpu.errors import NodeClosedError, NodeError, NoLoopError

if TYPE_CHECKING:
    from aiogpu.api.results.handle import Stream, StreamOwner
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Host, ValueStore, Waits
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import PickledValue


def default_address() -> str | None:
    """The address that the variable AIOGPU_ADDRESS supplies, None without."""
    return os.environ.get("AIOGPU_ADDRESS") or None


def refuse_in_worker(what: str) -> None:
    """Raise `NodeError` where this process is a worker.

    Raises:
        MisuseError: it is one that imports a module for its task, or whose task does.
    """
    if current.worker or current.is_loading:
        from aiogpu.worker.nested import refuse_to_begin_anew

        refuse_to_begin_anew()
    if current.worker:
        raise NodeError(
            f"{what} cannot be reached inside a task or what it has forked; it is the "
            f"program's. A task starts others by .remote(); on an inline node it does "
            f"so in the thread that it runs in."
        )


class SessionState(Enum):
    """Where a session is."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"
    """This process is a fork of the one that opened it."""


class Awaited(Receiver, Protocol):
    """A handle, or the end of a stream at which its items come in.

    Attributes:
        task_id: the task's number, set when it is started.
    """

    task_id: int

    def done(self) -> bool:
        """Return whether nobody wants it any more, or it has ended."""
        ...


class Early(NamedTuple):
    """One request: how it is made, and who is told that it never will be."""

    start: Callable[[Engine], None]
    fail: Callable[[Exception], None]


class EarlyRequests:
    """Requests in the order in which they came."""

    def __init__(self) -> None:
        self._kept: list[Early] = []

    def add(
        self, start: Callable[[Engine], None], fail: Callable[[Exception], None]
    ) -> None:
        """Keep a request."""
        self._kept.append(Early(start, fail))

    def start_all(self, engine: Engine) -> None:
        """Make them; what one of them raises is told to who has asked."""
        kept, self._kept = self._kept, []
        for start, fail in kept:
            try:
                start(engine)
            except Exception as error:  # noqa: BLE001 - it is the handle's
                fail(error)

    def fail_all(self, error: Exception) -> bool:
        """Tell that none of them will be made; False if there was none."""
        kept, self._kept = self._kept, []
        for request in kept:
            request.fail(error)
        return bool(kept)


def submit_early(
    func: FunctionSpec,
    payload: bytes,
    handle: Awaited,
    receiver: Receiver,
    engine: Engine,
) -> None:
    """Start a task whose handle exists, unless nobody wants it any more."""
    if not handle.done():
        handle.task_id = engine.submit(func, payload, receiver)


def retrieve(opening: asyncio.Task[None]) -> None:
    """Look at its error, which is told elsewhere, so that asyncio does not."""
    if not opening.cancelled():
        opening.exception()


_GIVEN_UP: Final = "this node was given up before it was open."


FROM_A_THREAD: Final = (
    "In an `async def`, await it. In this thread write `asyncio."
    "run_coroutine_threadsafe(call(), loop).result()`: `async def call()` awaits it, "
    "and `loop` is the event loop of the program."
)
"""What to write in a thread that has no event loop, beside a program that has one."""


shut_down: Final[WeakSet[asyncio.AbstractEventLoop]] = WeakSet()
"""Loops that had a node of `init`, which was shut down, and have no other since."""


HandleMaker = Callable[[str, Owner, asyncio.AbstractEventLoop], Handle[Any]]


def handle_maker(
    waits: Waits | None, remote_values: ValueStore | None = None
) -> HandleMaker:
    """Return what makes the handles that fit an engine.

    Args:
        waits: who is to be told of waits, None for nobody.
        remote_values: who knows the values of a node that is another process.
    """
    if remote_values is not None:
        from aiogpu.api.results.handle import RemoteHandle

        return partial(RemoteHandle, remote_values=remote_values)
    if waits is None:
        return Handle
    # Late, so that the zygote's start need not wait for it.
    from aiogpu.api.results.handle import ChildHandle

    return partial(ChildHandle, waits=waits)


class Session(EnteredOnLoop):
    """One node, as this event loop's program sees it. Made by `init`.

    Attributes:
        loop: the event loop.
        thread: the number of the thread that runs it.
        remote_values: who knows the values of a node that is another process.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self.loop = self._loop = loop
        self.thread = get_ident()
        self.remote_values, self._new_handle = (
            engine.remote_values,
            handle_maker(engine.waits, engine.remote_values),
        )
        self._state = SessionState.OPENING
        self._pid = os.getpid()
        self._early = EarlyRequests()
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        sessions[loop] = self
        shut_down.discard(loop)

    def __repr__(self) -> str:
        return f"<Session {self._state.value} {self._engine!r}>"

    @property
    def is_open(self) -> bool:
        """True if tasks can be started."""
        return self._state is SessionState.OPEN

    def _as_called(self) -> str:
        return "aiogpu.init(...)"

    async def __aenter__(self) -> Session:
        await self.opened()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # `asyncio.run` makes a first Ctrl-C a cancellation: this is the second one.
        is_pressed = kind is not None and issubclass(kind, KeyboardInterrupt)
        try:
            await self.shutdown(at_once=is_pressed)
        except KeyboardInterrupt:
            self._engine.hasten()
            raise

    def submit(self, func: FunctionSpec, payload: bytes) -> Handle[Any]:
        """Start a task; see `RemoteFunction.remote`."""
        handle = self._new_handle(func.spec.name, self, self._loop)
        if self._state is SessionState.OPEN and not passing:
            handle.task_id = self._engine.submit(func, payload, handle)
        else:
            self.start(func, payload, handle)
        return handle

    def start(self, func: FunctionSpec, payload: bytes, handle: Awaited) -> None:
        """Start a task for a handle or a stream that was made for it."""
        receiver: Receiver = handle
        if passing:
            from aiogpu.runtime.callers.caller import carrying

            receiver = carrying(handle)
        start = partial(submit_early, func, payload, handle, receiver)
        self.when_open(start, handle.fail)

    def new_stream(self, name: str, owner: StreamOwner, size: int) -> Stream[Any]:
        """A stream of this loop, of which its owner tells."""
        from aiogpu.api.results.handle import Stream

        return Stream(name, owner, size, self._loop, self._engine.waits)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload of arguments, whose handles must be of this node."""
        if self._state not in (SessionState.OPEN, SessionState.OPENING):
            raise self.unusable()
        for handle in outgoing.handles:
            check_node(handle, self._loop, self._engine.remote_values)
        return self._engine.pack(outgoing)

    def when_open(
        self, start: Callable[[Engine], None], fail: Callable[[Exception], None]
    ) -> None:
        """Ask something of the engine, now or as soon as it is open.

        Args:
            start: asks; what it raises later than now goes to `fail`.
            fail: told why the engine never opens.

        Raises:
            NodeError: it is closed, or belongs to another process.
        """
        if self._state is SessionState.OPEN:
            start(self._engine)
        elif self._state is SessionState.OPENING:
            self._early.add(start, fail)
        else:
            raise self.unusable()

    def check_thread(self, what: str) -> None:
        """Refuse a call from another thread than the event loop's [B45].

        asyncio's futures and the node's state belong to the loop's thread alone.

        Args:
            what: the call, for the message: "Model.predict.remote()".

        Raises:
            NoLoopError: another thread runs this.
        """
        if get_ident() != self.thread:
            raise NoLoopError(
                f"{what} was called in another thread than its event loop's. "
                f"{FROM_A_THREAD}"
            )

    def new_handle(self, name: str, owner: Owner) -> Handle[Any]:
        """A handle of this loop that its owner will settle."""
        return self._new_handle(name, owner, self._loop)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have something done on the loop, from whichever thread; or never.

        Never in a fork: the loop's node is the parent's.
        """
        if self._state is not SessionState.FORKED and not self._loop.is_closed():
            with suppress(RuntimeError):  # it was closed in this very moment
                self._loop.call_soon_threadsafe(call)

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all."""
        if self._state is not SessionState.FORKED:
            self._engine.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; its handle says so. In a fork the task is the parent's."""
        if self._state is not SessionState.FORKED:
            self._engine.cancel(task)

    async def why(self, name: str, task: int) -> Why:
        """Return why a task waits; see `Handle.why`."""
        # Late, so that the zygote's start need not wait for it.
        from aiogpu.observe.why import Why

        if self._state is SessionState.OPENING:
            return Why(name, task, "opening")
        return await self._ask().why(task) or Why(name, task, "ended")

    @property
    def is_closing(self) -> bool:
        """True if a shutdown has begun that has not ended."""
        return self._closing is not None and self._state is not SessionState.CLOSED

    @property
    def has_lost_its_node(self) -> bool:
        """True if that has ended by itself: `init` may open another."""
        return self._state is SessionState.OPEN and self._engine.has_gone

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the one that opened the session."""
        return self._state is SessionState.FORKED

    def unusable(self) -> NodeError:
        """The error for a session that is not open, with the reason."""
        if self._state is SessionState.FORKED:
            return NodeError(
                f"this node belongs to process {self._pid}, of which process "
                f"{os.getpid()} is a fork. Call .remote() there, or run a program "
                f"of its own here."
            )
        return NodeClosedError("this node is shut down; open one by aiogpu.init().")

    def start_opening(self) -> None:
        """Open the engine in the background; calls are kept meanwhile."""
        if "IPython" in sys.modules:
            from aiogpu.api.run import watch

            watch(sessions)
        self._closer = self._close_with_loop()
        first = self._closer.__anext__()
        with suppress(StopIteration):
            # Its first step registers it with the loop, which closes it at the end.
            first.send(None)
        self._opening = self._loop.create_task(self._open())

    async def opened(self) -> None:
        """Wait until the node is open; raises what kept it from opening."""
        if self._opening is None:
            return
        try:
            await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if self._opening.cancelled() and waiter and not waiter.cancelling():
                # Another task shut the node down; this one is not cancelled.
                raise NodeClosedError(_GIVEN_UP) from None
            raise

    async def _open(self) -> None:
        try:
            await self._engine.open()
        except BaseException as error:
            self._forget(SessionState.CLOSED)
            self._fail_early(error)
            raise
        self._state = SessionState.OPEN
        self._early.start_all(self._engine)

    def _fail_early(self, error: BaseException) -> None:
        told = error if isinstance(error, Exception) else NodeClosedError(_GIVEN_UP)
        if self._early.fail_all(told) and self._opening is not None:
            # The handles carry the error; the task need not warn of it as well.
            self._opening.add_done_callback(retrieve)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._closer = None
            if self._state is not SessionState.CLOSED:
                await self.shutdown()

    async def shutdown(self, at_once: bool = False) -> None:
        """Stop all tasks and wait until nothing of the node is left; idempotent.

        `at_once` is by force: nobody is given time to stop.
        """
        if self._state is SessionState.FORKED or self._pid != os.getpid():
            return
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        if at_once and self._state is not SessionState.CLOSED:
            self._engine.hasten()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._opening is not None and not self._opening.done():
                # It may hang in an import of the user's.
                self._opening.cancel()
                await asyncio.wait([self._opening])
            if self._opening is not None:
                retrieve(self._opening)
            if self._state is not SessionState.CLOSED:
                self._state = SessionState.CLOSING
                await self._engine.close()
        except (asyncio.CancelledError, KeyboardInterrupt):
            # The loop is ending; its last act, `_close_with_loop`, begins anew.
            self._engine.hasten()
            self._closing = None
            raise
        except BaseException:
            self._forget(SessionState.CLOSED)
            raise
        self._forget(SessionState.CLOSED)
        if self._closer is not None:
            closer, self._closer = self._closer, None
            await closer.aclose()

    def _forget(self, state: SessionState) -> None:
        self._state = state
        if sessions.get(self._loop) is self:
            del sessions[self._loop]
            shut_down.add(self._loop)

    @property
    def home(self) -> str:
        """Tells its node from others; see `Engine.home`."""
        return self._engine.home

    async def cluster_resources(self) -> dict[str, float]:
        """All resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
        return await self._ask().total()

    async def available_resources(self) -> dict[str, float]:
        """Return what is free of each; 0.0 where nothing is."""
        return await self._ask().available()

    def actors(self) -> ActorsPort:
        """The node's actors; raises `NodeError` if it is not open."""
        return self._ask().actors

    async def status(self) -> NodeStatus:
        """Who holds what share of which device, what waits and why."""
        return await self._ask().status()

    def _ask(self) -> Engine:
        if self._state is not SessionState.OPEN:
            raise self.unusable()
        return self._engine

    def disown(self) -> None:
        """This process is a fork: the session is its parent's."""
        self._state = SessionState.FORKED
        self._engine.disown()

    def abandon(self) -> None:
        """The interpreter ends and no loop runs any more: leave no files."""
        if self._state is not SessionState.FORKED and self._pid == os.getpid():
            self._engine.abandon()


_get_running_loop: Final = asyncio._get_running_loop


_log: Final = logging.getLogger(__name__)


def start_session(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Session:
    """Make a session and begin to open it; calls may be made at once."""
    session = Session(create_engine(address, options, loop), loop)
    session.start_opening()
    return session


def current_session(what: str = ".remote()") -> Session:
    """The running loop's session; one is opened if there is none.

    Args:
        what: who needs it, for the message.

    Raises:
        NoLoopError: no event loop is running in this thread.
    """
    loop = _get_running_loop()
    session: Session | None = sessions.get(loop)  # type: ignore[arg-type]
    if session is not None:
        return session
    refuse_in_worker("the node")
    if loop is not None and loop in shut_down:
        shut_down.discard(loop)
        _log.warning(
            "! %s opens a node with the defaults, since the program's own was shut "
            "down. Make the call before the end of `async with aiogpu.init(...)`, or "
            "open another node by aiogpu.init().",
            what,
        )
    if loop is None:
        for inherited in sessions.values():
            if inherited.is_forked:
                raise inherited.unusable()
        raise no_loop(what)
    return start_session(default_address(), NodeOptions(), loop)


def no_loop(what: str) -> NoLoopError:
    """The error for what is called where it has no event loop."""
    if any(session.is_open for session in sessions.values()):
        return NoLoopError(
            f"{what} needs the program's event loop, which runs in another thread. "
            f"{FROM_A_THREAD}"
        )
    return NoLoopError(
        f"{what} needs a running event loop, and there is none in this thread. Call it "
        f"inside an `async def`: a program runs that by aiogpu.run(main()), a server "
        f"and a notebook run it on the loop that they have."
    )


def _disown_all() -> None:
    for session in sessions.values():
        session.disown()


def _abandon_all() -> None:
    for session in list(sessions.values()):
        session.abandon()


os.register_at_fork(after_in_child=_disown_all)
atexit.register(_abandon_all)


def session_beside(host: Host, loop: asyncio.AbstractEventLoop) -> Session | None:
    """The session of a task's code on a loop, if its host has an engine for that."""
    session = sessions.get(loop)
    if session is None:
        engine = host.engine(loop)
        if engine is None:
            return None
        for closed in [one for one in sessions if one.is_closed()]:
            del sessions[closed]
        session = Session(engine, loop)
        session._state = SessionState.OPEN
    return session
