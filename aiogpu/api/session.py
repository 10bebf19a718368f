"""Sessions: a program's connection to a node, one for each event loop.

A `.remote()` without a session opens an embedded node with the defaults, which closes
with its loop. A fork of the program inherits an inert session, which does not touch the
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
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet, WeakValueDictionary

from aiogpu.api.results.base import BorrowedClient, Owner, StreamOwner, client_for
from aiogpu.api.results.handle import Handle, check_home, sessions
from aiogpu.client.current import current, error_inside_task, inline_client
from aiogpu.client.interface import Receiver
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.engines.registry import create_engine
from aiogpu.errors import NodeClosedError, NodeError, NoLoopError

if TYPE_CHECKING:
    from aiogpu.api.dashboard import DashboardProcess
    from aiogpu.api.results.stream import Stream
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import PickledValue


def default_address() -> str | None:
    """Return the value of the variable AIOGPU_ADDRESS; None if unset or empty."""
    return os.environ.get("AIOGPU_ADDRESS") or None


def refuse_in_worker(what: str) -> None:
    """Refuse a call in a worker process.

    Raises:
        NodeError: this process is a worker.
        MisuseError: this process is a worker that is importing a module.
    """
    if current.worker or current.is_loading:
        from aiogpu.worker.nested import refuse_while_importing

        refuse_while_importing()
    if current.worker:
        raise NodeError(
            f"{what} is not available inside a task or in a process that a task "
            f"forked; only the program can use it. A task starts other tasks by "
            f".remote(); on an inline node, only in its own thread."
        )


Send = Callable[[Engine], object]
"""Sends a request to an open engine."""

Refuse = Callable[[Exception], object]
"""Takes the reason why a request cannot be sent."""


class SessionState(Enum):
    """The state of a session."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"
    """This process is a fork of the process that opened the session."""


_OPEN: Final = SessionState.OPEN


class Awaited(Receiver, Protocol):
    """A handle, or the buffer of a stream's items."""

    def on_submitted(self, number: int) -> None:
        """Note the number of the submitted task."""
        ...

    def done(self) -> bool:
        """Return whether the task has ended or was cancelled."""
        ...


def retrieve(opening: asyncio.Task[None]) -> None:
    """Mark the error as retrieved, so that asyncio does not warn of it."""
    if not opening.cancelled():
        opening.exception()


_SHUT_DOWN_EARLY: Final = "this node was shut down before it was open."


FROM_A_THREAD: Final = (
    "In an `async def`, await the call there. In this thread write "
    "`aiogpu.from_thread(f.remote, x).result()`, which makes the call on the loop."
)
"""Advice for a thread without an event loop, if another thread runs one."""


shut_down: Final[WeakSet[asyncio.AbstractEventLoop]] = WeakSet()
"""Loops whose node was shut down, until they open another."""


