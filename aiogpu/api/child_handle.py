"""Handles inside a task, and of values that another process keeps.

Inside a task its node is told who waits. In a program whose node is another process,
others refer to results by ids of this program's, which the node is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiogpu.api.blocking_handle import abandoned
from aiogpu.api.handle import Handle
from aiogpu.client.current import client_of_task, services
from aiogpu.errors import TaskCancelledError
from aiogpu.serialization.exceptions import STOPPED

if TYPE_CHECKING:
    from aiogpu.api.handle import Owner
    from aiogpu.client.interface import ValueStore, Waits
    from aiogpu.serialization.references import Reference
    from aiogpu.wire.messages import Failed


T = TypeVar("T")


NEVER_ASKED: Final = -1
"""In place of the number of a question."""


class ChildHandle(Handle[T]):
    """A handle of which the task's node knows whether anybody waits for it.

    Its loop may be one of the user's own, in a plain task, that was closed before the
    child has ended: then nobody is left to be told.
    """

    __slots__ = ("_loan", "_waits")

    def __init__(
        self,
        task_name: str,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        waits: Waits | None,
    ) -> None:
        super().__init__(task_name, owner, loop)
        self._waits = waits
        self._loan: Reference | None = None

    def __await__(self) -> Generator[Any, None, T]:
        if self.done():
            try:
                return self.result()
            finally:
                del self  # see `Handle.result`
        waits = self._waits
        if waits is not None:
            waits.begin_wait(self.task_id)
        try:
            return (yield from super().__await__())
        finally:
            if waits is not None:
                waits.end_wait(self.task_id)
            del self

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn(handle)` soon after the end; see `asyncio.Future`."""
        super().add_done_callback(fn, context=context)
        if self._waits is not None and not self.done():
            self._waits.begin_wait(self.task_id)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        """Undo `add_done_callback`; gives how many there were."""
        removed = super().remove_done_callback(fn)
        if self._waits is not None:
            for _ in range(removed):
                self._waits.end_wait(self.task_id)
        return removed

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self._loan is None:
            far = None if services.client is None else services.client.far
            if far is None:
                return super().share()
            # Somebody wants it from here on, whoever withdraws.
            self._callbacks_added += 1
            self._loan = far.shares.share(self)
        return self._loan

    def receive(self, payload: bytes) -> None:
        """Take the pickled result; called by the engine."""
        if self._is_elsewhere():
            if self._shared is not None:
                # Plain code may wait for it that keeps the loop from running.
                self._shared.receive(payload)
            self._hand_over(self.receive, payload)
            return
        if self._waits is not None:
            self._waits.settle(self.task_id)
        super().receive(payload)

    def reject(self, failed: Failed) -> None:
        """Take what is said of its failure; called by the engine."""
        if failed.kind != STOPPED:
            super().reject(failed)
        elif self._is_elsewhere():
            self._hand_over(self.cancel)
        else:
            self.cancel()  # somebody has done so who was given it

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        if self._is_elsewhere():
            if self._shared is not None:
                self._shared.fail(error)
            self._hand_over(self.fail, error)
            return
        if self._waits is not None:
            self._waits.settle(self.task_id)
        super().fail(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the handle and stop the work; see `Handle.cancel`."""
        if not super().cancel(msg):
            return False
        if self._loan is not None and self.part >= 0:
            # Its call may go on for the others.
            far = client_of_task().far
            assert far is not None, self
            far.shares.drop(self.child, self._loan)
        return True

    def abandon(self) -> None:
        """Learn that the task has ended first; called by the engine."""
        self._hand_over(self.fail, abandoned(self.task_name))

    def _is_elsewhere(self) -> bool:
        """Whether what it is to be told was found by other code than its loop runs."""
        return asyncio._get_running_loop() is not self.get_loop()

    def _hand_over(self, tell: Callable[..., object], *told: object) -> None:
        """Call something on the loop's own thread, unless it is closed."""
        with suppress(RuntimeError):
            self.get_loop().call_soon_threadsafe(tell, *told)


class BorrowedHandle(ChildHandle[T]):
    """A handle that has come from elsewhere; asks for its value when it is wanted."""

    __slots__ = ("_far",)

    def __init__(
        self,
        task_name: str,
        far: ValueStore,
        loan: Reference,
        loop: asyncio.AbstractEventLoop,
        waits: Waits | None,
    ) -> None:
        super().__init__(task_name, far.link, loop, waits)
        self._far = far
        self._loan: Reference = loan
        self._callbacks_added += 1  # others may want it, whoever withdraws

    @property
    def far(self) -> ValueStore | None:
        """Who knows its value; see `Handle.far`."""
        return self._far

    def settle_with(self, payload: bytes) -> None:
        """The value is here already, and need not be asked for."""
        self.task_id = self.task_id or NEVER_ASKED
        super().receive(payload)

    def _fetch(self) -> None:
        if not self.task_id and not super().done():
            self.task_id = self._far.link.fetch(self._loan.id, self)

    def done(self) -> bool:
        """Return whether the value is here; whoever asks has it fetched."""
        self._fetch()
        return super().done()

    def __await__(self) -> Generator[Any, None, T]:
        self._fetch()
        return super().__await__()

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn(handle)` soon after the end; see `asyncio.Future`."""
        self._fetch()
        super().add_done_callback(fn, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        """Stop whoever makes the value; False if it was here before."""
        if not super().cancel(msg):
            return False
        self._far.link.discard(self._loan.id)
        return True


class FarHandle(Handle[T]):
    """See above.

    Others may refer to it before its task is started, while the node is joined; they
    are told which task it is as soon as that has a number.
    """

    __slots__ = ("_far", "_is_promised", "_loan", "_number")

    def __init__(
        self,
        task_name: str,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        far: ValueStore,
    ) -> None:
        self._far = far
        self._loan: Reference | None = None
        self._is_promised = False
        super().__init__(task_name, owner, loop)

    @property
    def task_id(self) -> int:
        """Number of its task, 0 before that is started."""
        return self._number

    @task_id.setter
    def task_id(self, number: int) -> None:
        """It is started; what was promised of it is named."""
        self._number = number
        if number and self._is_promised and self._loan is not None:
            self._is_promised = False
            self._far.shares.keep(self._loan, self)

    @property
    def far(self) -> ValueStore | None:
        """Who knows its value; see `Handle.far`."""
        return self._far

    def share(self) -> Reference:
        """What others refer to who are given this handle; it is a holder as well."""
        if self._loan is None:
            # Somebody wants it from here on, whoever withdraws.
            self._callbacks_added += 1
            shares = self._far.shares
            self._is_promised = not self._number and not self.done()
            self._loan = shares.promise() if self._is_promised else shares.share(self)
        return self._loan

    def reject(self, failed: Failed) -> None:
        """Take what is said of its failure; called by the engine."""
        if failed.kind == STOPPED:
            self.cancel()  # somebody has done so who was given it
        else:
            super().reject(failed)

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result; called by the engine."""
        self._break(error)
        super().fail(error)
        if self._loan is not None and not self.cancelled():
            self.exception()  # whoever needs it tells of it

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the handle and stop the work; see `Handle.cancel`."""
        if not super().cancel(msg):
            return False
        if self._loan is not None and self.part >= 0:
            # Its call may go on for the others.
            self._far.shares.drop(self.child, self._loan)
        self._break(TaskCancelledError(f"{self.task_name} was cancelled."))
        return True

    def _break(self, error: Exception) -> None:
        """What was promised of it will not come."""
        if self._is_promised and self._loan is not None:
            self._is_promised = False
            self._far.shares.fail(self._loan, error)
