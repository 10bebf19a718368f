"""What `.remote()` of a generator gives on an event loop: its items as they come.

This file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

from aiogpu.api.blocking import ItemBuffer, StreamBase
from aiogpu.api.handle import Owner, check_thread
from aiogpu.api.usage_errors import EnteredOnLoop
from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.client.interface import Waits
    from aiogpu.observe.why import Why

T = TypeVar("T")

_get_running_loop: Final = asyncio._get_running_loop
_THROUGH: Final = "was iterated to its end"
_CLOSED: Final = "was closed"
_CANCELLED: Final = "was cancelled"


class StreamOwner(Owner, Protocol):
    """Who has started the task and can be asked about it: a session."""

    def demand(self, task: int, limit: int) -> None:
        """Let its generator yield so many items in all."""
        ...


class LoopInflow(ItemBuffer):
    """The items of one stream on their way to an event loop.

    Attributes:
        loop: that loop.
        waiter: set when the asyncio task that waits shall look again.
    """

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
        """Whoever waits shall look again."""
        if self.waiter is None:
            return
        if asyncio._get_running_loop() is self.loop:
            self._set()
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Stream(StreamBase, EnteredOnLoop, AsyncIterator[T]):
    """The items of a generator that runs as a task, by `async for`.

    `async with f.remote() as stream:` stops the generator at the end of its block.
    Without it that happens when the last reference goes, which in `async for item in
    f.remote()` is when the loop is left.

    A plain `for` over it gets Python's own words: with an `__iter__` that raises better
    ones it would be an `Iterable`, and httpx, for one, would send it as such.
    """

    def __init__(
        self,
        task_name: str,
        owner: StreamOwner,
        size: int,
        loop: asyncio.AbstractEventLoop,
        waits: Waits | None = None,
    ) -> None:
        self._owner = owner
        self._inflow: LoopInflow = LoopInflow(task_name, owner, size, loop)
        self._waits = waits
        self._ended: str | None = None

    @property
    def inflow(self) -> LoopInflow:
        """Who receives what comes; for engines."""
        return self._inflow

    def __repr__(self) -> str:
        inflow = self._inflow
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

    def __aiter__(self) -> Stream[T]:
        if self._ended is not None:
            self._refuse()
        return self

    async def __anext__(self) -> T:
        inflow = self._inflow
        if self._ended is not None:
            if self._ended != _CANCELLED:
                raise StopAsyncIteration
            self._refuse()
        if _get_running_loop() is not inflow.loop:
            self._check_thread("The next item")
        if inflow.waiter is not None:
            raise MisuseError(
                f"another asyncio task is waiting for the next item of "
                f"{self.task_name}; let one task iterate and hand its items on by a "
                f"queue."
            )
        try:
            # Of two items that came for one wait the second wakes the next in vain.
            while not inflow.buffer and not inflow.is_over:
                await self._news()
            if inflow.buffer:
                return inflow.take()  # type: ignore[no-any-return]
            inflow.raise_error()
            if inflow.is_cancelled and self._ended is None:
                raise asyncio.CancelledError(
                    f"the stream of {self.task_name} was cancelled"
                )
        except GeneratorExit:
            # It may be the garbage collector's, in the midst of anything.
            self._ended = _CANCELLED
            self._stop_soon()
            raise
        except BaseException as error:
            self._end(
                _CANCELLED
                if isinstance(error, asyncio.CancelledError)
                else f"ended with {type(error).__name__}"
            )
            raise
        self._end(_THROUGH)
        raise StopAsyncIteration

    async def _news(self) -> None:
        """Wait until an item is there, or none will come."""
        inflow, waits = self._inflow, self._waits
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

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._inflow.is_over:
            self._stop_soon()

    async def aclose(self) -> None:
        """Stop the generator and drop the items that were not taken; idempotent.

        It does not wait until the generator's code has stopped; its resources are
        free when it has. A loop over this stream in another asyncio task ends.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        self._check_thread("aclose()")
        self._end(_CLOSED)

    def cancel(self) -> bool:
        """Stop the generator as `aclose` does, with `CancelledError` for who waits.

        False if it had ended before.

        Raises:
            NoLoopError: this is another thread than the event loop's.
        """
        self._check_thread("cancel()")
        inflow = self._inflow
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
        inflow = self._inflow
        if inflow.is_over:
            return self._why_ended()
        if inflow.loop is not asyncio.get_running_loop():
            raise MisuseError(
                f"the stream of {self.task_name} belongs to another event loop; ask "
                f"it for why() on the loop where .remote() was called."
            )
        why = await self._owner.why(self.task_name, self.task_id)
        if inflow.is_held and why.state == "running":
            from dataclasses import replace

            return replace(why, is_ahead=True)
        return why

    def _check_thread(self, what: str) -> None:
        check_thread(self._inflow.loop, f"{what} of {self!r}")

    def _why_ended(self) -> Why:
        from aiogpu.observe.why import Why

        inflow = self._inflow
        if inflow.is_cancelled:
            outcome = "it was cancelled"
        elif inflow.error is not None:
            outcome = f"it failed with {type(inflow.error).__name__}"
        else:
            outcome = "it gave its last item"
        return Why(self.task_name, self.task_id, "ended", outcome=outcome)

    def _end(self, how: str) -> None:
        if self._ended is None:
            self._ended = how
        self._inflow.cancel()

    def _stop_soon(self) -> None:
        """Stop on the loop: who drops the last reference may be any thread."""
        inflow = self._inflow
        if not inflow.is_over:
            # A loop that is closed, and its node with it, refuses.
            with suppress(RuntimeError):
                inflow.loop.call_soon_threadsafe(inflow.cancel)

    def _refuse(self) -> NoReturn:
        raise MisuseError(
            f"this stream of {self.task_name} {self._ended}, and is iterated once; "
            f"call {self.task_name}.remote(...) again for another."
        )
