"""Handles and iterators for code without an event loop: proxies of those of the loop.

A handle is a `concurrent.futures.Future` that follows a handle of the loop to its end.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, cast

from aiogpu.api.map import Results
from aiogpu.api.options import check_wait
from aiogpu.api.portal.loop_thread import CHECK_EVERY, Portal, blocks_loop, proxies
from aiogpu.api.portal.proxy import Proxy
from aiogpu.api.results import handle as handles
from aiogpu.api.results.base import cut_frames
from aiogpu.api.results.stream import IteratedOnce, Stream
from aiogpu.api.usage_errors import PUT_NAME, NotItsResult
from aiogpu.client.current import proxy_maker
from aiogpu.errors import (
    MisuseError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerDiedError,
)

if TYPE_CHECKING:
    from aiogpu.api.results.reports import Report
    from aiogpu.observe.why import Why

T = TypeVar("T")


class CallCancelledError(TaskCancelledError, concurrent.futures.CancelledError):
    """The handle of a call was cancelled; raised by its `result()`."""


NOT_BEGUN: Final = frozenset({"opening", "waiting", "expecting", "starting", "queued"})
"""States of a task whose code has not begun; see `Why.state`."""


class CallDiedError(WorkerDiedError, concurrent.futures.BrokenExecutor):
    """The worker of a call died; raised by its `result()`."""


class CallOutOfMemoryError(OutOfMemoryError, concurrent.futures.BrokenExecutor):
    """The worker of a call was killed for memory; raised by its `result()`."""


_BROKEN: Final[dict[type, type]] = {
    WorkerDiedError: CallDiedError,
    OutOfMemoryError: CallOutOfMemoryError,
}
"""The classes of errors that are a `BrokenExecutor` as well. `aiogpu.errors` does not
import `concurrent.futures`, which would delay each worker's start."""


