"""Making calls: in a program through its session, in a task through its client.

This module makes the kind of handle or stream that fits the running code, and builds
the payload. On an inline node, plain code of a task has no event loop or runs one of
its own; either way it uses the program's node. Light to import, because workers load
this file for nested calls: only calls of a program import asyncio and the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

from aiogpu.api.results.base import BorrowedClient, HandleBase, client_for
from aiogpu.api.usage_errors import PUT_NAME
from aiogpu.client.current import (
    client_of_caller,
    client_of_task,
    current,
    error_inside_task,
    for_consumer,
    inline_client,
    is_loop_running,
)
from aiogpu.errors import InternalError, MisuseError
from aiogpu.serialization.payload import Payload, opened
from aiogpu.serialization.references import HANDLE_MARK, PickledValue
from aiogpu.serialization.serializer import PUT, WARNED_FROM, dump_result

if TYPE_CHECKING:
    from aiogpu.api.results.base import HandleClient
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.session import Awaited, Session
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Client, Outcome, ValueStore, Waits
    from aiogpu.observe.why import Why

T = TypeVar("T")


def may_use(session: Session) -> bool:
    """Return whether the session is open and the running code may use it."""
    import asyncio

    from aiogpu.api.results.handle import sessions

    loop: Any = asyncio._get_running_loop()
    own = sessions.get(loop)
    is_own = own in (None, session) or inline_client.get() is not None
    return session.is_open and is_own


# Tasks.


def submitter(returns: int, window: int) -> Callable[[FunctionSpec, bytes], Any]:
    """Return the function that submits tasks in this process; see `results_for`."""
    if current.client is not None:
        return partial(_submit, returns, lambda: TaskCaller(client_of_task()))
    if returns or window:
        return partial(_submit, returns, _caller)
    import asyncio

    from aiogpu.api.results.handle import sessions

    _get_running_loop = asyncio._get_running_loop

    def submit(func: FunctionSpec, payload: bytes) -> Handle[Any]:
        loop: Any = _get_running_loop()
        session: Session | None = sessions.get(loop)
        if session is None:
            return _submit(0, _caller, func, payload)  # type: ignore[no-any-return]
        return session.submit(func, payload)

    return submit


def _submit(
    returns: int,
    find_caller: Callable[[], TaskCaller | Session],
    func: FunctionSpec,
    payload: bytes,
) -> Any:
    caller = find_caller()
    start = partial(caller.start, func, payload)
    return results_for(caller, func.spec.name, caller, returns, func.window, start)


def _caller(what: str = ".remote()") -> TaskCaller | Session:
    """Return the session or task client that makes handles for the running code.

    Raises:
        MisuseError: the calling thread was left behind by a task that has ended.
    """
    client = client_of_caller()
    if client is not None:
        return TaskCaller(client)
    from aiogpu.api.session import find_session

    return find_session(what)


def request(
    client: Client,
    name: str,
    send: Callable[[Any], int],
    returns: int = 0,
    window: int = 0,
) -> Any:
    """Make a request of the running task; see `results_for`.

    `send` sends the request for a receiver and returns the request's number.
    """
    caller = TaskCaller(client)

    def start(receiver: Awaited) -> None:
        receiver.on_submitted(send(receiver))

    return results_for(caller, name, caller, returns, window, start)


def results_for(
    caller: TaskCaller | Session,
    name: str,
    owner: Any,
    returns: int,
    window: int,
    start: Callable[[Awaited], object],
) -> Any:
    """Make a call; return its handle, a tuple of handles, or its stream.

    Args:
        caller: makes the kind of handle that fits the calling code.
        name: name of the handle.
        owner: cancels the work and answers `why`.
        returns: number of results, 0 for a single one.
        window: items that a generator may be ahead; 0 for other functions.
        start: sends the call for a receiver.
    """
    if window:
        stream = caller.new_stream(name, owner, window)
        start(stream.items)
        return stream
    if returns:
        group = ResultGroup(caller, name, owner, returns)
        start(group)
        return group.handles
    handle = caller.new_handle(name, owner)
    start(handle)
    return handle


class TaskCaller(NamedTuple):
    """Makes handles and streams for calls of a task, and reaches its children.

    Attributes:
        client: the client of the running task.
    """

    client: Client

    @property
    def remote_values(self) -> ValueStore | None:
        """The store of values if another process keeps them, else None."""
        return self.client.remote_values

    @property
    def _waits(self) -> Waits | None:
        """The waits on the running event loop; None in plain code."""
        return self.client.waits if is_loop_running() else None

    def new_handle(self, name: str, owner: Any) -> Any:
        """Return a handle that fits the running code; `owner` cancels the work."""
        return self._handle(name, owner, client_for(self.remote_values, self._waits))

    def new_borrowed(self, name: str, reference: Any) -> Any:
        """Return a handle for the value that a received handle refers to."""
        store = self.remote_values
        client = BorrowedClient(reference, store, self.why, self._waits)
        return self._handle(name, client, client)

    def _handle(self, name: str, owner: Any, client: HandleClient) -> Any:
        if not is_loop_running():
            from aiogpu.api.results.blocking import BlockingHandle

            return BlockingHandle(name, owner, client, task_client=self.client)
        import asyncio

        from aiogpu.api.results.handle import Handle

        return Handle(name, owner, asyncio.get_running_loop(), client)

    def new_stream(self, name: str, _owner: Any, size: int) -> Any:
        """Return a stream that fits the running code, for up to `size` items ahead."""
        client = self.client
        if not is_loop_running():
            from aiogpu.api.results.blocking import BlockingStream
            from aiogpu.api.results.items import ItemBuffer

            return BlockingStream(ItemBuffer(name, self, size), client)
        import asyncio

        from aiogpu.api.results.stream import Stream

        return Stream(name, self, size, asyncio.get_running_loop(), client.waits)

    def start(self, func: FunctionSpec, payload: bytes, receiver: Awaited) -> None:
        """Start a child."""
        receiver.on_submitted(self.client.submit(func, payload, receiver))

    def demand(self, task: int, limit: int) -> None:
        """Let a child yield up to `limit` items in all; see `StreamOwner`."""
        self.client.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a child."""
        self.client.withdraw(task)

    async def why(self, name: str, task: int) -> NoReturn:
        """Refuse the call: only the program can ask why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {name}")


class ResultGroup:
    """The receiver of a call with several results, and the owner of its handles.

    Each result is a separate value. The call is cancelled when all of its handles are
    cancelled.

    Attributes:
        task_name: name of the call.
        handles: one for each result.
    """

    def __init__(
        self, caller: TaskCaller | Session, name: str, owner: Any, count: int
    ) -> None:
        self.task_name = name
        self._owner = owner
        self._wanted = count
        self._number = 0
        self.handles: tuple[Any, ...] = tuple(
            caller.new_handle(f"{name}[{index}]", self) for index in range(count)
        )
        for index, handle in enumerate(self.handles):
            handle.part = index

    def __repr__(self) -> str:
        return f"<ResultGroup {len(self.handles)} results of task {self._number}>"

    @property
    def task_id(self) -> int:
        """The call's number; 0 before the call is made."""
        return self._number

    def on_submitted(self, number: int) -> None:
        """Note the number of the submitted call, also in each handle."""
        self._number = number
        for handle in self.handles:
            handle.on_submitted(number)

    def done(self) -> bool:
        """Return whether all handles have ended."""
        return all(handle.done() for handle in self.handles)

    def cancel(self, _task: int) -> None:
        """Note that one handle was cancelled; see `Owner`."""
        self._wanted -= 1
        if not self._wanted:
            self._owner.cancel(self._number)

    async def why(self, name: str, _task: int) -> Why:
        """Return why the call waits."""
        return await self._owner.why(name, self._number)  # type: ignore[no-any-return]

    def receive_report(self, lost: int, payload: bytes) -> None:
        """Give the report to each handle."""
        for handle in self.handles:
            handle.receive_report(lost, payload)

    def settle(self, outcome: Outcome) -> None:
        """Settle each handle with its part of the outcome; see `Receiver`."""
        if isinstance(outcome, bytes):
            parts = outcome.parts if type(outcome) is Payload else ()
            if len(parts) == len(self.handles):
                for handle, part in zip(self.handles, parts, strict=True):
                    handle.settle(part)
                return
            outcome = InternalError(f"{self!r} got {len(parts)} results")
        for handle in self.handles:
            handle.settle(outcome)
        # If no error is retrieved, asyncio should warn of one handle only.
        for handle in self.handles[1:]:
            if handle.done() and not handle.cancelled():
                handle.exception()


