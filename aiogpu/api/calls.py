"""How a call is made, from wherever: on the running loop's node, or by a task's client.

Tells which of the two the running code has, makes the kind of handle or stream that
fits it, and the payload of what it sends. On an inline node plain code of a task has no
event loop, and may run one of its own; the node is the one that its program has opened
all the same. Light on purpose: workers bring this file for a task's own calls, and so
asyncio and the session are imported where a program calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from aiogpu.api.results.blocking import (
    BlockingHandle,
    BlockingStream,
    HandleBase,
    ItemBuffer,
)
from aiogpu.client.current import (
    client_of_task,
    host_of_task,
    is_loop_running,
    passing,
    services,
)
from aiogpu.errors import InternalError, MisuseError
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import HANDLE_MARK, PickledValue
from aiogpu.serialization.serializer import PUT, WARNED_FROM, dump_result

if TYPE_CHECKING:
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.session import Session
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Client, Host, ValueStore
    from aiogpu.engines.base import Engine
    from aiogpu.observe.why import Why
    from aiogpu.serialization.large_arguments import RepeatedArguments
    from aiogpu.wire.messages import Failed

T = TypeVar("T")

# Who calls.


def session_of_caller(what: str = ".remote()") -> Session:
    """The session of the program to which the code belongs that asks.

    Args:
        what: what it calls, for the message.

    Raises:
        NoLoopError: no event loop is running in this thread.
        NodeError: this is a task that has no node.
    """
    import asyncio

    from aiogpu.api.results.handle import session_of
    from aiogpu.api.session import current_session, session_beside

    host = host_of_task.get()
    if host is None:
        return current_session(what)
    loop = asyncio._get_running_loop() or host.program
    session: Session | None = session_of(loop)
    if session is None:
        session = session_beside(host, loop) or session_of(host.program)
    return session or current_session(what)


def may_use(session: Session) -> bool:
    """Whether the code that runs works with a session, which is open, or with none."""
    import asyncio

    from aiogpu.api.results.handle import session_of

    own = session_of(asyncio._get_running_loop())
    is_own = own in (None, session) or host_of_task.get() is not None
    return session.is_open and is_own


def host_beside_loop() -> Host | None:
    """The host of the task whose code asks, if no loop with a session runs it."""
    host = host_of_task.get()
    if host is None:
        return None
    import asyncio

    loop = asyncio._get_running_loop()
    if loop is None:
        return host
    return None if loop is host.program or host.engine(loop) is not None else host


def current_client() -> Client | None:
    """The client of the task whose code asks; None where a session takes its calls."""
    return services.client or host_beside_loop()


# Tasks.


def submitter() -> Callable[[FunctionSpec, bytes], Any]:
    """What starts tasks in this process and gives their handles."""
    if services.client is not None:
        return submit_in_task
    import asyncio

    from aiogpu.api.results.handle import sessions

    _get_running_loop = asyncio._get_running_loop

    def submit(func: FunctionSpec, payload: bytes) -> Handle[Any]:
        session = sessions.get(_get_running_loop())  # type: ignore[arg-type]
        if session is None:
            if host_beside_loop() is not None:
                return submit_in_task(func, payload)  # type: ignore[no-any-return]
            session = session_of_caller()
        return session.submit(func, payload)

    return submit


def submit_in_task(func: FunctionSpec, payload: bytes) -> Any:
    """Start a child of the task whose code asks; gives the kind of handle that fits.

    Raises:
        MisuseError: no task runs, but what one has left behind.
    """
    client = client_of_task()
    return request(client, func.spec.name, partial(client.submit, func, payload))


def submit_several(count: int, func: FunctionSpec, payload: bytes) -> tuple[Any, ...]:
    """Start a task that has so many results; gives the handle of each."""
    return call_several(func.spec.name, count, Submission(func, payload))


def submit_stream(func: FunctionSpec, payload: bytes) -> Any:
    """Start a task that is a generator; gives the kind of stream that fits."""
    client: Client | None = services.client
    if client is None:
        import asyncio

        from aiogpu.api.results.handle import session_of

        session: Session | None = session_of(asyncio._get_running_loop())
        if session is not None or host_beside_loop() is None:
            session = session or session_of_caller()
            stream = session.new_stream(func.spec.name, session, func.window)
            session.start(func, payload, stream.inflow)
            return stream
        client = client_of_task()
    start = partial(client.submit, func, payload)
    return request_stream(client, func.spec.name, func.window, start)


def request(client: Client, name: str, start: Callable[[Any], int]) -> Any:
    """The kind of handle that fits, of what a task asks for.

    Args:
        client: of the task whose code asks.
        name: what the handle is called.
        start: makes the request, given who waits for its end; gives its number.
    """
    handle = handle_for(client, name)
    handle.task_id = start(_carrying(handle))
    return handle


def request_stream(
    client: Client, name: str, size: int, start: Callable[[Any], int]
) -> Any:
    """The kind of stream that fits, of what a task asks for; see `request`.

    `size` is how many items it may be ahead.
    """
    stream: Any
    if is_loop_running():
        import asyncio

        from aiogpu.api.results.handle import Stream

        loop = asyncio.get_running_loop()
        stream = Stream(name, client, size, loop, client.waits)
        inflow: ItemBuffer = stream.inflow
    else:
        inflow = ItemBuffer(name, _Source(client), size)
        stream = BlockingStream(inflow, client)
    inflow.task_id = start(_carrying(inflow))
    return stream


class _Source(NamedTuple):
    """Reaches a child from plain code."""

    client: Client

    def demand(self, task: int, limit: int) -> None:
        self.client.demand(task, limit)

    def cancel(self, task: int) -> None:
        self.client.withdraw(task)


def _carrying(receiver: Any) -> Any:
    """The receiver of a request that holds the actors alive whose handles it has."""
    if passing and services.client is None:
        from aiogpu.runtime.callers.caller import carrying

        return carrying(receiver)
    return receiver


def handle_for(client: Client, name: str, owner: Any = None) -> Any:
    """The kind of handle that fits, for the code of a task.

    `owner` stops the work and is asked about it; None for the client.
    """
    if not is_loop_running():
        return BlockingHandle(name, client, owner)
    import asyncio

    from aiogpu.api.results.handle import ChildHandle

    loop = asyncio.get_running_loop()
    return ChildHandle(name, owner or client, loop, client.waits)


# Calls with several results.


class ResultGroup:
    """The receiver of a call that has several results, and the owner of its handles.

    Each result is a value of its own. The work goes on as long as somebody wants one of
    them; when all are cancelled, it is stopped.

    Attributes:
        task_id: the call's number.
        handles: one for each result.
        stop: stops the call, given its number.
        ask: says why it waits, given its name and number.
    """

    def __init__(self) -> None:
        self.task_id = 0
        self.handles: tuple[Any, ...] = ()
        self.stop: Callable[[int], object]
        self.ask: Callable[[str, int], Awaitable[Why]]
        self._wanted = 0

    def __repr__(self) -> str:
        return f"<ResultGroup {len(self.handles)} results of task {self.task_id}>"

    def begin(self, handles: tuple[Any, ...]) -> None:
        """Serve these handles."""
        self.handles = handles
        self._wanted = len(handles)
        for index, handle in enumerate(handles):
            handle.part = index

    def note(self, number: int) -> None:
        """The call was made, under that number."""
        self.task_id = number
        for handle in self.handles:
            handle.task_id = number  # some were given to others before

    def done(self) -> bool:
        """Return whether nobody wants a result any more, or all have come."""
        return all(handle.done() for handle in self.handles)

    def cancel(self, _task: int) -> None:
        """One of them is not wanted; see `Owner`."""
        self._wanted -= 1
        if not self._wanted:
            self.stop(self.task_id)

    async def why(self, name: str, _task: int) -> Why:
        """Return why the call waits."""
        return await self.ask(name, self.task_id)

    def receive(self, payload: bytes) -> None:
        """The call has ended; see `Receiver`."""
        parts = payload.parts if type(payload) is Payload else ()
        if len(parts) != len(self.handles):
            self.fail(InternalError(f"{self!r} came as {len(parts)}"))
            return
        for handle, part in zip(self.handles, parts, strict=True):
            handle.receive(part)

    def reject(self, failed: Failed) -> None:
        """It has no results."""
        for handle in self.handles:
            handle.reject(failed)
        self._quieten()

    def fail(self, error: Exception) -> None:
        """It has none, for that reason."""
        for handle in self.handles:
            handle.fail(error)
        self._quieten()

    def _quieten(self) -> None:
        """One of them tells asyncio of the failure, if nobody looks at it."""
        for handle in self.handles[1:]:
            if not handle.cancelled():
                handle.exception()

    def abandon(self) -> None:
        """The task that made the call has ended first."""
        for handle in self.handles:
            handle.abandon()


class Start(Protocol):
    """How a call for a `ResultGroup` is made, from wherever it is called."""

    def in_program(self, session: Session, several: ResultGroup) -> None:
        """Make it on the program's node."""

    def by_client(self, client: Client, several: ResultGroup) -> None:
        """Make it for the task whose code asks."""