class Session:
    """The connection of an event loop to its node; made by `init`.

    Attributes:
        loop: the event loop.
        thread: the id of the thread that runs the loop.
        remote_values: the store of values if the node is another process, else None.
        new_handle: makes a handle of this loop, given its name and its owner.
        opened_by: the call that opened the session, ".remote()"; "" for `init`.
        dashboard: the process of the dashboard; None without one.
        actor_watchers: who is told when this program ends an actor, by actor.
    """

    opened_by = ""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        has_dashboard: bool = False,
    ) -> None:
        self._engine = engine
        self._has_dashboard = has_dashboard
        self.dashboard: DashboardProcess | None = None
        self.loop = loop
        self.thread = get_ident()
        self.remote_values = engine.remote_values
        client = client_for(self.remote_values)
        self.new_handle: Callable[[str, Owner], Handle[Any]]
        self.new_handle = partial(Handle, loop=loop, client=client)
        self._state = SessionState.OPENING
        self._pid = os.getpid()
        self._early: list[tuple[Send, Refuse]] = []  # until the engine is open
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self.actor_watchers: WeakValueDictionary[int, WeakSet[Any]]
        self.actor_watchers = WeakValueDictionary()
        sessions[loop] = self
        shut_down.discard(loop)

    def __repr__(self) -> str:
        return f"<Session {self._state.value} {self._engine!r}>"

    @property
    def is_open(self) -> bool:
        """True if tasks can be started."""
        return self._state is SessionState.OPEN

    @property
    def is_opening(self) -> bool:
        """True until the node is open; calls wait until then."""
        return self._state is SessionState.OPENING

    def promise_actor(self) -> int:
        """Return the id of an actor, if the node is not open yet; 0 if unknown."""
        return self._engine.promise_actor() if self.is_opening else 0

    async def leave(self, error: BaseException | None) -> None:
        """Shut down at the end of an `async with` block that ends with this error."""
        # `asyncio.run` turns the first Ctrl-C into a cancellation, and only the second
        # into a KeyboardInterrupt.
        try:
            await self.shutdown(at_once=isinstance(error, KeyboardInterrupt))
        except KeyboardInterrupt:
            self._engine.force_close()
            raise

    def submit(self, func: FunctionSpec, payload: bytes) -> Handle[Any]:
        """Start a task; see `RemoteFunction.remote`."""
        handle = self.new_handle(func.spec.name, self)
        if self._state is _OPEN:
            handle.task_id = self._engine.submit(func, payload, handle)
        else:
            self.start(func, payload, handle)
        return handle

    def start(self, func: FunctionSpec, payload: bytes, handle: Awaited) -> None:
        """Start a task for an existing handle or stream."""

        def start(engine: Engine) -> None:
            if not handle.done():
                handle.on_submitted(engine.submit(func, payload, handle))

        self.when_open(start, handle.settle)

    def new_borrowed(self, name: str, reference: Any) -> Handle[Any]:
        """Return a handle for the value that a received handle refers to."""
        client = BorrowedClient(reference, self.remote_values, self.why)
        return Handle(name, client, self.loop, client)

    def new_stream(self, name: str, owner: StreamOwner, size: int) -> Stream[Any]:
        """Return a new stream of this loop."""
        from aiogpu.api.results.stream import Stream

        return Stream(name, owner, size, self.loop, self._engine.waits)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload of arguments; handles in them must belong to this node."""
        if self._state not in (SessionState.OPEN, SessionState.OPENING):
            raise self.unusable()
        for handle in outgoing.handles:
            check_home(handle, self.loop, self)
        return self._engine.pack(outgoing)

    def when_open(self, start: Send, fail: Refuse) -> None:
        """Send a request to the engine, now or as soon as the engine is open.

        Args:
            start: sends the request; if it raises later, `fail` gets the error.
            fail: called with the reason if the engine never opens.

        Raises:
            NodeError: the session is closed, or belongs to another process.
        """
        if self._state is SessionState.OPEN:
            start(self._engine)
        elif self._state is SessionState.OPENING:
            self._early.append((start, fail))
        else:
            raise self.unusable()

    def check_thread(self, what: str) -> None:
        """Refuse a call from a thread other than the event loop's.

        Only the loop's thread may touch asyncio's futures and the node's state.

        Args:
            what: the call, for the message: "Model.predict.remote()".

        Raises:
            NoLoopError: another thread made the call.
        """
        if get_ident() != self.thread:
            raise NoLoopError(
                f"{what} was called in a thread other than its event loop's. "
                f"{FROM_A_THREAD}"
            )

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call a function on the loop, from any thread, unless the loop is closed.

        Does nothing in a fork, where the loop and its node are the parent's.
        """
        if self._state is not SessionState.FORKED and not self.loop.is_closed():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(call)

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield up to `limit` items in all."""
        if self._state is not SessionState.FORKED:
            self._engine.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; do nothing in a fork, where the task is the parent's."""
        if self._state is not SessionState.FORKED:
            self._engine.cancel(task)

    async def why(self, name: str, task: int) -> Why:
        """Return why a task waits; see `Handle.why`."""
        # Imported late: the start of the zygote does not wait for this module.
        from aiogpu.observe.why import Why

        if self._state is SessionState.OPENING:
            return Why(name, task, "opening")
        return await self.engine.why(task) or Why(name, task, "ended")

    @property
    def is_closing(self) -> bool:
        """True while the session is shutting down."""
        return self._closing is not None and self._state is not SessionState.CLOSED

    @property
    def has_lost_its_node(self) -> bool:
        """True if the node has died, so that `init` may open another."""
        return self._state is SessionState.OPEN and self._engine.has_gone

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the process that opened the session."""
        return self._state is SessionState.FORKED

    def unusable(self) -> NodeError:
        """Return the error for a session that is not open, with the reason."""
        if self._state is SessionState.FORKED:
            return NodeError(
                f"this node belongs to process {self._pid}, and process {os.getpid()} "
                f"is a fork of it. Call .remote() in process {self._pid}, or start a "
                f"new program instead of forking."
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
            # The first step registers the generator with the loop, which closes it at
            # the end.
            first.send(None)
        self._opening = self.loop.create_task(self._open())

    async def opened(self) -> None:
        """Wait until the node is open; raise the error if it fails to open."""
        if self._opening is None:
            return
        try:
            await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if self._opening.cancelled() and waiter and not waiter.cancelling():
                # Another task shut the node down; the waiting task is not cancelled.
                raise NodeClosedError(_SHUT_DOWN_EARLY) from None
            raise

    async def _open(self) -> None:
        try:
            await self._engine.open()
            if self._has_dashboard:
                await self._start_dashboard()
        except BaseException as error:
            self._forget(SessionState.CLOSED)
            reason = (
                error
                if isinstance(error, Exception)
                else NodeClosedError(_SHUT_DOWN_EARLY)
            )
            early, self._early = self._early, []
            for _, fail in early:
                fail(reason)
            if early and self._opening is not None:
                # The handles carry the error, so asyncio must not warn of it as well.
                self._opening.add_done_callback(retrieve)
            raise
        self._state = SessionState.OPEN
        early, self._early = self._early, []
        for start, fail in early:
            try:
                start(self._engine)
            except Exception as error:  # noqa: BLE001 - the handle reports it
                fail(error)

    async def _start_dashboard(self) -> None:
        from aiogpu.api.dashboard import DashboardProcess

        try:
            process = DashboardProcess(self._engine.node_socket)
            await process.start()
        except BaseException:
            await self._engine.close()
            raise
        self.dashboard = process

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._closer = None
            if self._state is not SessionState.CLOSED:
                await self.shutdown()

    def announce_stop(self) -> None:
        """Tell running tasks that the program stops."""
        if self._state is SessionState.OPEN:
            self._engine.announce_stop()

    async def shutdown(self, at_once: bool = False) -> None:
        """Stop all tasks and wait until nothing of the node is left; idempotent.

        With `at_once`, tasks get no time to stop by themselves.
        """
        if self._state is SessionState.FORKED or self._pid != os.getpid():
            return
        if self._closing is None or self._closing.cancelled():
            # It may have been cancelled before its first step, with all of the loop's
            # other tasks.
            self._closing = self.loop.create_task(self._close())
        if at_once and self._state is not SessionState.CLOSED:
            self._engine.force_close()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._opening is not None and not self._opening.done():
                # Opening may hang in an import of user code.
                self._opening.cancel()
                await asyncio.wait([self._opening])
            if self._opening is not None:
                retrieve(self._opening)
            if self._state is not SessionState.CLOSED:
                self._state = SessionState.CLOSING
                if self.dashboard is not None:
                    process, self.dashboard = self.dashboard, None
                    await process.close()
                await self._engine.close()
        except (asyncio.CancelledError, KeyboardInterrupt):
            # The loop is ending; it runs `_close_with_loop` last, which closes again.
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
        """Make the session inert in a fork, where it belongs to the parent."""
        self._state = SessionState.FORKED
        self._engine.after_fork()
        if self.dashboard is not None:
            self.dashboard.after_fork()

    def close_now(self) -> None:
        """Remove the node's files when the interpreter exits."""
        if self._state is not SessionState.FORKED and self._pid == os.getpid():
            self._engine.close_now()
            if self.dashboard is not None:
                self.dashboard.close_now()


