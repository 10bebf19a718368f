"""What `f.map(...)` gives: results one by one, while a bounded number of calls is out.

A result is *ahead* from its call until the loop takes it, so a slow loop holds back
what is read and what runs. The window keeps the calls that are ahead; it does not
know the `Results` that are the user's, so that dropping those stops the work. This
file imports asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

from aiogpu.api.chunks import CALLS, MOST, SHARE, Packing, check_chunk
from aiogpu.api.handle import Handle
from aiogpu.api.misuse import IteratedOnLoop
from aiogpu.api.options import LARGEST_COUNT
from aiogpu.api.window import Window
from aiogpu.errors import MisuseError, OptionError, TaskError

if TYPE_CHECKING:
    from aiogpu.api.mapper import TakesOne

R = TypeVar("R")

DEFAULT_LIMIT: Final = 256
"""Calls ahead where the user names no limit. Enough that every slot of a node with a
hundred cores has a task and as many wait, few enough to hold in memory; on two cores
calls that do nothing come no faster with four times as many."""

_THROUGH: Final = "have been iterated to their end"
_CLOSED: Final = "were closed"
_CANCELLED: Final = "ended when the task that awaited them was cancelled"


class Results(IteratedOnLoop, AsyncIterator[R]):
    """The results of `f.map(...)`, by `async for`; made by `RemoteFunction.map`.

    `async with f.map(...) as results:` stops what is still running at the end of its
    block. Without it that happens when the last reference to them goes, which in
    `async for r in f.map(...)` is when the loop is left.
    """

    def __init__(
        self,
        remote: TakesOne[Any, R],
        iterable: Iterable[Any] | AsyncIterable[Any],
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
    ) -> None:
        self._name = remote.__name__
        _check_returns(remote)
        self._ended: str | None = None
        self._values: Iterator[R] = iter(())
        self._held = 0
        self._error: Exception | None = None
        if limit is not None:
            _check_limit(limit)
        if not isinstance(ordered, bool):
            raise OptionError(f"ordered={ordered!r} must be True or False.")
        chunk = check_chunk(chunk, limit)
        self._is_chunked = chunk is not None
        packing = None
        if chunk is not None:
            packing = Packing(remote, chunk, (limit or MOST * SHARE) // SHARE)
        elif limit is None:
            limit = DEFAULT_LIMIT
        self._window: Window[R] = Window(
            remote.remote, iterable, limit, ordered, packing
        )
        self._total: int | None
        try:
            self._total = len(iterable)  # type: ignore[arg-type]
        except TypeError:
            self._total = None

    def __repr__(self) -> str:
        window = self._window
        most = f"{window.limit}" if window.limit else f"{CALLS} calls"
        state = self._ended or f"are {window.ahead} ahead, {most} at most"
        return f"<Results of {self._name}: {state}>"

    def _as_called(self) -> str:
        return f"{self._name}.map(...)"

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            iter(self)

    def __len__(self) -> int:
        """How many results there are in all, those that were taken included.

        Raises:
            TypeError: what is mapped over has no length.
        """
        if self._total is None:
            raise TypeError(
                f"what {self._name} is mapped over has no len(), so nobody knows how "
                f"many results will come."
            )
        return self._total

    def __bool__(self) -> bool:
        return True

    def __aiter__(self) -> Results[R]:
        if self._ended is not None:
            self._refuse()
        return self

    async def __anext__(self) -> R:
        for value in self._values:
            return value
        window = self._window
        self._check()
        try:
            while True:
                if self._is_chunked:
                    self._end_chunk()
                handle = window.take()
                if handle is None:
                    if window.is_through:
                        break
                    await window.news()
                elif not self._is_chunked:
                    return handle.result()
                else:
                    for value in self._begin_chunk(handle):
                        return value
        except BaseException as error:
            self._end_by(error)
            raise
        self._end(_THROUGH)
        raise StopAsyncIteration

    def _end_by(self, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):
            # It may be the garbage collector's, in the midst of anything.
            self._ended = _CANCELLED
            self._stop_soon()
        elif isinstance(error, StopAsyncIteration):
            self._end("ended with StopAsyncIteration")
            raise TaskError(
                f"{self._name} or what it is mapped over raised StopAsyncIteration; as "
                f"such it would end the loop as if all results had come.",
                "StopAsyncIteration",
            ) from error
        elif isinstance(error, asyncio.CancelledError):
            self._end(_CANCELLED)
        else:
            self._end(f"ended with {type(error).__name__}")

    def _check(self) -> None:
        """Raise what is to be, if there can be no next result."""
        if self._ended is not None:
            if self._ended in (_THROUGH, _CLOSED):
                raise StopAsyncIteration
            self._refuse()
        if self._window.waiter is not None:
            raise MisuseError(
                f"another asyncio task is waiting for the next result of {self._name}; "
                f"let one task iterate and hand its results on by a queue."
            )

    def _begin_chunk(self, handle: Handle[Any]) -> Iterator[R]:
        values, self._error = self._window.open(handle)
        self._held = len(values)
        self._values = iter(values)
        return self._values

    def _end_chunk(self) -> None:
        """All results of the last chunk were taken."""
        self._window.release(self._held)
        self._held = 0
        if self._error is not None:
            raise self._error

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
        self._values = iter(())
        self._held = 0
        self._error = None
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


def _check_returns(remote: Any) -> None:
    method = getattr(remote, "_method", None)
    returns = getattr(remote, "_returns", 0) or getattr(method, "returns", 0)
    if returns:
        raise MisuseError(
            f"{remote.__name__} has num_returns={returns}, and a map gives one result "
            f"for each item; say num_returns=1, and each is a tuple."
        )


def _check_limit(limit: object) -> int:
    if (
        isinstance(limit, bool)
        or not isinstance(limit, int)
        or not 1 <= limit <= LARGEST_COUNT
    ):
        raise OptionError(
            f"limit={limit!r} must be a whole number of calls, 1 or more, or None for "
            f"{DEFAULT_LIMIT}. The most is {LARGEST_COUNT:_}."
        )
    return limit
