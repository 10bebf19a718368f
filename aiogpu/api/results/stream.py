"""Streams on an event loop, and the base class of iterators over results.

Such an iterator belongs to one asyncio task and is iterated once. Its source does not
refer to it, so that dropping the iterator stops the work. This file imports asyncio, so
it is itself imported late.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Self, TypeVar

from aiogpu.api.results.blocking import ItemBuffer, StreamBase, StreamOwner
from aiogpu.api.results.handle import check_thread, why_of
from aiogpu.api.usage_errors import EnteredOnLoop
from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.results.reports import Reports
    from aiogpu.client.interface import Waits
    from aiogpu.observe.why import Why

T = TypeVar("T")

_get_running_loop: Final = asyncio._get_running_loop


class LoopSource:
    """The source of an iterator on an event loop.

    Attributes:
        loop: the event loop.
        waiter: settled to wake the asyncio task that waits; None while none does.
        is_over: whether nothing more will come.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        loop: asyncio.AbstractEventLoop
        waiter: asyncio.Future[None] | None
        is_over: bool

    def cancel(self) -> None:
        """Stop the work."""
        raise NotImplementedError

    def notify(self, _: object = None) -> None:
        """Wake the task that waits; call it on the loop only."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class IteratedOnce(AsyncIterator[T]):
    """An async iterator for one asyncio task, with an end."""

    THROUGH: ClassVar[str]
    CLOSED: ClassVar[str]
    CANCELLED: ClassVar[str]

    _source: LoopSource
    _ended: str | None = None

    @abstractmethod
    def _refuse(self) -> NoReturn:
        """Raise `MisuseError`: it has ended, and how."""

    def __aiter__(self) -> Self:
        if self._ended is not None:
            self._refuse()
        return self

    def _check_alone(self, what: str) -> None:
        if self._source.waiter is not None:
            raise MisuseError(
                f"another asyncio task is waiting for the next {what}; let one task "
                f"iterate and hand on what comes by a queue."
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Stop the work."""

    def __del__(self) -> None:
        # The source is missing where the arguments were refused.
        if hasattr(self, "_source"):
            self._stop_soon()

    def _end(self, how: str) -> None:
        if self._ended is None:
            self._ended = how
        self._source.cancel()

    def _end_by(self, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):
            # The garbage collector may raise it, amid any other code.
            self._ended = self.CANCELLED
            self._stop_soon()
        elif isinstance(error, asyncio.CancelledError):
            self._end(self.CANCELLED)
        else:
            self._end(f"ended with {type(error).__name__}")

    def _stop_soon(self) -> None:
        """Stop on the loop: any thread may drop the last reference."""
        source = self._source
        if not source.is_over:
            # A closed loop refuses; its node is closed as well.
            with suppress(RuntimeError):
                source.loop.call_soon_threadsafe(source.cancel)


