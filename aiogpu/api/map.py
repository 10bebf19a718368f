"""What `f.map(...)` gives: results one by one, while a bounded number of calls is out.

A result is *ahead* from its call until the loop takes it, so a slow loop holds back
what is read and what runs. The window keeps the calls that are ahead; it does not
know the `Results` that are the user's, so that dropping those stops the work. This
file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, TypeVar

from aiogpu.api.handle import Handle
from aiogpu.errors import MisuseError, NoLoopError, OptionError, TaskError

R = TypeVar("R")

DEFAULT_LIMIT: Final = 256
"""Calls ahead where the user names no limit. Enough that every slot of a node with a
hundred cores has a task and as many wait, few enough to hold in memory; on two cores
calls that do nothing come no faster with four times as many."""

_NOTHING: Final = object()
_THROUGH: Final = "have been iterated to their end"
_CLOSED: Final = "were closed"
_CANCELLED: Final = "ended when the task that awaited them was cancelled"


class Results(AsyncIterator[R]):
    """The results of `f.map(...)`, by `async for`; made by `RemoteFunction.map`.

    `async with f.map(...) as results:` stops what is still running at the end of its
    block. Without it that happens when the last reference to them goes, which in
    `async for r in f.map(...)` is when the loop is left.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Any], Handle[R]],
        iterable: Iterable[Any] | AsyncIterable[Any],
        limit: int | None = None,
        ordered: bool = True,
    ) -> None:
        self._name = name
        self._ended: str | None = None
        limit = DEFAULT_LIMIT if limit is None else _check_limit(limit)
        if not isinstance(ordered, bool):
            raise OptionError(f"ordered={ordered!r} must be True or False.")
        self._window: _Window[R] = _Window(
            _running_loop(), start, iterable, limit, ordered
        )

    def __repr__(self) -> str:
        window = self._window
        state = self._ended or f"are {window.ahead} ahead, {window.limit} at most"
        return f"<Results of {self._name}: {state}>"

    def __aiter__(self) -> Results[R]:
        if self._ended is not None:
            self._refuse()
        return self

    async def __anext__(self) -> R:
        window = self._window
        if self._ended is not None:
            if self._ended in (_THROUGH, _CLOSED):
                raise StopAsyncIteration
            self._refuse()
        if window.waiter is not None:
            raise MisuseError(
                f"another asyncio task is waiting for the next result of {self._name}; "
                f"let one task iterate and hand its results on by a queue."
            )
        try:
            while True:
                handle = window.take()
                if handle is not None:
                    return handle.result()
                if window.is_through:
                    break
                await window.news()
        except GeneratorExit:
            # It may be the garbage collector's, in the midst of anything.
            self._ended = _CANCELLED
            self._stop_soon()
            raise
        except StopAsyncIteration as error:
            self._end("ended with StopAsyncIteration")
            raise TaskError(
                f"{self._name} or what it is mapped over raised StopAsyncIteration; as "
                f"such it would end the loop as if all results had come.",
                "StopAsyncIteration",
            ) from error
        except BaseException as error:
            self._end(
                _CANCELLED
                if isinstance(error, asyncio.CancelledError)
                else f"ended with {type(error).__name__}"
            )
            raise
        self._end(_THROUGH)
        raise StopAsyncIteration

    async def __aenter__(self) -> Results[R]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The window is missing where the arguments were refused.
        if getattr(self, "_window", None) is not None:
            self._stop_soon()

    async def aclose(self) -> None:
        """Stop what is still running, as `handle.cancel()` does; idempotent.

        Returns when an async iterable has left what it was awaiting. A loop over
        these results in another asyncio task ends.
        """
        self._end(_CLOSED)
        reader = self._window.reader
        if reader is not None and not reader.done():
            await asyncio.wait([reader])

    def _end(self, how: str) -> None:
        if self._ended is None:
            self._ended = how
        self._window.close()

    def _stop_soon(self) -> None:
        """Stop on the loop: who drops the last reference may be any thread."""
        window = self._window
        if not window.is_closed:
            # A loop that is closed, and its node with it, refuses.
            with suppress(RuntimeError):
                window.loop.call_soon_threadsafe(window.close)

    def _refuse(self) -> NoReturn:
        raise MisuseError(
            f"these results of {self._name} {self._ended}, and are iterated once; "
            f"call {self._name}.map(...) again for others."
        )


