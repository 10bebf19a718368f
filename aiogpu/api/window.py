"""What is ahead of a loop over `f.map(...)`: calls, and what is read for more of them.

It does not know the `Results` that are the user's, so that dropping those stops the
work. This file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

from aiogpu.api.chunks import CALLS, Packing
from aiogpu.api.handle import Handle
from aiogpu.errors import MisuseError, NoLoopError

R = TypeVar("R")

SLICE: Final = 4096
"""Items that are read in one turn of the loop, where they are sent in chunks."""
FILL_TIME: Final = 0.005
"""Seconds that the first item of a chunk waits for an async iterable's others."""

_NOTHING: Final = object()


class Window(Generic[R]):
    """The calls that are ahead of the loop, and what is read for more of them.

    Attributes:
        ahead: calls that were started and whose result was not taken.
        waiter: set when the asyncio task that waits shall look again.
        reader: reads an async iterable; a plain one is read as results are taken.
    """

    def __init__(
        self,
        start: Callable[[Any], Handle[R]],
        iterable: Iterable[Any] | AsyncIterable[Any],
        limit: int | None,
        is_ordered: bool,
        packing: Packing | None = None,
    ) -> None:
        self.loop = _running_loop()
        self.limit = limit
        self.ahead = 0
        self.is_closed = False
        self.waiter: asyncio.Future[None] | None = None
        self.reader: asyncio.Task[None] | None = None
        self._start = start
        self._is_ordered = is_ordered
        self._packing = packing
        self._is_behind = False
        self._filling: asyncio.TimerHandle | None = None
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
        if self._packing is None:
            self.release(1)
        return queue.popleft()

    def release(self, count: int) -> None:
        """So many results were taken."""
        self.ahead -= count
        if self._room is not None:
            _set(self._room)

    def open(self, handle: Handle[Any]) -> tuple[list[Any], Exception | None]:
        """The results of a chunk that was taken, and the error that comes after them.

        They count as ahead until they are released.

        Raises:
            Exception: what the whole chunk has failed with.
        """
        assert self._packing is not None
        opened = self._packing.open(handle)
        calls = [] if opened.again is None else [opened.again]
        rest, size = opened.rest, self._packing.size
        calls += [
            self._packing.send(rest[first : first + size])
            for first in range(0, len(rest), size)
        ]
        if self._is_ordered:
            self._queue.extendleft(reversed(calls))
        else:
            for call in calls:
                self._post(call)
        return opened.values, opened.error

    async def news(self) -> None:
        """Wait until `take` may give another answer."""
        self.waiter = self.loop.create_future()
        if self._is_behind:
            self.loop.call_soon(self._wake)
        if self._is_ordered and self._queue:
            self._queue[0].add_done_callback(self._wake)
        try:
            await self.waiter
        finally:
            self.waiter = None

    def _wake(self, _: object = None) -> None:
        if self.waiter is not None:
            _set(self.waiter)

    @property
    def _has_room(self) -> bool:
        packing = self._packing
        if packing is None:
            return self.ahead < self.limit  # type: ignore[operator]
        if packing.partial:
            return True  # it was there when the first of these was read
        if self.limit is None:
            return len(self._queue) + len(self._unended) < CALLS
        return self.ahead + packing.size <= self.limit

    def _read(self) -> None:
        assert self._plain is not None
        self._is_behind = False
        until = None if self._packing is None else self.ahead + SLICE
        while self._has_room:
            item = next(self._plain, _NOTHING)
            if item is _NOTHING:
                self._plain = None
                self._flush()
                return
            self._submit(item)
            if self.ahead == until:
                self._is_behind = True
                return

    async def _read_on(self, iterable: AsyncIterable[Any]) -> None:
        """Read an async iterable while there is room, until the window closes."""
        try:
            async for item in iterable:
                if self.is_closed:
                    break  # it has caught its CancelledError and goes on
                self._submit(item)
                while not self._has_room:
                    self._room = self.loop.create_future()
                    await self._room
            self._flush()
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
        packing = self._packing
        if packing is None:
            handle = self._start(item)
            self.ahead += 1
            self._post(handle)
            return
        self.ahead += 1
        packing.partial.append(item)
        if len(packing.partial) >= packing.size or self.ahead == self.limit:
            self._flush()
        elif self._plain is None and self._filling is None:
            self._filling = self.loop.call_later(FILL_TIME, self._flush_late)

    def _flush(self) -> None:
        """Send the items that wait for others."""
        if self._filling is not None:
            self._filling.cancel()
            self._filling = None
        packing = self._packing
        if packing is not None and packing.partial:
            items = tuple(packing.partial)
            packing.partial.clear()
            self._post(packing.send(items))

    def _flush_late(self) -> None:
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001 - whoever takes results raises it
            self._error = error
            self._wake()

    def _post(self, handle: Handle[Any]) -> None:
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
        if self._filling is not None:
            self._filling.cancel()
        if self._packing is not None:
            self._packing.clear()
        if self.reader is not None:
            self.reader.cancel()
        for handle in reversed(handles):
            # On one that has ended it only says that its error may go unheard.
            handle.cancel()
        self._wake()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


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


def _running_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio._get_running_loop()
    if loop is None:
        raise NoLoopError(
            ".map() needs a running event loop, and there is none in this thread. "
            "Write `async for result in f.map(...)` inside an `async def` that runs by "
            "aiogpu.run(main())."
        )
    return loop
