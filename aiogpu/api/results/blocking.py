"""Handles and streams without an event loop, which `.remote()` returns in plain tasks.

A plain function that runs as a task has no loop: it waits by `aiogpu.get` and iterates
by `for`. This file must not import asyncio, which may cost such a task more than its
work. The base classes of handles and streams on event loops are here as well.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    NoReturn,
    Protocol,
    TypeVar,
)

from aiogpu.api.options import check_wait
from aiogpu.api.usage_errors import PUT_NAME, NotItsResult
from aiogpu.client.current import client_of_task, error_inside_task, is_loop_running
from aiogpu.core.mailbox import Window
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.serialization.exceptions import STOPPED, error_of
from aiogpu.serialization.references import add_handle
from aiogpu.serialization.serializer import load_result
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from types import TracebackType

    from aiogpu.api.results.reports import Report, ReportBuffer
    from aiogpu.client.interface import Client, Outcome, ValueStore
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


T = TypeVar("T")


OF_A_LIST: Final = "for a list: a handle inside another argument is not replaced"
"""The reason why a task got a handle instead of a result as an argument."""


class Owner(Protocol):
    """The starter of a handle's task, such as a session or an actor."""

    def cancel(self, task: int) -> None:
        """Stop the task."""

    async def why(self, name: str, task: int) -> Why:
        """Return why the task waits, or its state."""


class StreamOwner(Owner, Protocol):
    """The owner of a stream's task."""

    def demand(self, task: int, limit: int) -> None:
        """Let the generator yield up to `limit` items in all."""


class Reporting:
    """The receiver of a task's reports; see `aiogpu.report`."""

    __slots__ = ()

    if TYPE_CHECKING:
        _reports: ReportBuffer

    @property
    def report_buffer(self) -> ReportBuffer:
        """The unread reports; the buffer is made at first use."""
        try:
            return self._reports
        except AttributeError:
            # Imported late: most tasks report nothing.
            from aiogpu.api.results.reports import ReportBuffer

            self._reports = ReportBuffer()  # type: ignore[misc]
            return self._reports

    def receive_report(self, lost: int, payload: bytes) -> None:
        """Take a report of the task; called by the engine."""
        self.report_buffer.receive(lost, payload)


class HandleBase(Reporting, NotItsResult):
    """The common base of handles in plain tasks and on event loops.

    Attributes:
        task_name: name of the task.
        task_id: number of the task; 0 before the task is submitted.
        part: index among several results of the task; -1 for a single result.
        raw: the pickled value; None before it has arrived.
        shared: the value that other holders of the handle refer to; None without other
            holders.
        restore: unpickles a handle. Set by `api.calls`, which makes all handles and so
            imports this module.
    """

    __aiogpu_handle__ = True

    restore: ClassVar[Callable[..., Any]]

    if TYPE_CHECKING:
        task_name: str
        task_id: int
        part: int
        raw: bytes | None
        shared: Reference | None

        @property
        def error(self) -> BaseException | None:
            """The error of the task; None if it has a result or has not ended."""

        def cancelled(self) -> bool:
            """Return whether the handle was cancelled."""
            ...

    else:
        __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        identity = add_handle(self.task_name, self.share)
        return HandleBase.restore, (identity, self.task_name)

    def share(self) -> Reference:
        """Return the value that other holders of this handle refer to."""
        if self.shared is None:
            self._keep_alive()
            store = self._store()
            self.shared = (
                _local_value(self) if store is None else store.shares.share(self)
            )
        return self.shared

    def stand_for(self, reference: Reference) -> None:
        """Note the reference behind a handle that came from another process."""
        self._keep_alive()
        self.shared = reference

    def _keep_alive(self) -> None:
        """Keep the work going even if all local waiters withdraw."""

    def _store(self) -> ValueStore | None:
        """Return the store of values in another process; None if this process is it."""
        raise NotImplementedError

    def _settle_shared(self, outcome: Outcome) -> None:
        """Settle the shared value; other holders in this process may wait for it."""
        settle = getattr(self.shared, "settle", None)
        if settle is not None:
            settle(outcome)

    def _settle_shared_as_cancelled(self) -> None:
        if self.shared is not None:
            self._settle_shared(TaskCancelledError(f"{self.task_name} was cancelled."))
            store = self._store()
            if store is not None and self.part >= 0:
                # The call may go on for its other results.
                store.shares.drop(self.task_id, self.shared)


