"""Handles: `asyncio.Future`s whose cancellation stops the work.

Each `await` waits on a future of its own, so a cancelled waiter withdraws only itself.
When the last waiter has gone and no callback is registered, the work is cancelled. The
result is unpickled once, at first use. A handle belongs to one event loop and to the
node that the loop had when the handle was made; `sessions` registers the sessions of
all loops. Imported late, because it imports asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from aiogpu.api.results.base import (
    LOCAL,
    OF_A_LIST,
    UNREAD,
    HandleBase,
    HandleClient,
    Owner,
    cut_frames,
)
from aiogpu.api.usage_errors import PUT_NAME, Displayed
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    NodeClosedError,
    TaskCancelledError,
)
from aiogpu.serialization.exceptions import STOPPED, error_of
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import closed_node_error
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.api.results.reports import Reports
    from aiogpu.client.interface import Outcome
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


sessions: Final[dict[asyncio.AbstractEventLoop, Any]] = {}
"""The `api.session.Session` of each event loop that has a node."""


def check_thread(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Refuse a call from a thread other than the loop's, if the loop has a node.

    Raises:
        NoLoopError: another thread runs this.
    """
    session = sessions.get(loop)
    if session is not None:
        session.check_thread(what)


def check_loop(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Refuse a wait on another event loop, of which asyncio says little.

    Raises:
        NoLoopError: another thread runs this.
        MisuseError: another loop runs in this thread.
    """
    if asyncio._get_running_loop() is loop:
        return
    check_thread(loop, what)
    raise MisuseError(
        f"{what} was called on another event loop than its own; await it on the loop "
        f"where it was made."
    )


def check_home(handle: Any, loop: asyncio.AbstractEventLoop, session: Any) -> None:
    """Raise `MisuseError` if a handle cannot be sent from a loop.

    Args:
        handle: the handle to send.
        loop: the sender's loop, to which the handle must belong.
        session: the session of this loop, or None. A handle of a node that the loop had
            before is refused as well.
    """
    if not isinstance(handle, Handle):
        return
    if handle.get_loop() is not loop:
        raise MisuseError(
            f"the handle of {handle.task_name} belongs to another event loop and to "
            f"the node of that loop; await it there and pass the value."
        )
    if session is not None and handle.client.store is not session.remote_values:
        raise closed_node_error(handle.task_name)


async def why_of(
    waiting: Any, owner: Owner | None, loop: asyncio.AbstractEventLoop, outcome: str
) -> Why:
    """Return why the task of a handle or a stream waits; ask its owner.

    `outcome` says how the task ended; "" if it has not ended.
    """
    from aiogpu.observe.why import Why

    if outcome:
        return Why(waiting.task_name, waiting.task_id, "ended", outcome=outcome)
    check_loop(loop, f"why() of {waiting.task_name}")
    assert owner is not None, waiting  # dropped only at the end
    return await owner.why(waiting.task_name, waiting.task_id)


async def html_with_why(waiting: Any) -> str:
    """Return the HTML of a handle or a stream, with the state of its task."""
    from aiogpu.notebook.display import html_of

    async def status() -> Any:  # of a task that has a worker, so there is a session
        return await sessions[waiting.get_loop()].engine.status()

    return await html_of(repr(waiting), await waiting.why(), status)


T = TypeVar("T")


# Looked up once; `super()` costs more than the methods themselves.
_set_result: Final[Callable[[Any, object], None]] = asyncio.Future.set_result


_result: Final[Callable[[Any], object]] = asyncio.Future.result


_done: Final[Callable[[Any], bool]] = asyncio.Future.done


_exception: Final[Callable[[Any], BaseException | None]] = asyncio.Future.exception


_add_done_callback: Final[Callable[..., None]] = asyncio.Future.add_done_callback


DECODING: Final = 5e-3
"""Seconds that one turn of the loop spends on unpickling large results."""


_late: Final[dict[asyncio.AbstractEventLoop, deque[Handle[Any]]]] = {}
"""Handles whose large results have arrived, by loop; each turn unpickles a few.

If thousands arrive in one turn, as in a `gather`, unpickling all at once would block
the loop. Results that arrive later queue behind them, so handles end in the order of
their results. The dict is mostly empty, and a small result only checks that."""


def _finish_in_turn(handle: Handle[Any], payload: bytes) -> None:
    """Finish a handle in a later turn of its loop, or now if nothing is queued."""
    handle.raw = payload
    handle._owner = None
    for closed in [loop for loop in list(_late) if loop.is_closed()]:
        _late.pop(closed, None)
    loop = handle.get_loop()
    late = _late.get(loop)
    if late is None:
        if type(payload) is bytes:
            handle.finish()  # the queue that `settle` saw belongs to another loop
            return
        late = _late[loop] = deque()
        loop.call_soon(_finish_some, loop)
    late.append(handle)


def _finish_some(loop: asyncio.AbstractEventLoop) -> None:
    late, until = _late[loop], time.perf_counter() + DECODING
    try:
        while late and time.perf_counter() < until:
            late.popleft().finish()
    finally:
        if late:
            loop.call_soon(_finish_some, loop)
        else:
            del _late[loop]


class Handle(Displayed, HandleBase, asyncio.Future[T]):
    """The future result of a task; awaitable, and cancelling it stops the work."""

    __slots__ = (
        "_callbacks_added",
        "_error",
        "_owner",
        "_reports",
        "_value",
        "_waiters",
        "client",
        "part",
        "raw",
        "shared",
        "task_id",
        "task_name",
    )

    def __init__(
        self,
        task_name: str,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        client: HandleClient = LOCAL,
    ) -> None:
        super().__init__(loop=loop)
        self.task_name = task_name
        self.task_id = 0
        self.client = client
        self._owner: Owner | None = owner
        self._waiters: list[asyncio.Future[None]] | None = None
        self._callbacks_added = 0
        self.raw: bytes | None = None
        self.shared: Reference | None = None
        self.part = -1
        self._value: T = UNREAD
        self._error: DeserializationError | None = None

    def __repr__(self) -> str:
        state = (
            "cancelled" if self.cancelled() else "done" if _done(self) else "pending"
        )
        return f"<Handle {self.task_name} {self.task_id} {state}>"

    async def _html(self) -> str:
        return await html_with_why(self)

    @property
    def error(self) -> BaseException | None:
        """The error of the task; None if it has a result or has not ended."""
        return self.exception() if _done(self) and not self.cancelled() else None

    def done(self) -> bool:
        """Return whether the task has ended or was cancelled.

        The value of a handle that was received from another program or task is fetched
        on demand; the first call requests it.
        """
        if self.client.is_borrowed:
            self.client.fetch(self)
        return _done(self)

    def has_ended(self) -> bool:
        """Return whether the handle has its outcome; unlike `done`, request none."""
        return _done(self)

    def _how_to_wait(self) -> str:
        if self.task_name == PUT_NAME:
            return "`await handle`"
        if self.shared is not None:
            return f"`await handle`, or `await asyncio.gather(*handles)` {OF_A_LIST}"
        return f"`await` before {self.task_name}.remote(...)"

    def _not_ended(self, method: str) -> asyncio.InvalidStateError:
        """Return the error of `result` and `exception` before the task has ended."""
        return asyncio.InvalidStateError(
            f"{self.task_name} has not ended, and handle.{method}() does not wait: "
            f"write `await handle`, as in `await {self.task_name}.remote(...)`."
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        loop = asyncio._get_running_loop()
        if loop is not None:
            check_home(self, loop, sessions.get(loop))
        return super().__reduce__()

    def _keep_alive(self) -> None:
        self._callbacks_added += 1

    def __await__(self) -> Generator[Any, None, T]:
        if not _done(self):
            if self.client.has_waits:
                self.client.begin_wait(self)
                if _done(self):  # the client had the outcome of a received handle
                    return self.result()
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
            except RuntimeError:  # from the task, if it is of another loop
                if self._waiters and waiter in self._waiters:
                    self._waiters.remove(waiter)
                self.client.end_wait(self)
                check_loop(self.get_loop(), f"`await` of {self.task_name}")
                raise
        try:
            return self.result()
        except BaseException as error:
            cut_frames(error)
            raise
        finally:
            del self  # see `result`

    def _withdraw(self, waiter: asyncio.Future[None]) -> None:
        if self._waiters and waiter in self._waiters:
            self._waiters.remove(waiter)
        self.client.end_wait(self)
        if not self._callbacks_added and not self._is_awaited():
            self.cancel()

    def _is_awaited(self) -> bool:
        """Return whether a waiter waits for the end, not only for reports."""
        waiters = self._waiters
        return bool(waiters) and waiters != [self.report_buffer.waiter]

    def reports(self) -> Reports:
        """Return an async iterator over the task's reports, until the task ends.

        See `aiogpu.report`. Reports that came before this call are kept, the newest
        1000. Reading reports does not count as waiting for the task.

        Raises:
            MisuseError: the handle was received from another program or task, which
                started the task.

        Example:
            `async for report in handle.reports(): print(report["loss"])`
        """
        from aiogpu.api.results.reports import Reports, refuse_others

        if self.client.is_borrowed:
            refuse_others(self.task_name)
        return Reports(self, self.report_buffer)

    async def wait_for_report(self, waiter: asyncio.Future[None]) -> None:
        """Wait until `waiter` is set, by a report or by the task's end."""
        check_loop(self.get_loop(), f"the next report of {self.task_name}")
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        client = self.client
        client.begin_wait(self)
        try:
            await waiter
        finally:
            client.end_wait(self)
            if self._waiters and waiter in self._waiters:
                self._waiters.remove(waiter)

    async def coro(self) -> T:
        """Wait for the result; for `TaskGroup.create_task(handle.coro())`.

        A `TaskGroup` takes coroutines only, and refuses the handle itself.
        """
        return await self

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn(handle)` soon after the task has ended; see `asyncio.Future`."""
        if self.client.has_waits and not _done(self):
            self.client.begin_wait(self)
        self._callbacks_added += 1
        if context is None:
            # Passing context=None on would run `fn` in the context of the settler.
            _add_done_callback(self, fn)
        else:
            _add_done_callback(self, fn, context=context)

    def watch(self, fn: Callable[[Any], object]) -> None:
        """Add a callback, which keeps the work going; tell no client of a wait."""
        self._callbacks_added += 1
        _add_done_callback(self, fn)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Remove all callbacks equal to `fn`; return their number."""
        removed = self.unwatch(fn)
        for _ in range(removed):
            self.client.end_wait(self)
        return removed

    def unwatch(self, fn: Callable[[Any], object]) -> int:
        """Remove the callbacks that `watch` added; return their number."""
        removed = super().remove_done_callback(fn)
        self._callbacks_added -= removed
        return removed

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the handle and stop the work.

        The handle is cancelled at once; the task's resources are free once its code
        has stopped. Returns False if the task had already ended.

        Raises:
            NoLoopError: called in a thread other than the event loop's.
        """
        if asyncio._get_running_loop() is not self.get_loop():
            check_thread(self.get_loop(), f"cancel() of {self!r}")
        if not super().cancel(msg):
            return False
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel(self.task_id)
        self._wake()
        if self.shared is not None:
            self.client.cancel_shared(self)
        return True

    async def why(self) -> Why:
        """Return why the task waits, or its state if it does not wait.

        `print` shows the `Why` as text. The call changes nothing and is cheap, however
        many tasks wait.

        Raises:
            MisuseError: called on an event loop other than the handle's.
            NoLoopError: called in a thread other than the event loop's.
            NodeError: called inside a task, or in a fork of the program.
        """
        outcome = ""
        if self.cancelled():
            outcome = "it was cancelled"
        elif _done(self) and not self._is_unread and (error := self.exception()):
            outcome = f"it failed with {type(error).__name__}"
        elif _done(self) or self._owner is None:
            outcome = "it gave its result"
        return await why_of(self, self._owner, self.get_loop(), outcome)

    def settle(self, outcome: Outcome) -> None:
        """Take the outcome of the task; called by the engine."""
        if self.client.has_waits and not self._is_in_own_thread(outcome):
            return
        if _done(self):
            return
        if type(outcome) is bytes and not _late:
            self.raw = outcome
            # Kept results must not keep an actor alive, which is an owner.
            self._owner = None
            _set_result(self, None)
            if self._waiters:
                self._wake()
        elif isinstance(outcome, bytes):
            _finish_in_turn(self, outcome)
        else:
            self._fail(outcome)
            return
        if self.shared is not None:
            self.client.settle_shared(self, outcome)

    def _is_in_own_thread(self, outcome: Outcome) -> bool:
        """End the waits for a child; False if its loop's thread settles the handle.

        The client may hear of a child in any thread of its task. Plain code of the task
        may have opened the handle's loop, and may close the loop before the child ends;
        then there is no waiter to notify.
        """
        loop = self.get_loop()
        if asyncio._get_running_loop() is loop:
            self.client.end_waits(self)
            return True
        if self.shared is not None:
            # Plain code may wait for the value, and block the loop meanwhile.
            self.client.settle_shared(self, outcome)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.settle, outcome)
        return False

    @property
    def _is_unread(self) -> bool:
        """True if the task has a result that was not unpickled."""
        return self.raw is not None and self._value is UNREAD

    def finish(self) -> None:
        """End with the payload that arrived; unpickle it now if there are waiters.

        Not if it has handles: who reads it determines their kind; see `for_consumer`.
        """
        if _done(self):
            return
        payload = self.raw
        if (
            type(payload) is Payload
            and (self._waiters or self._callbacks)
            and not payload.contents.values
            and not payload.contents.actors
        ):
            self._decode()
        _set_result(self, None)
        self._wake()

    def _fail(self, outcome: Failed | Exception) -> None:
        if isinstance(outcome, Failed) and outcome.kind == STOPPED:
            self.cancel()  # another holder of the handle cancelled the task
            return
        error = error_of(outcome, self.task_name)
        super().set_exception(error)
        self._owner = None
        if isinstance(error, NodeClosedError | TaskCancelledError):
            # After a shutdown or the end of the parent task, the program need not
            # retrieve the error, so asyncio must not warn.
            super().exception()
        self._wake()
        if self.shared is not None:
            self.client.settle_shared(self, outcome)
            super().exception()  # holders of the shared value report the error

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def result(self) -> T:
        """Return the task's result; raise its error, like `asyncio.Future.result`.

        Raises:
            asyncio.InvalidStateError: the task has not ended; `await` the handle first.
            DeserializationError: the result cannot be unpickled in this process.
        """
        try:
            _result(self)
            if self._value is UNREAD:
                self._decode()
            if self._error is not None:
                # Otherwise each raise would append its frames to the previous ones.
                raise self._error.with_traceback(None)
            return self._value
        except asyncio.InvalidStateError:
            if _done(self):
                raise  # an error of the task itself
            raise self._not_ended("result") from None
        except BaseException as error:
            cut_frames(error)
            raise
        finally:
            # The error's traceback refers to this frame. With `self` in the frame there
            # is a cycle, which keeps the error and the objects in the callers' frames,
            # such as arrays, until the garbage collector runs.
            del self

    def exception(self) -> BaseException | None:
        """Return the task's error, or the error of unpickling the result; or None.

        Raises:
            asyncio.InvalidStateError: the task has not ended; `await` the handle first.
        """
        try:
            error = _exception(self)
        except asyncio.InvalidStateError:
            raise self._not_ended("exception") from None
        if error is None and self._value is UNREAD:
            self._decode()
        return self._error if error is None else error

    def set_result(self, result: T, /) -> NoReturn:
        """Raise `MisuseError`: only the task sets its result."""
        raise MisuseError(
            f"the result of {self.task_name} cannot be set; only its task sets it."
        )

    def set_exception(self, exception: type | BaseException, /) -> NoReturn:
        """Raise `MisuseError`: only the task sets its error."""
        raise MisuseError(
            f"the error of {self.task_name} cannot be set; only its task sets it."
        )