class LoopItemBuffer(ItemBuffer, LoopSource):
    """The items of a stream on an event loop; see `ItemBuffer` and `LoopSource`."""

    __slots__ = ("loop", "waiter")

    def __init__(
        self,
        task_name: str,
        owner: StreamOwner,
        size: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(task_name, owner, size)
        self.loop = loop
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the consumer, if it waits."""
        if self.waiter is None:
            return
        if asyncio._get_running_loop() is self.loop:
            self.notify()
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                self.loop.call_soon_threadsafe(self.notify)


class Stream(StreamBase, EnteredOnLoop, IteratedOnce[T]):
    """The items of a generator that runs as a task, by `async for`.

    `async with f.remote() as stream:` stops the generator at the end of its block.
    Without it that happens when the last reference goes, which in `async for item in
    f.remote()` is when the loop is left.

    A plain `for` over it gets Python's own words: with an `__iter__` that raises better
    ones it would be an `Iterable`, and httpx, for one, would send it as such.
    """

    THROUGH = "was iterated to its end"
    CLOSED = "was closed"
    CANCELLED = "was cancelled"

    def __init__(
        self,
        task_name: str,
        owner: StreamOwner,
        size: int,
        loop: asyncio.AbstractEventLoop,
        waits: Waits | None = None,
    ) -> None:
        self._owner = owner
        self.inflow: LoopItemBuffer = LoopItemBuffer(task_name, owner, size, loop)
        self._source = self.inflow
        self._waits = waits

    def __repr__(self) -> str:
        inflow = self.inflow
        state = self._ended or (
            f"has {len(inflow.buffer)} items to take, {inflow.window.taken} taken"
        )
        return f"<Stream of {inflow.task_name} {inflow.task_id}: {state}>"

    def _as_called(self) -> str:
        return f"{self.task_name}.remote(...)"

    def __await__(self) -> Generator[Any, None, NoReturn]:
        call = self._as_called()
        raise MisuseError(
            f"{self.task_name} is a generator, and {call} is no result to await but a "
            f"stream of items: write `async for item in {call}`."
        )

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a Stream has no truth value; write `async for item in "
            f"{self._as_called()}`."
        )

    async def __anext__(self) -> T:
        inflow = self.inflow
        if self._ended is not None:
            if self._ended != self.CANCELLED:
                raise StopAsyncIteration
            self._refuse()
        if _get_running_loop() is not inflow.loop:
            self._check_thread("The next item")
        if inflow.waiter is not None:
            self._check_alone(f"item of {self.task_name}")
        try:
            # If two items arrive in one wait, the second wakes the next one in vain.
            while not inflow.buffer and not inflow.is_over:
                await self._news()
            if inflow.buffer:
                return inflow.take()  # type: ignore[no-any-return]
            inflow.raise_error()
            if inflow.is_cancelled and self._ended is None:
                raise asyncio.CancelledError(
                    f"the stream of {self.task_name} was cancelled"
                )
        except BaseException as error:
            self._end_by(error)
            raise
        self._end(self.THROUGH)
        raise StopAsyncIteration

    async def _news(self) -> None:
        """Wait until an item is there, or none will come."""
        inflow, waits = self.inflow, self._waits
        inflow.waiter = inflow.loop.create_future()
        if waits is not None:
            waits.begin_wait(inflow.task_id)
        try:
            if not inflow.buffer and not inflow.is_over:
                await inflow.waiter
        finally:
            inflow.waiter = None
            if waits is not None:
                waits.end_wait(inflow.task_id)

    def reports(self) -> Reports:
        """Return the generator's reports as they come, by `async for`.

        See `aiogpu.report`. They end with the generator, which may wait for its items
        to be taken: read them in another asyncio task than the items.
        """
        from aiogpu.api.results.reports import Reports

        return Reports(self, self.inflow.report_buffer)

    def done(self) -> bool:
        """Return whether no further item or report will come."""
        return self.inflow.is_over

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that it belongs to."""
        return self.inflow.loop

    async def wait_for_report(self, waiter: asyncio.Future[None]) -> None:
        """Wait until the waiter is set, which the generator's end does as well."""
        waits, task = self._waits, self.task_id
        if waits is not None:
            waits.begin_wait(task)
        try:
            await waiter
        finally:
            if waits is not None:
                waits.end_wait(task)

    async def aclose(self) -> None:
        """Stop the generator and drop the items that were not taken; idempotent.

        It does not wait until the generator's code has stopped; its resources are
        free when it has. A loop over this stream in another asyncio task ends.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        self._check_thread("aclose()")
        self._end(self.CLOSED)

    def cancel(self) -> bool:
        """Stop the generator as `aclose` does, with `CancelledError` for who waits.

        False if it had ended before.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        self._check_thread("cancel()")
        inflow = self.inflow
        if inflow.is_over:
            return False
        inflow.cancel()
        return True

    async def why(self) -> Why:
        """Say why the task waits, or what it does instead; see `Handle.why`.

        Raises:
            MisuseError: this is another event loop than the stream's.
            NodeError: it was asked inside a task, or in a fork of the program.
        """
        inflow, outcome = self.inflow, ""
        if inflow.is_cancelled:
            outcome = "it was cancelled"
        elif inflow.error is not None:
            outcome = f"it failed with {type(inflow.error).__name__}"
        elif inflow.is_over:
            outcome = "it gave its last item"
        why = await why_of(self, self._owner, inflow.loop, outcome)
        if inflow.is_held and (why.state == "running" or why.actor):
            from dataclasses import replace

            return replace(why, state="running", actor="", is_ahead=True)
        return why

    def _check_thread(self, what: str) -> None:
        check_thread(self.inflow.loop, f"{what} of {self!r}")

    def _refuse(self) -> NoReturn:
        raise MisuseError(
            f"this stream of {self.task_name} {self._ended}, and is iterated once; "
            f"call {self.task_name}.remote(...) again for another."
        )