# Values of `put`, and handles inside pickles.


NOT_REQUESTED: Final = -1
"""`task_id` of a value that is in this process and need not be requested."""


def restore_handle(identity: int, name: str, value: Any = None) -> Any:
    """Unpickle a handle, in any process; or make another handle for the running loop.

    Args:
        identity: id of the value behind the handle.
        name: name of its task.
        value: the value, if this process has it; None to take it from the payload.
    """
    caller = _caller()
    if caller.remote_values is not None:
        loan = caller.remote_values.loans.loan(identity)
        return for_consumer(_handle_of(caller, name, loan))
    value = value or opened.find(identity).under_own_id()
    handle = _handle_of(caller, name, value)
    value.watch(lambda settled: settled.pass_to(handle))
    return for_consumer(handle)


HandleBase.restore = restore_handle


def _handle_of(caller: TaskCaller | Session, name: str, reference: Any) -> Any:
    """Return the kind of handle that fits the running code, for a reference."""
    handle = caller.new_borrowed(name, reference)
    handle.stand_for(reference)
    if caller.remote_values is None:
        handle.task_id = reference.task
    return handle


def put(value: T) -> Handle[T]:
    """Store a value, to pass it to many tasks without a copy for each.

    `handle = aiogpu.put(value)` returns at once, with the value stored; `await handle`
    is a copy of the value. Later changes of the object do not change the stored value.
    Large buffers (arrays) are stored in shared memory, and tasks on this machine use
    them without a copy; what one changes, it alone sees. The value is freed when the
    last handle to it is dropped.

    Args:
        value: any object that can be pickled.

    Raises:
        MisuseError: the value is a handle.
        SerializationError: the value cannot be pickled; names the path to the cause.
        ObjectMemoryError: there is no room for the value.
        NoLoopError: called neither on an event loop nor in a task.
    """
    if hasattr(type(value), HANDLE_MARK):
        raise MisuseError(
            f"aiogpu.put() was given {value!r}, which is already a handle: pass it to "
            f"tasks as it is, or put its value: `aiogpu.put(await handle)`."
        )
    payload = dump_result(value, PUT)
    if isinstance(payload, PickledValue):
        payload = packed(payload)
    caller = _caller("aiogpu.put()")
    reference: Any
    if caller.remote_values is not None:
        reference = caller.remote_values.shares.put(payload)
    else:
        from aiogpu.runtime.objects.values import Value

        reference = Value(PUT_NAME)
        reference.settle(payload)
    handle = _handle_of(caller, PUT_NAME, reference)
    if caller.remote_values is not None:
        handle.task_id = NOT_REQUESTED
    handle.settle(payload)
    return handle  # type: ignore[no-any-return]


# Payloads.


def packed_call(
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    outgoing: PickledValue,
) -> bytes:
    """Return the payload of arguments that contain handles, actors or large buffers.

    Warn, and suggest `put`, if the same large object is passed again and again.

    Args:
        name: name of the function.
        args: positional arguments.
        kwargs: arguments by name.
        outgoing: the pickled arguments.

    Raises:
        Exception: see `packed`.
    """
    payload = packed(outgoing)
    size = len(outgoing.stream) + sum(buffer.nbytes for buffer in outgoing.buffers)
    if size >= WARNED_FROM and not (type(payload) is Payload and payload.is_shown):
        # Imported late: most programs never need it.
        from aiogpu.serialization.large_arguments import repeated

        repeated.note(name, args, kwargs)
    return payload


def packed(outgoing: PickledValue) -> bytes:
    """Return the payload of a pickle with handles, actors or large buffers.

    Raises:
        MisuseError: a handle belongs to another event loop.
        ObjectMemoryError: there is no room for the buffers.
        SerializationError: the pickle is too large.
        NoLoopError: no event loop is running in this thread.
    """
    if current.client is not None:
        return current.client.pack(outgoing)
    from aiogpu.api.session import find_session

    return find_session().pack(outgoing)
