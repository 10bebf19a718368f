"""What `.remote()` gives: a true `asyncio.Future` whose cancelling stops the work.

`await` does not wait on the handle itself but on a future of its own, so that a
cancelled waiter withdraws only itself; when the last one has gone and nobody else
has registered a callback, the work is cancelled. The result is unpickled once, when
it is first asked for. This file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Final, NoReturn, TypeVar

from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    NodeClosedError,
    TaskCancelledError,
)
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Failed
from aiogpu.wire.payload import load_result

T = TypeVar("T")

# Looked up once; `super()` costs more than the methods themselves.
_set_result: Final[Callable[[Any, object], None]] = asyncio.Future.set_result
_result: Final[Callable[[Any], object]] = asyncio.Future.result


class Handle(asyncio.Future[T]):
    """A task's result to be.

    Attributes:
        task_name: name of the task.
    """

    __slots__ = (
        "_callbacks_added",
        "_cancel_work",
        "_error",
        "_payload",
        "_value",
        "_waiters",
        "task_id",
        "task_name",
    )

    def __init__(
        self,
        task_name: str,
        cancel_work: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self.task_name = task_name
        self.task_id = 0
        self._cancel_work = cancel_work
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks_added = 0
        self._payload: bytes | None = None
        self._value: T | None = None
        self._error: DeserializationError | None = None

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        )
        return f"<Handle {self.task_name} {self.task_id} {state}>"

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a Handle is not its result and has no truth value; "
            f"write `await` before {self.task_name}.remote(...)."
        )

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"the handle of {self.task_name} cannot be pickled in this version; await "
            f"it and pass the value."
        )

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            waiter = self.get_loop().create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            except (asyncio.CancelledError, GeneratorExit):
                self._withdraw(waiter)
                raise
        return self.result()

    __iter__ = __await__

    def _withdraw(self, waiter: asyncio.Future[None]) -> None:
        if waiter in self._waiters:
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
            super().add_done_callback(fn)
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Undo `add_done_callback`; gives how many there were."""
        removed = super().remove_done_callback(fn)
        self._callbacks_added -= removed
        return removed

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the handle and stop the work.

        The handle is cancelled at once; the task's resources are free when its
        code has stopped. False if it had ended before.
        """
        if not super().cancel(msg):
            return False
        self._cancel_work(self.task_id)
        self._wake()
        return True

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        if not self.done():
            self._payload = payload
            _set_result(self, None)
            if self._waiters:
                self._wake()

    def reject(self, failed: Failed) -> None:
        """Take what the worker says of its failure; called by the engine."""
        self.fail(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        if not self.done():
            super().set_exception(error)
            if isinstance(error, NodeClosedError | TaskCancelledError):
                # Who shuts a node down, or ends the task that has started this one,
                # has said that he wants none of its results.
                super().exception()
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def result(self) -> T:
        """The task's result; raises as `asyncio.Future.result` does.

        Raises:
            DeserializationError: it cannot be unpickled in this process.
        """
        _result(self)
        if self._payload is not None:
            self._decode()
        if self._error is not None:
            # Else each raise would add its frames to those of the last.
            raise self._error.with_traceback(None)
        return self._value  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        """The task's error, or the one of unpickling its result; None without."""
        error = super().exception()
        if error is None and self._payload is not None:
            self._decode()
        return error or self._error

    def _decode(self) -> None:
        assert self._payload is not None, self
        payload, self._payload = self._payload, None
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