class Submission(NamedTuple):
    """The `Start` of a task.

    Attributes:
        func: what is called.
        payload: the pickled arguments.
    """

    func: FunctionSpec
    payload: bytes

    def in_program(self, session: Session, several: ResultGroup) -> None:
        """Start it on the program's node."""

        def start(engine: Engine) -> None:
            if not several.done():
                several.note(engine.submit(self.func, self.payload, several))

        several.stop, several.ask = session.cancel, session.why
        session.when_open(start, several.fail)

    def by_client(self, client: Client, several: ResultGroup) -> None:
        """Start it for the task whose code asks."""
        several.stop, several.ask = client.cancel, client.why
        several.note(client.submit(self.func, self.payload, several))


def call_several(name: str, count: int, start: Start) -> tuple[Any, ...]:
    """Make a call that has several results; gives the kind of handles that fit."""
    several = ResultGroup()
    names = [f"{name}[{index}]" for index in range(count)]
    client = current_client()
    if client is not None:
        several.begin(tuple(handle_for(client, one, several) for one in names))
        start.by_client(client, several)
    else:
        session = session_of_caller()
        several.begin(tuple(session.new_handle(one, several) for one in names))
        start.in_program(session, several)
    return several.handles


# Values that have come from elsewhere, or are put.


class RestoredOwner:
    """Owns a handle that has come from elsewhere.

    Attributes:
        reference: the value that it stands for.
        remote_values: who fetches that from another process; None for one of this
            process's.
    """

    def __init__(self, reference: Any, remote_values: ValueStore | None) -> None:
        self.reference = reference
        self.remote_values = remote_values

    def on_loop(self, name: str) -> Any:
        """The same handle for the event loop that runs."""
        return restore_handle(self.reference.id, name)

    def fetch(self, handle: BlockingHandle[Any]) -> None:
        """Ask for the value, unless it is there or was asked for."""
        if self.remote_values is not None and not handle.task_id and not handle.done():
            handle.task_id = self.remote_values.link.fetch(self.reference.id, handle)

    def cancel(self, _task: int) -> None:
        """Stop whoever makes the value."""
        if self.remote_values is not None:
            self.remote_values.link.discard(self.reference.id)
        elif self.reference.stop is not None:
            self.reference.stop()

    async def why(self, name: str, task: int) -> Why:
        """Return why that one waits."""
        return await session_of_caller().why(name, task)


