"""Handles and streams without an event loop, which `.remote()` returns in plain tasks.

A plain function that runs as a task has no loop: it waits by `aiogpu.get` and iterates
by `for`. This file must not import asyncio, which may cost such a task more than its
work.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from aiogpu.api.options import check_wait
from aiogpu.api.results.base import (
    OF_A_LIST,
    UNREAD,
    HandleBase,
    cut_frames,
)
from aiogpu.api.results.items import ItemBuffer, StreamBase
from aiogpu.api.usage_errors import PUT_NAME
from aiogpu.client.current import client_of_task, error_inside_task, is_loop_running
from aiogpu.errors import MisuseError, TaskCancelledError, TaskTimeoutError
from aiogpu.serialization.exceptions import STOPPED, error_of
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from types import TracebackType

    from aiogpu.api.results.base import HandleClient
    from aiogpu.api.results.reports import Report
    from aiogpu.client.interface import Client, Outcome
    from aiogpu.serialization.references import Reference


T = TypeVar("T")


class BlockingHandle(HandleBase, Generic[T]):
    """The future result of a child task, in a plain function; see `get`.

    For type checkers `.remote()` returns a `Handle` everywhere.

    Attributes:
        task_client: the client of the task that started the child.
        owner: cancels the work.
        on_end: functions to call with the handle when the child has ended.
    """

    __slots__ = (
        "__weakref__",
        "_error",
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
        "task_client",
        "task_id",
        "task_name",
    )

    def __init__(
        self, task_name: str, owner: Any, client: HandleClient, task_client: Client
    ) -> None:
        self.task_name = task_name
        self.task_id = 0
        self.client = client
        self.task_client = task_client
        self.owner = owner
        self.shared: Reference | None = None
        self.part = -1
        self.raw: bytes | None = None
        self.on_end: tuple[Callable[[BlockingHandle[Any]], object], ...] = ()
        self._state = "pending"
        self._value: T = UNREAD
        self._error: Exception | None = None
        self._trace: TracebackType | None = None

    def __repr__(self) -> str:
        return f"<BlockingHandle {self.task_name} {self._state}>"

    def _how_to_wait(self) -> str:
        if self.task_name == PUT_NAME:
            return "aiogpu.get(handle)"
        if self.client.is_borrowed:
            return f"aiogpu.get(handle), or aiogpu.get(handles) {OF_A_LIST}"
        return f"aiogpu.get({self.task_name}.remote(...))"

    def __await__(self) -> Generator[Any, None, T]:
        if self.client.is_borrowed and self.shared is not None and is_loop_running():
            # The handle was unpickled before the loop ran.
            restored = HandleBase.restore(self.shared.id, self.task_name, self.shared)
            return restored.__await__()  # type: ignore[no-any-return]
        raise MisuseError(
            f"the handle of {self.task_name} was made in a plain function, without an "
            f"event loop; call aiogpu.get(handle) instead."
        )

    def done(self) -> bool:
        """Return whether the task has ended or was cancelled."""
        return self._state != "pending"

    has_ended = done

    def cancelled(self) -> bool:
        """Return whether the handle was cancelled."""
        return self._state == "cancelled"

    def cancel(self) -> bool:
        """Stop the work; return False if the task had ended before it was cancelled."""
        if self.done():
            return self.cancelled()
        self.owner.cancel(self.task_id)
        self._end("cancelled")
        if self.shared is not None:
            self.client.cancel_shared(self)
        return True

    def reports(self) -> Iterator[Report]:
        """Return an iterator over the task's reports, until the task ends.

        See `aiogpu.report`. The CPUs of the reading task are free while it waits.

        Raises:
            MisuseError: another task started the task.
        """
        if self.client.is_borrowed:
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
            self.client.settle_shared(self, outcome)
        if isinstance(outcome, bytes):
            self.raw = outcome
            self._end("finished")
            return
        if isinstance(outcome, Failed) and outcome.kind == STOPPED:
            self._end("cancelled")  # another holder of the handle cancelled the task
        else:
            error = error_of(outcome, self.task_name)
            self._error, self._trace = error, error.__traceback__
            self._end("failed")

    def watch(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(handle)` when the child has ended."""
        self.on_end += (fn,)

    def unwatch(self, fn: Callable[[Any], object]) -> None:
        """Remove the callbacks equal to `fn`."""
        self.on_end = tuple(other for other in self.on_end if other != fn)

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
            if self._value is UNREAD and self.raw is not None:
                self._decode()
                self._state = "finished" if self._error is None else "failed"
            if self._error is not None:
                # Otherwise each raise would append its frames to the previous ones.
                raise self._error.with_traceback(self._trace)
            return self._value
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


class BlockingStream(StreamBase, Iterator[T]):
    """The items of a child generator, by `for`; the task's CPUs are free meanwhile.

    For type checkers `.remote()` returns a `Stream` everywhere.
    """

    LOOP = "for"

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
        if handle.client.is_borrowed:
            # Another task of this process may have received it.
            handle.task_client = client
    check_client("aiogpu.get()", pending, client)
    left, has_failed = set(pending), False

    def note(handle: BlockingHandle[Any]) -> None:
        nonlocal has_failed
        left.discard(handle)
        has_failed = has_failed or handle.has_failed

    try:
        for handle in pending:
            handle.watch(note)
            if handle.done():  # meanwhile, in another thread
                note(handle)
        return block(
            client,
            tuple(handle.task_id for handle in pending),
            lambda: has_failed or not left,
            lambda: all(handle.done() for handle in handles),
            deadline,
            is_bound=deadline is None,
        )
    finally:
        for handle in tuple(left):
            handle.unwatch(note)


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
        if handle.client.is_borrowed:
            handle.client.fetch(handle)


def check_client(what: str, handles: list[BlockingHandle[Any]], client: Client) -> None:
    """Raise `MisuseError` unless all handles belong to this client's task."""
    for handle in handles:
        if handle.task_client is not client:
            raise MisuseError(
                f"the handle of {handle.task_name} belongs to another task; {what} "
                f"waits only for tasks that the running task started."
            )