class ResultIterator(Proxy, Iterator[T]):
    """Iterator over the results of a generator or of `map`, without an event loop.

    `with` stops the work at the end of its block. Otherwise the work stops when the
    last reference is dropped: in `for item in f.remote()` at the end of the loop.
    """

    _target: IteratedOnce[T] | AsyncGenerator[T]

    def __next__(self) -> T:
        target = self._target
        try:
            return self._portal.fetch("the next item", target.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        except concurrent.futures.CancelledError:
            raise TaskCancelledError(f"{target!r} was cancelled.") from None
        finally:
            del target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the work and drop the remaining results; idempotent."""
        self._portal.run("close()", self._target.aclose)


class Handle(Proxy, NotItsResult, concurrent.futures.Future[T]):
    """The future result of a task, in a thread without an event loop.

    `result(timeout)` waits. `concurrent.futures.wait` and `as_completed` accept the
    handle, and `asyncio.wrap_future` makes it awaitable. `cancel()` stops the work.

    Attributes:
        task_name: name of the task.
    """

    def __init__(self, portal: Portal, task_name: str) -> None:
        concurrent.futures.Future.__init__(self)
        self._portal = portal
        self.task_name = task_name
        self._trace: TracebackType | None = None

    @property
    def __aiogpu_handle__(self) -> handles.Handle[T]:
        """The loop's handle; see `serialization.references.HANDLE_MARK`."""
        return self._on_loop()  # type: ignore[no-any-return]

    def follow(self, target: handles.Handle[T]) -> Self:
        """Follow the loop's handle to its end; call this on the loop."""
        self._target = target
        target.add_done_callback(self._settle)
        return self

    def start(self, begin: Callable[[], handles.Handle[T]]) -> None:
        """Make the call, on the loop; an error of the call becomes the task's error."""
        try:
            target = begin()
        except Exception as error:  # noqa: BLE001 - `result` raises it
            target = handles.Handle(
                self.task_name, cast("Any", None), self._portal.loop
            )
            target.settle(error)
        self.follow(target)

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        )
        return f"<Handle {self.task_name} {self.task_id} {state}>"

    def _how_to_wait(self) -> str:
        if self.task_name == PUT_NAME:
            return "`aiogpu.sync.get(handle)`"
        return f"`aiogpu.sync.get(...)` around {self.task_name}.remote(...)"

    @property
    def task_id(self) -> int:
        """Number of the task; 0 before the task is submitted."""
        target: handles.Handle[T] | None = getattr(self, "_target", None)
        return 0 if target is None else target.task_id

    def __bool__(self) -> bool:  # type: ignore[override]
        return True  # as of any future, unlike handles on a loop

    def _settle(self, target: handles.Handle[T]) -> None:
        """Take the outcome of the loop's handle, on the loop; callbacks are called."""
        if self.done():
            return  # `cancel` has settled it
        before = proxy_maker.set(self._portal)
        try:
            if target.cancelled():
                self._end_cancelled()
            elif (error := target.exception()) is not None:
                if type(error) in _BROKEN:
                    error.__class__ = _BROKEN[type(error)]
                self._trace = error.__traceback__
                super().set_exception(error)
            else:
                super().set_result(target.result())
        finally:
            proxy_maker.reset(before)

    def _end_cancelled(self) -> None:
        super().cancel()
        super().set_running_or_notify_cancel()

    if not TYPE_CHECKING:

        def set_result(self, _result: object) -> NoReturn:
            """Raise `MisuseError`: only the task ends its handle."""
            raise MisuseError(
                f"the handle of {self.task_name} is ended by its task alone; for a "
                f"future of your own, make a `concurrent.futures.Future()`."
            )

        set_exception = set_result

        def set_running_or_notify_cancel(self) -> NoReturn:
            """Raise `MisuseError`: only the task ends its handle."""
            self.set_result(None)

    def cancel(self) -> bool:
        """Cancel the handle and stop the work, also if it runs.

        Returns:
            False if the task has ended before, with a result or an error.
        """
        if not self.done():
            if self._portal.is_usable:
                self._portal.call(self._cancel)
            else:
                self._end_cancelled()  # the work has ended with its loop
        return self.cancelled()

    def _cancel(self) -> None:
        if self._target.cancel():
            self._settle(self._target)

    async def _cancel_unless_begun(self) -> None:
        """Cancel the handle if its task waits; call this on the loop."""
        if (await self._target.why()).state in NOT_BEGUN:
            self._cancel()

    def running(self) -> bool:
        """Return whether the task runs now; asks the node.

        In a callback, which must not wait for the node, it is False.
        """
        if self.done() or self._portal.is_here or not self._portal.is_usable:
            return False
        return self.why().state == "running"

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task's result.

        Args:
            timeout: seconds, 0 or less to return at once; None waits without limit.

        Raises:
            Exception: the error of the task, or the reason why it could not start.
            TaskTimeoutError: the time is up; the task goes on.
            TaskCancelledError: the task was cancelled; the error is a
                `concurrent.futures.CancelledError` as well.
            MisuseError: called in the loop's own thread, which would block itself.
        """
        error = None
        try:
            self._wait(timeout)
            error = super().exception()
            if error is not None:  # before 3.13 Python tests its truth
                # Otherwise each raise would append its frames to the previous ones.
                raise error.with_traceback(self._trace)
            return super().result()
        except BaseException as raised:
            cut_frames(raised)
            raise
        finally:
            del self, error  # the error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the task ends; return its error or None. Raises like `result`."""
        self._wait(timeout)
        return super().exception()

    def _wait(self, timeout: float | None) -> None:
        deadline = inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            remaining = deadline - time.monotonic()
            if not remaining > 0:
                raise TaskTimeoutError(
                    f"{self.task_name} did not end within {timeout:g} s; it goes on. "
                    f"Call handle.cancel() to stop it."
                )
            if self._portal.is_here:
                raise blocks_loop(f"waiting for {self.task_name}")
            self._portal.check()
            with suppress(TimeoutError, concurrent.futures.CancelledError):
                super().exception(min(remaining, CHECK_EVERY))
        if self.cancelled():
            raise CallCancelledError(f"{self.task_name} was cancelled.")

    def __await__(self) -> NoReturn:
        raise MisuseError(
            f"the handle of {self.task_name} comes from `aiogpu.sync` and cannot be "
            f"awaited: call handle.result(), or write `await "
            f"asyncio.wrap_future(handle)`."
        )

    def reports(self) -> ResultIterator[Report]:
        """Return an iterator over the task's reports, until the task ends.

        See `aiogpu.report` and `aiogpu.Handle.reports`.
        """

        def read() -> Any:
            # The loop has made the posted call, and set `_target`, before it runs this.
            return self._target.reports()

        return ResultIterator(self._portal, self._portal.call(read))

    def why(self) -> Why:
        """Return why the task waits, or its state; see `aiogpu.Handle.why`."""

        async def ask() -> Why:
            return await self._target.why()  # type: ignore[no-any-return]

        return self._portal.run("handle.why()", ask)