class _Window(Generic[R]):
    """The calls that are ahead of the loop, and what is read for more of them.

    Attributes:
        ahead: calls that were started and whose result was not taken.
        waiter: set when the asyncio task that waits shall look again.
        reader: reads an async iterable; a plain one is read as results are taken.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[Any], Handle[R]],
        iterable: Iterable[Any] | AsyncIterable[Any],
        limit: int,
        is_ordered: bool,
    ) -> None:
        self.loop = loop
        self.limit = limit
        self.ahead = 0
        self.is_closed = False
        self.waiter: asyncio.Future[None] | None = None
        self.reader: asyncio.Task[None] | None = None
        self._start = start
        self._is_ordered = is_ordered
        self._plain: Iterator[Any] | None = None
        self._async: AsyncIterable[Any] | None = None
        if isinstance(iterable, AsyncIterable):
            self._async = iterable
        else:
            self._plain = _iterator(iterable)
        self._error: BaseException | None = None
        self._room: asyncio.Future[None] | None = None
        # Whose turn it is: by input all of them, or those that have ended.
        self._queue: deque[Handle[R]] = deque()
        self._unended: dict[Handle[R], None] = {}

    @property
    def is_through(self) -> bool:
        """Whether no further result will come."""
        return not self.ahead and self._plain is None and self._async is None

    def take(self) -> Handle[R] | None:
        """Start what there is room for; gives a handle that has ended, if it may.

        Raises:
            BaseException: what the iterable or `.remote()` raised.
        """
        if self._plain is not None:
            self._read()
        elif self._async is not None and self.reader is None:
            self.reader = self.loop.create_task(self._read_on(self._async))
        if self._error is not None:
            raise self._error
        queue = self._queue
        if not queue or not queue[0].done():
            return None
        self.ahead -= 1
        if self._room is not None:
            _set(self._room)
        return queue.popleft()

    async def news(self) -> None:
        """Wait until `take` may give another answer."""
        self.waiter = self.loop.create_future()
        if self._is_ordered and self._queue:
            self._queue[0].add_done_callback(self._wake)
        try:
            await self.waiter
        finally:
            self.waiter = None

    def _wake(self, _: object = None) -> None:
        if self.waiter is not None:
            _set(self.waiter)

    def _read(self) -> None:
        assert self._plain is not None
        while self.ahead < self.limit:
            item = next(self._plain, _NOTHING)
            if item is _NOTHING:
                self._plain = None
                return
            self._submit(item)

    async def _read_on(self, iterable: AsyncIterable[Any]) -> None:
        """Read an async iterable while there is room, until the window closes."""
        try:
            async for item in iterable:
                if self.is_closed:
                    break  # it has caught its CancelledError and goes on
                self._submit(item)
                while self.ahead >= self.limit:
                    self._room = self.loop.create_future()
                    await self._room
        except BaseException as error:
            if self.is_closed:
                raise
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._async = None
            self._wake()

    def _submit(self, item: Any) -> None:
        handle = self._start(item)
        self.ahead += 1
        if not self._is_ordered:
            self._unended[handle] = None
            handle.add_done_callback(self._note_end)
        else:
            if not self._queue:
                self._wake()
            self._queue.append(handle)

    def _note_end(self, handle: Handle[R]) -> None:
        if not self.is_closed:
            del self._unended[handle]
            self._queue.append(handle)
            self._wake()

    def close(self) -> None:
        """Cancel what is ahead, the newest first: none starts in another's place."""
        if self.is_closed:
            return
        self.is_closed = True
        handles = [*self._queue, *self._unended]
        self._queue.clear()
        self._unended.clear()
        self.ahead = 0
        self._plain = self._async = self._error = None
        if self.reader is not None:
            self.reader.cancel()
        for handle in reversed(handles):
            # On one that has ended it only says that its error may go unheard.
            handle.cancel()
        self._wake()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _check_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise OptionError(
            f"limit={limit!r} must be a whole number of calls, 1 or more, or None for "
            f"{DEFAULT_LIMIT}."
        )
    return limit


def _running_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio._get_running_loop()
    if loop is None:
        raise NoLoopError(
            ".map() needs a running event loop, and there is none in this thread. "
            "Write `async for result in f.map(...)` inside an `async def` that runs by "
            "aiogpu.run(main())."
        )
    return loop


def _iterator(iterable: Iterable[Any]) -> Iterator[Any]:
    if hasattr(iterable, "__await__"):
        # A handle has an `__iter__` too, which is not meant for loops.
        raise MisuseError(
            f"map() was given {iterable!r}, whose value is still to come; write "
            f"`await` before it."
        )
    try:
        return iter(iterable)
    except TypeError as error:
        raise MisuseError(
            f"map() was given {iterable!r}, which is neither an iterable nor an async "
            f"iterable ({error})."
        ) from error