def _local_value(handle: Any) -> Reference:
    # Imported late: only handles inside arguments and results need it.
    from aiogpu.runtime.objects.values import Value

    value = Value(handle.task_name, handle.task_id)
    if handle.raw is not None:
        value.settle(handle.raw)
    elif handle.cancelled():
        value.settle(TaskCancelledError(f"{handle.task_name} was cancelled."))
    elif handle.error is not None:
        value.settle(handle.error)
    else:
        value.stop = handle.cancel
    return value


def cut_frames(error: BaseException) -> None:
    """Cut the frames of aiogpu above a task's error, so that it is raised at the await.

    Call this in an `except` block that ends with a bare `raise`, which adds no frame.
    Another error, raised by aiogpu itself, keeps its frames.
    """
    last, trace = "", error.__traceback__
    while trace is not None and trace.tb_frame.f_globals["__name__"] in _CUT:
        last, trace = trace.tb_frame.f_code.co_name, trace.tb_next
    if last in _RAISING:
        error.__traceback__ = trace


_CUT: Final = frozenset(
    {
        "aiogpu.api.portal",
        "aiogpu.api.results.blocking",
        "aiogpu.api.results.handle",
        "aiogpu.api.results.wait",
        "aiogpu.sync",
    }
)
"""The modules between an await or `get` and a task's error."""


_RAISING: Final = frozenset(
    {"__await__", "await_end", "result", "results_of", "<listcomp>", "get"}
)
"""The functions there that raise a task's error."""


class BlockingHandle(HandleBase, Generic[T]):
    """The future result of a child task, in a plain function; see `get`.

    For type checkers `.remote()` returns a `Handle` everywhere.

    Attributes:
        client: the client of the task that started the child.
        owner: cancels the work.
        on_end: functions to call with the handle when the child has ended.
    """

    __slots__ = (
        "__weakref__",
        "_error",
        "_payload",
        "_reports",
        "_state",
        "_trace",
        "_value",
        "client",
        "on_end",
        "owner",
        "part",
        "raw",
        "shared",
        "task_id",
        "task_name",
    )

    def __init__(self, task_name: str, client: Client, owner: Any) -> None:
        self.task_name = task_name
        self.task_id = 0
        self.client = client
        self.owner = owner
        self.shared: Reference | None = None
        self.part = -1
        self.raw: bytes | None = None
        self.on_end: tuple[Callable[[BlockingHandle[Any]], object], ...] = ()
        self._state = "pending"
        self._payload: bytes | None = None
        self._value: T | None = None
        self._error: Exception | None = None
        self._trace: TracebackType | None = None

    def __repr__(self) -> str:
        return f"<BlockingHandle {self.task_name} {self._state}>"

    def _how_to_wait(self) -> str:
        if self.task_name == PUT_NAME:
            return "aiogpu.get(handle)"
        if isinstance(self.owner, RestoredOwner):
            return f"aiogpu.get(handle), or aiogpu.get(handles) {OF_A_LIST}"
        return f"aiogpu.get({self.task_name}.remote(...))"

    def __await__(self) -> Generator[Any, None, T]:
        on_loop = getattr(self.owner, "on_loop", None)
        if on_loop is not None and is_loop_running():
            # The handle was unpickled before the loop ran.
            return on_loop(self.task_name).__await__()  # type: ignore[no-any-return]
        raise MisuseError(
            f"the handle of {self.task_name} was made in a plain function, without an "
            f"event loop; call aiogpu.get(handle) instead."
        )

    def _store(self) -> ValueStore | None:
        return self.client.remote_values

    def done(self) -> bool:
        """Return whether the task has ended or was cancelled."""
        return self._state != "pending"

    def cancelled(self) -> bool:
        """Return whether the handle was cancelled."""
        return self._state == "cancelled"

    def cancel(self) -> bool:
        """Stop the work; return False if the task had ended before it was cancelled."""
        if self.done():
            return self.cancelled()
        self.owner.cancel(self.task_id)
        self._end("cancelled")
        self._settle_shared_as_cancelled()
        return True

    def reports(self) -> Iterator[Report]:
        """Return an iterator over the task's reports, until the task ends.

        See `aiogpu.report`. The CPUs of the reading task are free while it waits.

        Raises:
            MisuseError: another task started the task.
        """
        if isinstance(self.owner, RestoredOwner):
            from aiogpu.api.results.reports import refuse_others

            refuse_others(self.task_name)
        return _read_reports(self)

    def why(self) -> NoReturn:
        """Refuse the call: only the program can ask why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {self.task_name}")

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome of the child; called by the engine."""
        if self.shared is not None:
            self._settle_shared(outcome)
        if isinstance(outcome, bytes):
            self._payload = self.raw = outcome
            self._end("finished")
            return
        if isinstance(outcome, Failed) and outcome.kind == STOPPED:
            self._end("cancelled")  # another holder of the handle cancelled the task
        else:
            error = error_of(outcome, self.task_name)
            self._error, self._trace = error, error.__traceback__
            self._end("failed")
        self.client.upsets += 1

    def _end(self, state: str) -> None:
        self._state = state
        for call in self.on_end:
            call(self)

    @property
    def error(self) -> Exception | None:
        """The error of the task; None if it has a result or has not ended."""
        return self._error

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait until the task ends; return its error or None; see `result`."""
        self._wait(timeout)
        return self._error

    @property
    def has_failed(self) -> bool:
        """True if the task ended without a result."""
        return self._state in ("failed", "cancelled")

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            if is_loop_running():
                raise blocks_loop(f"waiting for {self.task_name}")
            await_end([self], timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, as `get` does.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            TaskCancelledError: the child was cancelled.
            TaskTimeoutError: the time is up; the child goes on.
            DeserializationError: the result cannot be unpickled in this process.
            Exception: see `get`.
        """
        try:
            self._wait(timeout)
            if self.cancelled():
                raise TaskCancelledError(f"{self.task_name} was cancelled.")
            if self._error is not None:
                # Otherwise each raise would append its frames to the previous ones.
                raise self._error.with_traceback(self._trace)
            if self._payload is not None:
                payload, self._payload = self._payload, None
                try:
                    self._value = load_result(payload)
                except DeserializationError as error:
                    self._state, self._error = "failed", error
                    raise
            return self._value  # type: ignore[return-value]
        except BaseException as error:
            cut_frames(error)
            raise
        finally:
            # The error's traceback refers to this frame. With `self` in the frame there
            # is a cycle, which keeps the error and the objects in the callers' frames,
            # such as actors, until the garbage collector runs.
            del self


