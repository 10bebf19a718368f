"""Handles and streams without an event loop, which `.remote()` returns in plain tasks.

A plain function that runs as a task has no loop: it waits by `aiogpu.get` and iterates
by `for`. This file must not import asyncio, which would cost such a task more than its
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


OF_A_LIST: Final = "of a list: inside another argument a handle stays a handle"
"""Why a task has a handle in place of a result, where it was given one."""


class Owner(Protocol):
    """Started the task of a handle, and can be asked about it: a session, an actor."""

    def cancel(self, task: int) -> None:
        """Stop the task."""

    async def why(self, name: str, task: int) -> Why:
        """Say why it waits, or what it does."""


class StreamOwner(Owner, Protocol):
    """The owner of a stream's task."""

    def demand(self, task: int, limit: int) -> None:
        """Let its generator yield so many items in all."""


class Reporting:
    """The receiver of a task's reports; see `aiogpu.report`."""

    __slots__ = ()

    if TYPE_CHECKING:
        _reports: ReportBuffer

    @property
    def report_buffer(self) -> ReportBuffer:
        """The reports that nobody has read; made when it is first asked for."""
        try:
            return self._reports
        except AttributeError:
            # Late: most tasks report nothing.
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
        task_id: its number, 0 before it has one.
        part: which of several results of the task this is; -1 for all of it.
        raw: the value pickled, if it is there.
        shared: the value that other holders of the handle refer to; None without any.
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
            """Return whether it was cancelled."""
            ...

    else:
        __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        identity = add_handle(self.task_name, self.share)
        return HandleBase.restore, (identity, self.task_name)

    def share(self) -> Reference:
        """The value that other holders of this handle refer to."""
        if self.shared is None:
            self._want()
            store = self._store()
            self.shared = (
                _local_value(self) if store is None else store.shares.share(self)
            )
        return self.shared

    def stand_for(self, reference: Reference) -> None:
        """Note the reference of a handle that came from another process."""
        self._want()
        self.shared = reference

    def _want(self) -> None:
        """Keep the work going although all local waiters withdraw."""

    def _store(self) -> ValueStore | None:
        """The store of values in another process; None if values are kept here."""
        raise NotImplementedError

    def _tell(self, outcome: Outcome) -> None:
        """Settle the shared value, for which others in this process may wait."""
        settle = getattr(self.shared, "settle", None)
        if settle is not None:
            settle(outcome)

    def _tell_cancelled(self) -> None:
        if self.shared is not None:
            self._tell(TaskCancelledError(f"{self.task_name} was cancelled."))
            store = self._store()
            if store is not None and self.part >= 0:
                # The call may go on for its other results.
                store.shares.drop(self.task_id, self.shared)


def _local_value(handle: Any) -> Reference:
    # Late: only a handle within something that is sent comes here.
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


