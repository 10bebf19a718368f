"""Streams on an event loop, and the base class of iterators over results.

An iterator over results belongs to one asyncio task and is iterated once. Its source
does not refer to it, so dropping the iterator stops the work. Imported late, because it
imports asyncio.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Self, TypeVar

from aiogpu.api.results.base import StreamOwner
from aiogpu.api.results.handle import (
    check_loop,
    check_thread,
    html_with_why,
    why_of,
)
from aiogpu.api.results.items import ItemBuffer, StreamBase
from aiogpu.api.usage_errors import Displayed, EnteredOnLoop, waited_for
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
        waiter: settled to wake the waiting asyncio task; None if no task waits.
        is_over: True if no more items will come.
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
        """Wake the waiting task; call this only on the loop."""
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
        """Raise `MisuseError` with the reason why the iterator has ended."""

    def __aiter__(self) -> Self:
        if self._ended is not None:
            self._refuse()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Stop the work."""

    def __del__(self) -> None:
        # There is no source if the constructor refused the arguments.
        if hasattr(self, "_source"):
            self._stop_soon()

    def _end(self, how: str) -> None:
        if self._ended is None:
            self._ended = how
        self._source.cancel()

    def _end_by(self, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):
            # The garbage collector may raise GeneratorExit in the middle of any code.
            self._ended = self.CANCELLED
            self._stop_soon()
        elif isinstance(error, asyncio.CancelledError):
            self._end(self.CANCELLED)
        else:
            self._end(f"ended with {type(error).__name__}")

    def _stop_soon(self) -> None:
        """Stop the work on the loop; any thread may drop the last reference."""
        source = self._source
        if not source.is_over:
            with suppress(RuntimeError):  # the loop is closed, and so is its node
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
        """Wake the consumer if it waits."""
        if self.waiter is None:
            return
        if asyncio._get_running_loop() is self.loop:
            self.notify()
        else:
            with suppress(RuntimeError):  # the loop is closed: there is no consumer
                self.loop.call_soon_threadsafe(self.notify)


class Stream(Displayed, StreamBase, EnteredOnLoop, IteratedOnce[T]):
    """The items of a generator that runs as a task, by `async for`.

    `async with f.remote() as stream:` stops the generator at the end of its block.
    Otherwise the generator stops when the last reference to the stream is dropped: in
    `async for item in f.remote()` at the end of the loop.
    """

    # A plain `for` gets Python's own TypeError. An `__iter__` that raises a better one
    # would make the stream an `Iterable`, which httpx, for one, would try to send.

    LOOP = "async for"

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
        self.items: LoopItemBuffer = LoopItemBuffer(task_name, owner, size, loop)
        self._source = self.items
        self._waits = waits

    def __repr__(self) -> str:
        items = self.items
        state = self._ended or (
            f"{len(items.buffer)} items to take, {items.window.taken} taken"
        )
        return f"<Stream of {items.task_name} {items.task_id}: {state}>"

    async def _html(self) -> str:
        return await html_with_why(self)

    def _as_called(self) -> str:
        return f"{self.task_name}.remote(...)"

    def __await__(self) -> Generator[Any, None, NoReturn]:
        call = self._as_called()
        raise MisuseError(
            f"{self.task_name} is a generator, and {call} is a stream of items, which "
            f"cannot be awaited: write `async for item in {call}`."
        )

    async def __anext__(self) -> T:
        items = self.items
        if self._ended is not None:
            if self._ended != self.CANCELLED:
                raise StopAsyncIteration
            self._refuse()
        if _get_running_loop() is not items.loop:
            self._check_thread("The next item")
        if items.waiter is not None:
            raise waited_for(f"item of {self.task_name}")
        try:
            # If two items arrive during one wait, the second one's wake-up is spurious.
            while not items.buffer and not items.is_over:
                await self._wait()
            if items.buffer:
                return items.take()  # type: ignore[no-any-return]
            items.raise_error()
            if items.is_cancelled and self._ended is None:
                raise asyncio.CancelledError(
                    f"the stream of {self.task_name} was cancelled"
                )
        except BaseException as error:
            self._end_by(error)
            raise
        self._end(self.THROUGH)
        raise StopAsyncIteration

    async def _wait(self) -> None:
        """Wait until there is an item, or no item will come."""
        items, waits = self.items, self._waits
        items.waiter = items.loop.create_future()
        if waits is not None:
            waits.begin_wait(items.task_id)
        try:
            if not items.buffer and not items.is_over:
                await items.waiter
        finally:
            items.waiter = None
            if waits is not None:
                waits.end_wait(items.task_id)

    def reports(self) -> Reports:
        """Return an async iterator over the generator's reports, until it ends.

        See `aiogpu.report`. The generator may wait for its items to be taken, so read
        the reports and the items in different asyncio tasks.
        """
        from aiogpu.api.results.reports import Reports

        return Reports(self, self.items.report_buffer)

    def done(self) -> bool:
        """Return whether no further item or report will come."""
        return self.items.is_over

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that the stream belongs to."""
        return self.items.loop

    async def wait_for_report(self, waiter: asyncio.Future[None]) -> None:
        """Wait until `waiter` is set, by a report or by the generator's end."""
        check_loop(self.get_loop(), f"the next report of {self.task_name}")
        waits, task = self._waits, self.task_id
        if waits is not None:
            waits.begin_wait(task)
        try:
            await waiter
        finally:
            if waits is not None:
                waits.end_wait(task)

    async def aclose(self) -> None:
        """Stop the generator and drop the remaining items; idempotent.

        Returns before the generator's code has stopped; its resources are free once it
        has. A loop over this stream in another asyncio task ends.

        Raises:
            NoLoopError: called in a thread other than the event loop's.
        """
        self._check_thread("aclose()")
        self._end(self.CLOSED)

    def cancel(self) -> bool:
        """Stop the generator like `aclose`, and raise `CancelledError` in its consumer.

        Returns False if the generator had already ended.

        Raises:
            NoLoopError: called in a thread other than the event loop's.
        """
        self._check_thread("cancel()")
        return super().cancel()

    async def why(self) -> Why:
        """Return why the task waits, or its state; see `Handle.why`.

        Raises:
            MisuseError: called on an event loop other than the stream's.
            NoLoopError: called in a thread other than the event loop's.
            NodeError: called inside a task, or in a fork of the program.
        """
        items, outcome = self.items, ""
        if items.is_cancelled:
            outcome = "it was cancelled"
        elif items.error is not None:
            outcome = f"it failed with {type(items.error).__name__}"
        elif items.is_over:
            outcome = "it gave its last item"
        why = await why_of(self, self._owner, items.loop, outcome)
        if items.is_held and (why.state == "running" or why.actor):
            from dataclasses import replace

            return replace(why, state="running", actor="", is_ahead=True)
        return why

    def _check_thread(self, what: str) -> None:
        check_thread(self.items.loop, f"{what} of {self!r}")

    def _refuse(self) -> NoReturn:
        raise MisuseError(
            f"this stream of {self.task_name} {self._ended}, and can be iterated only "
            f"once; call {self.task_name}.remote(...) again."
        )