def _read_reports(source: BlockingHandle[Any] | ItemBuffer) -> Iterator[Report]:
    """Yield the reports of a task in plain code, until the task has ended."""
    buffer, done = source.report_buffer, source.done
    while True:
        while buffer.kept:
            yield buffer.take()
        if done():
            return
        if is_loop_running():
            raise blocks_loop(f"waiting for a report of {source.task_name}")
        client, task = client_of_task(), (source.task_id,)
        block(client, task, lambda: bool(buffer.kept) or done(), done)


class ItemBuffer(Reporting):
    """The consumer's end of a stream: the items to take, and its end.

    Engines refer to this buffer and not to the user's stream, so that dropping the
    stream stops the producer. Items may arrive in any thread.

    Attributes:
        task_name: name of the task.
        task_id: number of the task.
        window: how far the producer may be ahead.
        buffer: pickled items that were not taken.
        error: the error that ended the stream, until it is raised.
        is_over: True if no more items will come.
        is_cancelled: True if the consumer stopped the stream.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "_reports",
        "buffer",
        "error",
        "is_cancelled",
        "is_over",
        "task_id",
        "task_name",
        "window",
    )

    def __init__(self, task_name: str, owner: StreamOwner, size: int) -> None:
        self.task_name = task_name
        self.task_id = 0
        self.window = Window(size)
        self.buffer: deque[bytes] = deque()
        self.error: Exception | None = None
        self.is_over = False
        self.is_cancelled = False
        self._owner: StreamOwner | None = owner

    def __repr__(self) -> str:
        return f"<ItemBuffer {self.task_name} {self.task_id} {len(self.buffer)} items>"

    @property
    def is_held(self) -> bool:
        """True if the producer waits for its consumer, as far as the consumer knows."""
        return not self.is_over and self.window.holds(len(self.buffer))

    def done(self) -> bool:
        """Return whether no more items will come."""
        return self.is_over

    def take(self) -> Any:
        """Take the oldest item, and let the producer go on.

        Raises:
            DeserializationError: the item cannot be unpickled in this process.
        """
        payload = self.buffer.popleft()
        limit = self.window.take()
        if limit and self._owner is not None:
            self._owner.demand(self.task_id, limit)
        return load_result(payload)

    def raise_error(self) -> None:
        """Raise the error that ended the stream, if any, once."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # the error's traceback refers to this frame

    def cancel(self) -> None:
        """Stop the producer and drop the items that have arrived."""
        owner = self._owner
        if self.close() and owner is not None:
            owner.cancel(self.task_id)

    def close(self) -> bool:
        """Drop all items and accept no more; return False if the stream was over."""
        was_open = not self.is_over
        if was_open:
            self.is_cancelled = True
            self._end(None)
        self.buffer.clear()
        return was_open

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items; called by the engine."""
        if not self.is_over:
            self.buffer.extend(payloads)
            self.wake()

    def settle(self, outcome: Outcome) -> None:
        """Note that the stream ended, maybe with an error; see `Receiver`."""
        if isinstance(outcome, bytes):
            self._end(None)
        else:
            self._end(error_of(outcome, self.task_name))

    def _end(self, error: Exception | None) -> None:
        if not self.is_over:
            self.error, self.is_over = error, True
            # Kept items must not keep an actor alive, which is an owner.
            self._owner = None
            self.wake()
            if hasattr(self, "_reports"):
                self._reports.wake()

    def wake(self) -> None:
        """Wake the consumer, if it waits."""


class StreamBase:
    """The common base of streams in plain tasks and on event loops."""

    items: ItemBuffer

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self.items.task_name

    @property
    def task_id(self) -> int:
        """Number of the task."""
        return self.items.task_id

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} cannot be pickled; iterate it in this "
            f"process and pass its items on."
        )


class BlockingStream(StreamBase, Iterator[T]):
    """The items of a child generator, by `for`; the task's CPUs are free meanwhile.

    For type checkers `.remote()` returns a `Stream` everywhere.
    """

    def __init__(self, items: ItemBuffer, client: Client) -> None:
        self.items = items
        self._client = client
        self._is_through = False

    def __repr__(self) -> str:
        items = self.items
        return (
            f"<BlockingStream of {items.task_name}: {len(items.buffer)} items to "
            f"take, {items.window.taken} taken>"
        )

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a stream has no truth value; write `for item in "
            f"{self.task_name}.remote(...)`."
        )

    def __aiter__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} was made in a plain function, without an "
            f"event loop; write `for item in {self.task_name}.remote(...)`."
        )

    def __iter__(self) -> BlockingStream[T]:
        return self

    def __next__(self) -> T:
        items = self.items
        if self._is_through:
            raise StopIteration
        if not items.buffer and not items.is_over:
            self._wait()
        if items.buffer:
            try:
                return items.take()  # type: ignore[no-any-return]
            except BaseException:
                self.close()
                raise
        self._is_through = True
        items.raise_error()
        if items.is_cancelled:
            raise TaskCancelledError(f"{self.task_name} was cancelled.")
        raise StopIteration

    def _wait(self) -> None:
        if is_loop_running():
            raise MisuseError(
                f"waiting for the next item of {self.task_name} would block the event "
                f"loop that is running; call .remote() on the loop and write `async "
                f"for`."
            )
        items, client = self.items, client_of_task()
        if client is not self._client:
            raise MisuseError(
                f"the stream of {self.task_name} belongs to another task; iterate it "
                f"in the task that called .remote()."
            )
        block(
            client,
            (items.task_id,),
            lambda: bool(items.buffer) or items.is_over,
            items.done,
        )

    def reports(self) -> Iterator[Report]:
        """Return an iterator over the generator's reports, until it ends.

        See `aiogpu.report`. The generator may wait for its items to be taken.
        """
        return _read_reports(self.items)

    def __enter__(self) -> BlockingStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        items = self.items
        if not items.is_over and items.close():
            self._client.withdraw_soon(items.task_id)

    def close(self) -> None:
        """Stop the generator and drop the remaining items; idempotent."""
        self._is_through = True
        self.items.cancel()

    def cancel(self) -> bool:
        """Stop the generator; return False if it had already ended."""
        if self.items.is_over:
            return False
        self.items.cancel()
        return True

    def why(self) -> NoReturn:
        """Refuse the call: only the program can ask why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the stream of {self.task_name}")