def restore_handle(identity: int, name: str) -> Any:
    """The handle that was pickled, in the process that it has come to.

    Args:
        identity: of the value that it stands for.
        name: of its task.
    """
    client, remote_values = _caller()
    if remote_values is not None:
        return _handle_of(
            client, remote_values, remote_values.loans.loan(identity), name
        )
    # Late: it is the node's, and a worker has none.
    from aiogpu.runtime.objects.values import known

    value = known(identity)
    handle = _handle_of(client, None, value, name)
    value.watch(lambda settled: settled.tell(handle))
    return handle


HandleBase.restore = restore_handle


def _put(payload: bytes, name: str = "put") -> Any:
    """A handle of a value that is there; `payload` is the value pickled."""
    client, remote_values = _caller("aiogpu.put()")
    if remote_values is not None:
        handle = _handle_of(
            client, remote_values, remote_values.shares.put(payload), name
        )
        settle = getattr(handle, "settle_with", handle.receive)
        settle(payload)
        return handle
    from aiogpu.runtime.objects.values import Value

    value = Value(name)
    value.receive(payload)
    handle = _handle_of(client, None, value, name)
    handle.receive(payload)
    return handle


def _caller(what: str = ".remote()") -> tuple[Client | None, ValueStore | None]:
    """The client of the task whose code asks, None for a program; and who knows values.

    The latter is None where all values are this process's own.
    """
    client = current_client()
    return client, session_of_caller(
        what
    ).remote_values if client is None else client.remote_values