class BlockingHandle(HandleBase, Generic[T]):
    """A child's result to be, in a plain function; see `get`.

    To type checkers `.remote()` gives a `Handle` everywhere.

    Attributes:
        client: the client of the task that started it.
        owner: cancels the work.
        on_end: functions to call with the handle when it has ended.
    """

    __slots__ = (
        *("__weakref__", "_error", "_payload", "_reports", "_state", "_trace"),
        *("_value", "client"),
        *("on_end", "owner", "part", "raw", "shared", "task_id", "task_name"),
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
            # It was unpickled before the loop ran.
            return on_loop(self.task_name).__await__()  # type: ignore[no-any-return]
        raise MisuseError(
            f"the handle of {self.task_name} was made in a plain function, where no "
            f"event loop runs; wait by aiogpu.get(handle)."
        )

    def _store(self) -> ValueStore | None:
        return self.client.remote_values

    def done(self) -> bool:
        """Return whether the task has ended or was cancelled."""
        return self._state != "pending"

    def cancelled(self) -> bool:
        """Return whether `cancel` has stopped it."""
        return self._state == "cancelled"

    def cancel(self) -> bool:
        """Stop the work; False if it had ended before."""
        if self.done():
            return False
        self.owner.cancel(self.task_id)
        self._end("cancelled")
        self._tell_cancelled()
        return True

    def reports(self) -> Iterator[Report]:
        """Return the reports of the task as they come, by `for`; ends with the task.

        See `aiogpu.report`. Waiting releases the CPUs of the task that reads.

        Raises:
            MisuseError: another task has started the task.
        """
        if isinstance(self.owner, RestoredOwner):
            from aiogpu.api.results.reports import refuse_others

            refuse_others(self.task_name)
        return _read_reports(self)

    def why(self) -> NoReturn:
        """Refuse: only the program asks why a task waits.

        Raises:
            NodeError: always.
        """
        raise error_inside_task(f"why() of the handle of {self.task_name}")

    def settle(self, outcome: Outcome) -> None:
        """Take how the child has ended; called by the engine."""
        if self.shared is not None:
            self._tell(outcome)
        if isinstance(outcome, bytes):
            self._payload = self.raw = outcome
            self._end("finished")
            return
        if isinstance(outcome, Failed) and outcome.kind == STOPPED:
            self._end("cancelled")  # another holder of the handle has cancelled it
        else:
            error = error_of(outcome, self.task_name)
            self._error, self._trace = error, error.__traceback__
            self._end("failed")
        self.client.upsets += 1

    def _end(self, state: str) -> None:
        self._state = state
        for tell in self.on_end:
            tell(self)

    @property
    def error(self) -> Exception | None:
        """The error of the task; None if it has a result or has not ended."""
        return self._error

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait for the end; return why there is no result, or None; see `result`."""
        self._wait(timeout)
        return self._error

    @property
    def has_failed(self) -> bool:
        """True if there will be no result."""
        return self._state in ("failed", "cancelled")

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            if is_loop_running():
                raise blocks_loop(f"waiting for {self.task_name}")
            await_end([self], timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, as `get` does.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TaskCancelledError: it was cancelled.
            TaskTimeoutError: time was up; the child goes on.
            DeserializationError: its result cannot be unpickled in this process.
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
        finally:
            # The error's traceback refers to this frame. With `self` in it there is a
            # cycle, which keeps the error and all that the callers' frames hold, such
            # as actors, until the collector runs.
            del self


def _read_reports(reported: BlockingHandle[Any] | ItemBuffer) -> Iterator[Report]:
    """Yield the reports of a task in plain code, until it has ended."""
    buffer, done = reported.report_buffer, reported.done
    while True:
        while buffer.kept:
            yield buffer.take()
        if done():
            return
        if is_loop_running():
            raise blocks_loop(f"waiting for a report of {reported.task_name}")
        client, task = client_of_task(), (reported.task_id,)
        block(client, task, lambda: bool(buffer.kept) or done(), done)


class ItemBuffer(Reporting):
    """The consumer's end of a stream: items not taken yet, and how it ended.

    Engines refer to this buffer and not to the user's stream, so that dropping the
    stream stops the producer. Items may arrive in any thread.

    Attributes:
        task_name: name of the task.
        task_id: its number, by which its owner knows it.
        window: how far the producer may be ahead.
        buffer: pickled items that were not taken.
        error: why no more items will come, if it is an error.
        is_over: whether no more items will come.
        is_cancelled: whether the consumer has stopped the stream.
    """

    __slots__ = (
        *("__weakref__", "_owner", "_reports", "buffer", "error", "is_cancelled"),
        *("is_over", "task_id", "task_name", "window"),
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
        """True if the producer waits for its consumer, as far as this end can know."""
        return not self.is_over and self.window.holds(len(self.buffer))

    def done(self) -> bool:
        """Return whether no further item will come."""
        return self.is_over

    def take(self) -> Any:
        """The oldest item; the producer may go on.

        Raises:
            DeserializationError: it cannot be unpickled in this process.
        """
        payload = self.buffer.popleft()
        limit = self.window.take()
        if limit and self._owner is not None:
            self._owner.demand(self.task_id, limit)
        return load_result(payload)

    def raise_error(self) -> None:
        """Raise, once, why no further item comes, if it is an error."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # its traceback keeps this frame

    def cancel(self) -> None:
        """Stop the producer, and drop what has come."""
        owner = self._owner
        if self.close() and owner is not None:
            owner.cancel(self.task_id)

    def close(self) -> bool:
        """Drop what has come, and take no more; False if nothing would come."""
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
        """All items have come, or this is why no further one will; see `Receiver`."""
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

    inflow: ItemBuffer

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self.inflow.task_name

    @property
    def task_id(self) -> int:
        """Number of the task."""
        return self.inflow.task_id

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} cannot be pickled; iterate it here and "
            f"pass its items on."
        )


