"""What `.remote()` gives: a true `asyncio.Future` whose cancelling stops the work.

`await` does not wait on the handle itself but on a future of its own, so that a
cancelled waiter withdraws only itself; when the last one has gone and nobody else
has registered a callback, the work is cancelled. The result is unpickled once, when
it is first asked for. This file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

from aiogpu.api.usage_errors import NotItsResult
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    NodeClosedError,
    TaskCancelledError,
)
from aiogpu.serialization.serializer import load_result

if TYPE_CHECKING:
    from aiogpu.client.interface import ValueStore
    from aiogpu.observe.why import Why
    from aiogpu.runtime.objects.values import Value
    from aiogpu.serialization.references import Reference
    from aiogpu.wire.messages import Failed

T = TypeVar("T")

# Looked up once; `super()` costs more than the methods themselves.
_set_result: Final[Callable[[Any, object], None]] = asyncio.Future.set_result
_result: Final[Callable[[Any], object]] = asyncio.Future.result
_exception: Final[Callable[[Any], BaseException | None]] = asyncio.Future.exception
_add_done_callback: Final[Callable[..., None]] = asyncio.Future.add_done_callback


class Owner(Protocol):
    """Who has started the task and can be asked about it: a session."""

    def cancel(self, task: int) -> None:
        """Stop the task."""
        ...

    async def why(self, name: str, task: int) -> Why:
        """Say why it waits, or what it does."""
        ...


DECODING: Final = 5e-3
"""Seconds for which large results are unpickled in one turn of the loop."""


class LargeResults(threading.local):
    """Handles whose large results have come: a few are unpickled in each turn.

    Else the turn in which thousands of them come, as `gather` gives them, would hold
    the loop for as long as all take. What comes after them waits for its turn as well,
    so that handles end in the order of their results. One for each thread, since each
    has a loop of its own.
    """

    def __init__(self) -> None:
        self.handles: deque[Handle[Any]] = deque()

    def take(self, handle: Handle[Any]) -> None:
        """Settle a handle in one of the next turns."""
        loop = handle.get_loop()
        if self.handles and self.handles[0].get_loop() is not loop:
            self.handles.clear()  # that loop was left, and nobody waits there
        if not self.handles:
            loop.call_soon(self._settle_some)
        self.handles.append(handle)

    def _settle_some(self) -> None:
        until = time.perf_counter() + DECODING
        while self.handles:
            handle = self.handles[0]
            try:
                handle.settle()
            finally:
                self.handles.popleft()
            if time.perf_counter() >= until and self.handles:
                self.handles[0].get_loop().call_soon(self._settle_some)
                return


_large: Final = LargeResults()


class Handle(NotItsResult, asyncio.Future[T]):
    """A task's result to be.

    Attributes:
        task_name: name of the task.
        part: which of several results of it this is; -1 for all of it.
    """

    __aiogpu_handle__ = True
    __slots__ = (
        "_callbacks_added",
        "_error",
        "_owner",
        "_payload",
        "_raw",
        "_shared",
        "_value",
        "_waiters",
        "part",
        "task_id",
        "task_name",
    )

    def __init__(
        self, task_name: str, owner: Owner, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(loop=loop)
        self.task_name = task_name
        self.task_id = 0
        self._owner: Owner | None = owner
        self._waiters: list[asyncio.Future[None]] | None = None
        self._callbacks_added = 0
        self._payload: bytes | None = None
        self._raw: bytes | None = None
        self._shared: Value | None = None
        self.part = -1
        self._value: T | None = None
        self._error: DeserializationError | None = None

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        )
        shown = f"<Handle {self.task_name} {self.task_id} {state}>"
        if sys._getframe(1).f_code.co_name == "create_task":
            # It goes into the words of a TypeError that says no more than "a coroutine
            # was expected", as a TaskGroup does.
            shown += " (give it handle.coro())"
        return shown

    @property
    def child(self) -> int:
        """The number of its task."""
        return self.task_id

    @property
    def raw(self) -> bytes | None:
        """The value pickled, if it is there."""
        return self._payload or self._raw

    @property
    def error(self) -> BaseException | None:
        """Why there will be no result, None if there is one or may be."""
        return self.exception() if self.done() and not self.cancelled() else None

    @property
    def far(self) -> ValueStore | None:
        """Who knows its value, where another process keeps that."""
        return None

    def stand_for(self, value: Value) -> None:
        """It has come from elsewhere: others know it by that value already."""
        self._shared = value
        self.task_id = value.task
        self._callbacks_added += 1  # others may want it, whoever withdraws

    def _how_to_wait(self) -> str:
        return f"`await` before {self.task_name}.remote(...)"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # Late: only a handle within something that is sent comes here.
        from aiogpu.api.loop_sessions import check_sender
        from aiogpu.serialization.references import add_handle, open_handle

        check_sender(self)
        return open_handle, (add_handle(self.task_name, self.share), self.task_name)

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self._shared is None:
            from aiogpu.runtime.objects.values import value_of

            # Somebody wants it from here on, whoever withdraws.
            self._callbacks_added += 1
            self._shared = value_of(self)
        return self._shared

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            waiter = self.get_loop().create_future()
            if self._waiters is None:
                self._waiters = [waiter]
            else:
                self._waiters.append(waiter)
            try:
                yield from waiter
            except (asyncio.CancelledError, GeneratorExit):
                self._withdraw(waiter)
                raise
        try:
            return self.result()
        finally:
            del self  # see `result`

    def _withdraw(self, waiter: asyncio.Future[None]) -> None:
        if self._waiters and waiter in self._waiters:
            self._waiters.remove(waiter)
        if not self._waiters and not self._callbacks_added:
            self.cancel()

    async def coro(self) -> T:
        """The handle as a coroutine, for `TaskGroup.create_task(handle.coro())`."""
        return await self

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn(handle)` soon after the end; see `asyncio.Future`."""
        self._callbacks_added += 1
        if context is None:
            # Given as None, it would be that of whoever settles the handle.
            _add_done_callback(self, fn)
        else:
            _add_done_callback(self, fn, context=context)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Undo `add_done_callback`; gives how many there were."""
        removed = super().remove_done_callback(fn)
        self._callbacks_added -= removed
        return removed

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the handle and stop the work.

        The handle is cancelled at once; the task's resources are free when its
        code has stopped. False if it had ended before.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        if asyncio._get_running_loop() is not self.get_loop():
            # Late: a handle in a worker has no session.
            from aiogpu.api.loop_sessions import check_thread

            check_thread(self.get_loop(), f"cancel() of {self!r}")
        if not super().cancel(msg):
            return False
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel(self.task_id)
        self._wake()
        if self._shared is not None:
            self._shared.fail(TaskCancelledError(f"{self.task_name} was cancelled."))
        return True

    async def why(self) -> Why:
        """Say why the task waits, or what it does instead.

        The answer is a `Why`; printed, it tells the whole story. Asking changes
        nothing and costs little, however many tasks wait.

        Raises:
            MisuseError: this is another event loop than the handle's.
            NodeError: it was asked inside a task, or in a fork of the program.
        """
        if self.done() or self._owner is None:
            return self._why_ended()
        if self.get_loop() is not asyncio.get_running_loop():
            raise MisuseError(
                f"the handle of {self.task_name} belongs to another event loop; ask "
                f"it for why() on the loop where .remote() was called."
            )
        return await self._owner.why(self.task_name, self.task_id)

    def _why_ended(self) -> Why:
        from aiogpu.observe.why import Why

        if self.cancelled():
            outcome = "it was cancelled"
        elif self._payload is None and (error := self.exception()):
            outcome = f"it failed with {type(error).__name__}"
        else:
            outcome = "it gave its result"
        return Why(self.task_name, self.task_id, "ended", outcome=outcome)

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        if not self.done():
            self._payload = payload
            # An actor ends although its calls' results are kept.
            self._owner = None
            if type(payload) is bytes and not _large.handles:
                _set_result(self, None)
                if self._waiters:
                    self._wake()
            else:
                _large.take(self)
            if self._shared is not None:
                self._shared.receive(payload)

    def settle(self) -> None:
        """End with the payload that has come; unpickle it if somebody waits for it."""
        if self.done():
            return
        if type(self._payload) is not bytes and (self._waiters or self._callbacks):
            self._decode()
        _set_result(self, None)
        self._wake()

    def reject(self, failed: Failed) -> None:
        """Take what the worker says of its failure; called by the engine."""
        from aiogpu.serialization.exceptions import unpack_failure

        if self._shared is not None:
            self._shared.reject(failed)
        self.fail(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        if not self.done():
            super().set_exception(error)
            self._owner = None
            if isinstance(error, NodeClosedError | TaskCancelledError):
                # Who shuts a node down, or ends the task that has started this one,
                # has said that he wants none of its results.
                super().exception()
            self._wake()
            if self._shared is not None:
                self._shared.fail(error)
                super().exception()  # whoever needs it tells of it

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def result(self) -> T:
        """The task's result; raises as `asyncio.Future.result` does.

        Raises:
            DeserializationError: it cannot be unpickled in this process.
        """
        try:
            _result(self)
            if self._payload is not None:
                self._decode()
            if self._error is not None:
                # Else each raise would add its frames to those of the last.
                raise self._error.with_traceback(None)
            return self._value  # type: ignore[return-value]
        finally:
            # An error's traceback keeps this frame, and with it the error, and all
            # that the caller's frames hold, arrays say, until the collector runs.
            del self

    def exception(self) -> BaseException | None:
        """The task's error, or the one of unpickling its result; None without."""
        error = _exception(self)
        if error is None and self._payload is not None:
            self._decode()
        return self._error if error is None else error

    def _decode(self) -> None:
        assert self._payload is not None, self
        payload, self._payload = self._payload, None
        self._raw = payload
        try:
            self._value = load_result(payload)
        except DeserializationError as error:
            self._error = error

    def set_result(self, result: T, /) -> NoReturn:
        """Only the task sets its result."""
        raise MisuseError(f"the result of {self.task_name} is set by its task alone.")

    def set_exception(self, exception: type | BaseException, /) -> NoReturn:
        """Only the task sets its error."""
        raise MisuseError(f"the error of {self.task_name} is set by its task alone.")