def block(
    client: Client,
    tasks: tuple[int, ...],
    is_over: Callable[[], bool],
    are_done: Callable[[], bool],
    deadline: float | None = None,
    is_bound: bool = False,
) -> bool:
    """Wait in plain code until a condition holds; return False if time is up first.

    Args:
        client: the client of the waiting task.
        tasks: numbers of the tasks to wait for, sent to the node.
        is_over: the condition.
        are_done: returns whether these tasks have ended, which the node then knows.
        deadline: time on the clock `time.monotonic`; None for no limit.
        is_bound: see `Client.note_wait`.
    """
    waiter = get_ident()
    client.note_wait(waiter, tasks, is_bound)
    try:
        return client.wait_until(is_over, deadline)
    finally:
        if are_done():
            client.end_wait(waiter)
        else:
            # The driver does not know by itself that the wait is over.
            client.note_wait(waiter, ())


# Received handles.


class RestoredOwner:
    """The owner of a handle that was received from another program or task.

    Attributes:
        reference: the value behind the handle.
        remote_values: fetches the value from another process; None for a value of this
            process.
        why: returns why the task that makes the value waits.
    """

    def __init__(self, reference: Any, caller: Any) -> None:
        self.reference = reference
        self.remote_values = caller.remote_values
        self.why = caller.why

    def on_loop(self, name: str) -> Any:
        """Return the same handle for the running event loop."""
        return HandleBase.restore(self.reference.id, name, self.reference)

    def fetch(self, handle: BlockingHandle[Any]) -> None:
        """Request the value unless it has arrived or was requested already."""
        if self.remote_values is not None and not handle.task_id and not handle.done():
            handle.task_id = self.remote_values.fetch(self.reference.id, handle)

    def cancel(self, request: int) -> None:
        """Stop the task that makes the value, and withdraw the request for it."""
        if self.remote_values is not None:
            self.remote_values.cancel(request)
            self.remote_values.discard(self.reference.id)
        elif self.reference.stop is not None:
            self.reference.stop()