_get_running_loop: Final = asyncio._get_running_loop


_log: Final = logging.getLogger(__name__)


def start_session(
    address: str | None, options: NodeOptions, loop: asyncio.AbstractEventLoop
) -> Session:
    """Make a session and start to open it; it accepts calls at once."""
    engine = create_engine(address, options, loop)
    if options.dashboard:
        from aiogpu.api.dashboard import check_dashboard

        check_dashboard()
    session = Session(engine, loop, has_dashboard=options.dashboard)
    session.start_opening()
    return session


def find_session(what: str = ".remote()", *, is_for_programs: bool = False) -> Session:
    """Return the session of the running code; open one if its loop has none.

    It is the session of the running loop, or of the program whose inline node runs the
    calling thread's task.

    Args:
        what: the call that needs the session, for messages.
        is_for_programs: True for a call that a task cannot make.

    Raises:
        NoLoopError: no event loop is running in this thread.
        NodeError: the call was made in a task that cannot make it.
    """
    loop = _get_running_loop()
    session: Session | None = sessions.get(loop)  # type: ignore[arg-type]
    if session is not None:
        return session
    if is_for_programs and current.worker:
        raise error_inside_task(what)
    inline = inline_client.get()
    if inline is not None and inline.program in sessions:
        return sessions[inline.program]  # type: ignore[no-any-return]
    refuse_in_worker("the node")
    if loop is None:
        for inherited in sessions.values():
            if inherited.is_forked:
                raise inherited.unusable()
        raise no_loop(what)
    if loop in shut_down:
        shut_down.discard(loop)
        _log.warning(
            "! %s opens a node with default options, because the program's node was "
            "shut down. Make the call before the end of `async with "
            "aiogpu.init(...)`, or open another node by aiogpu.init().",
            what,
        )
    session = start_session(default_address(), NodeOptions(), loop)
    session.opened_by = what
    return session


def no_loop(what: str) -> NoLoopError:
    """Return the error for a call in a thread without an event loop."""
    if any(session.is_open for session in sessions.values()):
        return NoLoopError(
            f"{what} needs the program's event loop, which runs in another thread. "
            f"{FROM_A_THREAD}"
        )
    return NoLoopError(
        f"{what} needs a running event loop, and there is none in this thread. Call it "
        f"inside an `async def main()` and run that by aiogpu.run(main()); servers and "
        f"notebooks run coroutines on their own loop. For code without an event loop, "
        f"use `aiogpu.sync`."
    )


def _after_fork() -> None:
    for session in sessions.values():
        session.after_fork()


def _close_all_now() -> None:
    for session in list(sessions.values()):
        session.close_now()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all_now)