class BlockingStream(StreamBase, Iterator[T]):
    """The items of a child generator, by `for`; waiting releases the task's CPUs.

    To type checkers `.remote()` gives a `Stream` everywhere.
    """

    def __init__(self, inflow: ItemBuffer, client: Client) -> None:
        self.inflow = inflow
        self._client = client
        self._is_through = False

    def __repr__(self) -> str:
        inflow = self.inflow
        return (
            f"<BlockingStream of {inflow.task_name}: {len(inflow.buffer)} items to "
            f"take, {inflow.window.taken} taken>"
        )

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a stream has no truth value; write `for item in "
            f"{self.task_name}.remote(...)`."
        )

    def __aiter__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} was made in a plain function, where no "
            f"event loop runs; write `for item in {self.task_name}.remote(...)`."
        )

    def __iter__(self) -> BlockingStream[T]:
        return self

    def __next__(self) -> T:
        inflow = self.inflow
        if self._is_through:
            raise StopIteration
        if not inflow.buffer and not inflow.is_over:
            self._wait()
        if inflow.buffer:
            try:
                return inflow.take()  # type: ignore[no-any-return]
            except BaseException:
                self.close()
                raise
        self._is_through = True
        inflow.raise_error()
        if inflow.is_cancelled:
            raise TaskCancelledError(f"{self.task_name} was cancelled.")
        raise StopIteration

    def _wait(self) -> None:
        if is_loop_running():
            raise MisuseError(
                f"the next item of {self.task_name} would be waited for in an event "
                f"loop, which would be blocked; call .remote() there, and write `async "
                f"for`."
            )
        inflow, client = self.inflow, client_of_task()
        if client is not self._client:
            raise MisuseError(
                f"the stream of {self.task_name} belongs to another task; iterate it "
                f"in the one that has called .remote()."
            )
        block(
            client,
            (inflow.task_id,),
            lambda: bool(inflow.buffer) or inflow.is_over,
            inflow.done,
        )

    def reports(self) -> Iterator[Report]:
        """Return the generator's reports as they come, by `for`; see `aiogpu.report`.

        They end with the generator, which may wait for its items to be taken.
        """
        return _read_reports(self.inflow)

    def __enter__(self) -> BlockingStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        inflow = self.inflow
        if not inflow.is_over and inflow.close():
            self._client.withdraw_soon(inflow.task_id)

    def close(self) -> None:
        """Stop the generator and drop the items that were not taken; idempotent."""
        self._is_through = True
        self.inflow.cancel()

    def cancel(self) -> bool:
        """Stop the generator; False if it had ended before."""
        if self.inflow.is_over:
            return False
        self.inflow.cancel()
        return True

    def why(self) -> NoReturn:
        """Refuse: only the program asks why a task waits.

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
    """Wait in plain code until a condition holds; False if the time is up before.

    Args:
        client: the client of the task that waits.
        tasks: numbers of the tasks it waits for; the node is told them.
        is_over: the condition.
        are_done: whether these tasks have ended, which the node then knows by itself.
        deadline: in terms of `time.monotonic`; None for no limit.
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
            # The driver cannot know by itself that nobody waits any more.
            client.note_wait(waiter, ())


# Values from elsewhere.