# Waiting for results.


def blocks_loop(what: str) -> MisuseError:
    """Return the error for a wait that would block a running event loop."""
    return MisuseError(
        f"{what} would block the event loop that is running in this thread; write "
        f"`await handle`, or `await asyncio.gather(*handles)`."
    )


def await_end(handles: list[BlockingHandle[Any]], timeout: float | None) -> None:
    """Wait until all handles have ended; raise the first error at once."""
    deadline = None
    if timeout is not None:
        deadline = time.monotonic() + check_wait("timeout", timeout)
    try:
        in_time = _all_have_ended(handles, deadline)
        for handle in handles:
            if handle.has_failed:
                handle.result()
        if not in_time:
            raise TaskTimeoutError(_timeout_message(handles, timeout))
    finally:
        handle = None  # type: ignore[assignment]
        del handles


def _all_have_ended(handles: list[BlockingHandle[Any]], deadline: float | None) -> bool:
    """Wait until all have ended or one has failed; return False if time is up first."""
    fetch(handles)
    pending = [handle for handle in handles if not handle.done()]
    if not pending or any(handle.has_failed for handle in handles):
        return True
    client = client_of_task()
    for handle in pending:
        if isinstance(handle.owner, RestoredOwner):
            handle.client = client  # another task of this process may have received it
    check_client("aiogpu.get()", pending, client)
    tasks = tuple(handle.task_id for handle in pending)
    return block(
        client,
        tasks,
        _countdown(client, pending),
        lambda: all(handle.done() for handle in handles),
        deadline,
        is_bound=deadline is None,
    )


def _countdown(
    client: Client, pending: list[BlockingHandle[Any]]
) -> Callable[[], bool]:
    """Return a test whether the wait is over, which looks at each handle about once."""
    upsets_seen = -1

    def is_over() -> bool:
        nonlocal upsets_seen
        upsets = client.upsets
        while pending and pending[-1]._state != "pending":
            if pending.pop().has_failed:
                # Another thread may have failed to unpickle the result.
                return True
        if upsets != upsets_seen:
            upsets_seen = upsets
            return not pending or any(handle.has_failed for handle in pending)
        return not pending

    return is_over


def _timeout_message(handles: list[BlockingHandle[Any]], timeout: float | None) -> str:
    late = [handle.task_name for handle in handles if not handle.done()]
    if not late:
        # If tasks run in this thread, one may have ended too late.
        return (
            f"{handles[-1].task_name} did not end within {timeout:g} s; it ended later."
        )
    if len(handles) == 1:
        return f"{late[0]} did not end within {timeout:g} s; it goes on."
    return (
        f"{len(late)} of {len(handles)} tasks did not end within {timeout:g} s, such "
        f"as {late[0]}; they go on."
    )


def fetch(handles: list[BlockingHandle[Any]]) -> None:
    """Request the values of received handles, which are fetched only on demand."""
    for handle in handles:
        if isinstance(handle.owner, RestoredOwner):
            handle.owner.fetch(handle)


def check_client(what: str, handles: list[BlockingHandle[Any]], client: Client) -> None:
    """Raise `MisuseError` unless all handles belong to this client's task."""
    for handle in handles:
        if handle.client is not client:
            raise MisuseError(
                f"the handle of {handle.task_name} belongs to another task; {what} "
                f"waits only for tasks that the running task started."
            )
