"""Sessions: a program's connection to a node, one for each event loop.

A `.remote()` without one opens an embedded node with the defaults, which closes with
its loop. A fork of the program inherits an inert session, which does not touch the
parent's node.
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
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar
from weakref import WeakSet

from aiogpu.api.results.blocking import Owner, StreamOwner
from aiogpu.api.results.handle import (
    ChildHandle,
    Handle,
    RemoteHandle,
    check_home,
    sessions,
)
from aiogpu.client.current import current, error_inside_task
from aiogpu.client.interface import Receiver
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.registry import create_engine
from aiogpu.errors import NodeClosedError, NodeError, NoLoopError

if TYPE_CHECKING:
    from aiogpu.api.results.stream import Stream
    from aiogpu.client.function_spec import FunctionSpec
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


HandleMaker = Callable[[str, Owner], Handle[Any]]
"""Makes a handle of a loop, given its name and its owner."""


T = TypeVar("T")


class EarlyRequests(Generic[T]):
    """Requests to something that is not there yet: an opening engine, an actor."""

    def __init__(self) -> None:
        self._requests: list[
            tuple[Callable[[T], object], Callable[[Exception], object]]
        ] = []

    def add(
        self, ask: Callable[[T], object], fail: Callable[[Exception], object]
    ) -> None:
        """Keep a request; `fail` gets the error if it cannot be made or raises."""
        self._requests.append((ask, fail))

    def make(self, there: T) -> None:
        """The node is open: make the requests, in order."""
        requests, self._requests = self._requests, []
        for ask, fail in requests:
            try:
                ask(there)
            except Exception as error:  # noqa: BLE001 - it is the handle's
                fail(error)

    def fail(self, error: Exception) -> bool:
        """The node failed to open: fail the requests; return False if none exist."""
        requests, self._requests = self._requests, []
        for _, fail in requests:
            fail(error)
        return bool(requests)


class SessionState(Enum):
    """The state of a session."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"
    """This process is a fork of the one that opened it."""


class Awaited(Receiver, Protocol):
    """A handle, or the buffer of a stream's items.

    Attributes:
        task_id: the task's number, set when it is started.
    """

    task_id: int

    def done(self) -> bool:
        """Return whether it has ended or was cancelled."""
        ...


def retrieve(opening: asyncio.Task[None]) -> None:
    """Mark the error as retrieved: it is reported elsewhere, so none must warn."""
    if not opening.cancelled():
        opening.exception()


_GIVEN_UP: Final = "this node was given up before it was open."


FROM_A_THREAD: Final = (
    "In an `async def`, await it there. In this thread write "
    "`aiogpu.from_thread(f.remote, x).result()`, which has the loop make the call."
)
"""What to write in a thread without an event loop, if another thread runs one."""


shut_down: Final[WeakSet[asyncio.AbstractEventLoop]] = WeakSet()
"""Loops whose node was shut down and that have opened no other since."""