def _handle_of(
    client: Client | None, remote_values: ValueStore | None, reference: Any, name: str
) -> Any:
    """The kind of handle that fits, of a value that is known by a reference."""
    if remote_values is not None and (client is None or is_loop_running()):
        import asyncio

        from aiogpu.api.results.handle import BorrowedHandle

        waits = None if client is None else client.waits
        return BorrowedHandle(
            name, remote_values, reference, asyncio.get_running_loop(), waits
        )
    owner = RestoredOwner(reference, remote_values)
    if client is None:
        handle: Any = session_of_caller().new_handle(name, owner)
    else:
        handle = handle_for(client, name, owner)
    if remote_values is None:
        handle.stand_for(reference)
    else:
        handle.shared = reference
    return handle


class Putting(Generic[T]):
    """What `put` gives: awaited, or given to `get`, it is the value's handle."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __repr__(self) -> str:
        return f"<Putting {self.handle!r}>"

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            "put() gives no handle before it is awaited; write `handle = await "
            "aiogpu.put(value)`, in a plain task `aiogpu.get(aiogpu.put(value))`."
        )

    def __await__(self) -> Generator[Any, None, Handle[T]]:
        yield from ()
        return self.handle  # type: ignore[no-any-return]


def put(value: T) -> Putting[T]:
    """Keep a value, to hand it to many tasks without copying it for each.

    `handle = await aiogpu.put(value)`; in a plain function of a task
    `handle = aiogpu.get(aiogpu.put(value))`. The value is what it was at the call,
    whatever becomes of the object. Large buffers (arrays) lie in shared memory, where
    tasks on this machine see them read-only and without a copy. It is freed with the
    last handle to it.

    Args:
        value: any object that can be pickled.

    Raises:
        MisuseError: it is a handle already.
        SerializationError: with the path to what cannot be pickled.
        ObjectMemoryError: there is no room for it.
        NoLoopError: no event loop is running here, and this is no task.
    """
    if hasattr(type(value), HANDLE_MARK):
        raise MisuseError(
            f"aiogpu.put() was given {value!r}, which is a handle already: pass it to "
            f"tasks as it is, or put what it gives: `aiogpu.put(await handle)`."
        )
    payload = dump_result(value, PUT)
    if isinstance(payload, PickledValue):
        payload = packed(payload)
    return Putting(_put(payload))


# Payloads.


_repeats: RepeatedArguments | None = None


def packed_call(
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    outgoing: PickledValue,
) -> bytes:
    """The payload of a call's arguments that are more than a pickle.

    Who passes the same large object again and again is told of `put`.

    Args:
        name: what is called.
        args: positional arguments.
        kwargs: arguments by name.
        outgoing: the same, pickled.

    Raises:
        Exception: see `packed`.
    """
    payload = packed(outgoing)
    size = len(outgoing.stream) + sum(one.nbytes for one in outgoing.buffers)
    if size >= WARNED_FROM and not (type(payload) is Payload and payload.is_shown):
        global _repeats  # noqa: PLW0603 - most programs never need it
        if _repeats is None:
            from aiogpu.serialization.large_arguments import RepeatedArguments

            _repeats = RepeatedArguments()
        _repeats.note(name, args, kwargs)
    return payload


def packed(outgoing: PickledValue) -> bytes:
    """The payload of what is more than a pickle.

    Raises:
        MisuseError: a handle among them belongs to another event loop.
        ObjectMemoryError: there is no room for them.
        SerializationError: they are too large.
        NoLoopError: no event loop is running here.
    """
    if services.client is not None:
        from aiogpu.worker.nested import task_client

        return task_client().loans.pack(outgoing)
    return session_of_caller().pack(outgoing)