def checked_handles(name: str, argument: Any) -> list[Handle[Any]]:
    """Return the handles that were passed to a function of `aiogpu.sync`, as a list.

    Raises:
        MisuseError: the argument is not a collection of handles.
    """
    what = f"aiogpu.sync.{name}()"
    if isinstance(argument, Proxy | str | bytes) or not hasattr(argument, "__iter__"):
        or_one = "a handle or " if name == "get" else ""
        raise MisuseError(f"{what} takes {or_one}a list of handles, not {argument!r}.")
    checked = list(argument)
    for handle in checked:
        if not isinstance(handle, Handle):
            raise MisuseError(
                f"{what} was given {handle!r}, which is not a handle; pass handles "
                f"that .remote() of an `aiogpu.sync.remote` function returned."
            )
    return checked


def completed(
    waited: list[Handle[Any]], timeout: float | None = None
) -> Iterator[Handle[Any]]:
    """Yield handles as they end, until all have ended or the time is up.

    Raises:
        OptionError: the timeout is invalid.
        MisuseError: called in the loop's own thread, which would block itself.
        NodeError: the loop was closed, so no handle will end.
    """
    if timeout is not None:
        check_wait("timeout", timeout)
    deadline = inf if timeout is None else time.monotonic() + timeout
    ended = [handle for handle in dict.fromkeys(waited) if handle.done()]
    pending = set(waited).difference(ended)
    yield from ended
    while pending:
        portal = waited[0]._portal
        remaining = deadline - time.monotonic()
        if portal.is_here and remaining > 0:
            raise blocks_loop(f"waiting for {waited[0].task_name}")
        portal.check()
        step = max(0.0, min(CHECK_EVERY, remaining))
        try:
            for future in concurrent.futures.as_completed(pending, timeout=step):
                handle = cast("Handle[Any]", future)
                pending.discard(handle)
                yield handle
        except TimeoutError:
            if time.monotonic() >= deadline:
                return


def results_of(given: Any, timeout: float | None) -> Any:
    """Wait for results, an actor or a reservation; see `aiogpu.sync.get`."""
    if isinstance(given, Handle):
        return given.result(timeout)
    if isinstance(given, Proxy) and given._is_awaited:
        given._portal.run("aiogpu.sync.get()", lambda: given._target)
        return given
    waited = checked_handles("get", given)
    for handle in completed(waited, timeout):
        if handle.cancelled() or super(Handle, handle).exception() is not None:
            return handle.result()
    late = sum(not handle.done() for handle in waited)
    if late:
        raise TaskTimeoutError(
            f"{late} of {len(waited)} tasks did not end within {timeout:g} s; they go "
            f"on."
        )
    return [handle.result() for handle in waited]


def _follow(portal: Portal, target: handles.Handle[T]) -> Handle[T]:
    return Handle[T](portal, target.task_name).follow(target)


proxies[handles.Handle] = _follow
proxies[Stream] = proxies[Results] = ResultIterator