class Session:
    """One node, as this event loop's program sees it. Made by `init`.

    Attributes:
        loop: the event loop.
        thread: the number of the thread that runs it.
        remote_values: the store of values if the node is another process, else None.
        new_handle: makes a handle of this loop.
        opened_by: the call that has opened it, ".remote()"; "" for `init`.
    """

    opened_by = ""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self.loop = loop
        self.thread = get_ident()
        self.remote_values = engine.remote_values
        self.new_handle: HandleMaker = partial(Handle, loop=loop)
        if self.remote_values is not None:
            self.new_handle = partial(
                RemoteHandle, loop=loop, remote_values=self.remote_values
            )
        elif engine.waits is not None:
            self.new_handle = partial(ChildHandle, loop=loop, waits=engine.waits)
        self._state = SessionState.OPENING
        self._pid = os.getpid()
        self._early: EarlyRequests[Engine] = EarlyRequests()
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

    async def leave(self, error: BaseException | None) -> None:
        """Shut down at the end of an `async with` block that ends with this error."""
        # `asyncio.run` makes a first Ctrl-C a cancellation: this is the second one.
        try:
            await self.shutdown(at_once=isinstance(error, KeyboardInterrupt))
        except KeyboardInterrupt:
            self._engine.force_close()
            raise

    def submit(self, func: FunctionSpec, payload: bytes) -> Handle[Any]:
        """Start a task; see `RemoteFunction.remote`."""
        handle = self.new_handle(func.spec.name, self)
        if self._state is SessionState.OPEN:
            handle.task_id = self._engine.submit(func, payload, handle)
        else:
            self.start(func, payload, handle)
        return handle

    def start(self, func: FunctionSpec, payload: bytes, handle: Awaited) -> None:
        """Start a task for a handle or a stream that was made for it."""

        def start(engine: Engine) -> None:
            if not handle.done():
                handle.task_id = engine.submit(func, payload, handle)

        self.when_open(start, handle.settle)

    def new_stream(self, name: str, owner: StreamOwner, size: int) -> Stream[Any]:
        """A stream of this loop."""
        from aiogpu.api.results.stream import Stream

        return Stream(name, owner, size, self.loop, self._engine.waits)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload of arguments; their handles must belong to this node."""
        if self._state not in (SessionState.OPEN, SessionState.OPENING):
            raise self.unusable()
        for handle in outgoing.handles:
            check_home(handle, self.loop, self)
        return self._engine.pack(outgoing)

    def when_open(
        self, start: Callable[[Engine], object], fail: Callable[[Exception], None]
    ) -> None:
        """Ask something of the engine, now or as soon as it is open.

        Args:
            start: makes the request; if it is made later, its error goes to `fail`.
            fail: called with the reason if the engine never opens.

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

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call something on the loop, from any thread, unless the loop is closed.

        Does nothing in a fork, where the loop and its node are the parent's.
        """
        if self._state is not SessionState.FORKED and not self.loop.is_closed():
            with suppress(RuntimeError):  # it was closed in this very moment
                self.loop.call_soon_threadsafe(call)

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
        return await self.engine.why(task) or Why(name, task, "ended")

    @property
    def is_closing(self) -> bool:
        """True if a shutdown has begun that has not ended."""
        return self._closing is not None and self._state is not SessionState.CLOSED

    @property
    def has_lost_its_node(self) -> bool:
        """True if the node has died, so that `init` may open another."""
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
        """Open the engine in the background; calls are queued until it is open."""
        if "IPython" in sys.modules:
            from aiogpu.api.run import watch

            watch(sessions)
        self._closer = self._close_with_loop()
        first = self._closer.__anext__()
        with suppress(StopIteration):
            # Its first step registers it with the loop, which closes it at the end.
            first.send(None)
        self._opening = self.loop.create_task(self._open())

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
            told = error if isinstance(error, Exception) else NodeClosedError(_GIVEN_UP)
            if self._early.fail(told) and self._opening is not None:
                # The handles carry the error; the task need not warn of it as well.
                self._opening.add_done_callback(retrieve)
            raise
        self._state = SessionState.OPEN
        self._early.make(self._engine)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._closer = None
            if self._state is not SessionState.CLOSED:
                await self.shutdown()

    def announce_stop(self) -> None:
        """Let tasks know that the program stops."""
        if self._state is SessionState.OPEN:
            self._engine.announce_stop()

    async def shutdown(self, at_once: bool = False) -> None:
        """Stop all tasks and wait until nothing of the node is left; idempotent.

        With `at_once`, tasks are given no time to stop by themselves.
        """
        if self._state is SessionState.FORKED or self._pid != os.getpid():
            return
        if self._closing is None:
            self._closing = self.loop.create_task(self._close())
        if at_once and self._state is not SessionState.CLOSED:
            self._engine.force_close()
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
            self._engine.force_close()
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
        if sessions.get(self.loop) is self:
            del sessions[self.loop]
            shut_down.add(self.loop)

    @property
    def engine(self) -> Engine:
        """The engine of the node; raises `NodeError` if it is not open."""
        if self._state is not SessionState.OPEN:
            raise self.unusable()
        return self._engine

    def after_fork(self) -> None:
        """This process is a fork: the session is its parent's."""
        self._state = SessionState.FORKED
        self._engine.after_fork()

    def close_now(self) -> None:
        """Remove the node's files at the exit of the interpreter."""
        if self._state is not SessionState.FORKED and self._pid == os.getpid():
            self._engine.close_now()


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
    session = start_session(default_address(), NodeOptions(), loop)
    session.opened_by = what
    return session


def session_of_program(what: str) -> Session:
    """The running loop's session, for what only a program may ask of its node.

    Raises:
        NodeError: it is asked in a task.
    """
    if current.worker and sessions.get(_get_running_loop()) is None:  # type: ignore[arg-type]
        raise error_inside_task(what)
    return current_session(what)


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
        f"and a notebook run it on the loop that they have. Or write `import "
        f"aiogpu.sync`, which needs no loop."
    )


def _after_fork() -> None:
    for session in sessions.values():
        session.after_fork()


def _close_all_now() -> None:
    for session in list(sessions.values()):
        session.close_now()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all_now)