class RestoredOwner:
    """Owns a handle that came from elsewhere.

    Attributes:
        reference: the value that the handle stands for.
        remote_values: fetches the value from another process; None for a value of this
            process.
        why: says why the task that makes the value waits.
    """

    def __init__(self, reference: Any, caller: Any) -> None:
        self.reference = reference
        self.remote_values = caller.remote_values
        self.why = caller.why

    def on_loop(self, name: str) -> Any:
        """Return the same handle for the running event loop."""
        return HandleBase.restore(self.reference.id, name, self.reference)

    def fetch(self, handle: BlockingHandle[Any]) -> None:
        """Ask for the value unless it is here or was asked for already."""
        if self.remote_values is not None and not handle.task_id and not handle.done():
            handle.task_id = self.remote_values.fetch(self.reference.id, handle)

    def cancel(self, question: int) -> None:
        """Stop the task that makes the value, and withdraw the question for it."""
        if self.remote_values is not None:
            self.remote_values.cancel(question)
            self.remote_values.discard(self.reference.id)
        elif self.reference.stop is not None:
            self.reference.stop()


# Waiting for results.


def blocks_loop(what: str) -> MisuseError:
    """The error for a wait that would block a running event loop."""
    return MisuseError(
        f"{what} would block the event loop that runs here; write `await handle`, or "
        f"`await asyncio.gather(*handles)`."
    )


def await_end(handles: list[BlockingHandle[Any]], timeout: float | None) -> None:
    """Wait until all have ended; raise the error of one as soon as it has failed."""
    deadline = None
    if timeout is not None:
        deadline = time.monotonic() + check_wait("timeout", timeout)
    try:
        in_time = _all_have_ended(handles, deadline)
        for one in handles:
            if one.has_failed:
                one.result()
        if not in_time:
            raise TaskTimeoutError(_late(handles, timeout))
    finally:
        one = None  # type: ignore[assignment]
        del handles


def _all_have_ended(handles: list[BlockingHandle[Any]], deadline: float | None) -> bool:
    """Wait until all have ended or one has failed; False if time is up before."""
    fetch(handles)
    pending = [one for one in handles if not one.done()]
    if not pending or any(one.has_failed for one in handles):
        return True
    client = client_of_task()
    for one in pending:
        if isinstance(one.owner, RestoredOwner):
            one.client = client  # it may have come to another task of this process
    check_client("aiogpu.get()", pending, client)
    tasks = tuple(one.task_id for one in pending)
    return block(
        client,
        tasks,
        _countdown(client, pending),
        lambda: all(one.done() for one in handles),
        deadline,
        is_bound=deadline is None,
    )


def _countdown(
    client: Client, pending: list[BlockingHandle[Any]]
) -> Callable[[], bool]:
    """A test whether a wait is over, which looks at each handle about once."""
    upsets_seen = -1

    def is_over() -> bool:
        nonlocal upsets_seen
        upsets = client.upsets
        while pending and pending[-1]._state != "pending":
            if pending.pop().has_failed:
                # Another thread may have found that it cannot be unpickled.
                return True
        if upsets != upsets_seen:
            upsets_seen = upsets
            return not pending or any(one.has_failed for one in pending)
        return not pending

    return is_over


def _late(handles: list[BlockingHandle[Any]], timeout: float | None) -> str:
    late = [one.task_name for one in handles if not one.done()]
    if not late:
        # If tasks run in this thread, one may have ended too late.
        return f"{handles[-1].task_name} ended after the {timeout:g} s."
    if len(handles) == 1:
        return f"{late[0]} did not end within {timeout:g} s; it goes on."
    return (
        f"{len(late)} of {len(handles)} tasks did not end within {timeout:g} s, "
        f"{late[0]} for one; they go on."
    )


def fetch(handles: list[BlockingHandle[Any]]) -> None:
    """Ask for the values of restored handles, which are fetched only on demand."""
    for one in handles:
        if isinstance(one.owner, RestoredOwner):
            one.owner.fetch(one)


def check_client(what: str, handles: list[BlockingHandle[Any]], client: Client) -> None:
    """Raise `MisuseError` unless all handles are those of this client's task."""
    for one in handles:
        if one.client is not client:
            raise MisuseError(
                f"the handle of {one.task_name} belongs to another task; {what} waits "
                f"for what the running task has started."
            )
