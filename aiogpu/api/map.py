"""`f.map(...)`: results one by one, with a bounded number of calls in flight.

A call is *ahead* from its submission until the consumer takes its result, so a slow
consumer holds back both the input and the work. `MapWindow` keeps the calls that are
ahead. It does not refer to the user's `Results`, so dropping the `Results` stops the
work.

With `chunk="auto"` a call should take about `TARGET` seconds, so that the cost of the
call itself is negligible. The first call has one item; the measured time of an item
decides the size of later calls. That time includes pickling the item and unpickling its
result on this loop, so large items make small chunks. A chunk that takes much longer
than expected ends early, and its remaining items are submitted again.

Imported late, because it imports asyncio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Iterable, Iterator
from time import perf_counter
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
)

from aiogpu.api.options import check_flag, whole_number
from aiogpu.api.results.handle import Handle
from aiogpu.api.results.stream import IteratedOnce, LoopSource
from aiogpu.api.usage_errors import (
    Displayed,
    EnteredOnLoop,
    IteratedOnLoop,
    NotPassedOn,
    waited_for,
)
from aiogpu.errors import MisuseError, OptionError, TaskError
from aiogpu.serialization.exceptions import RAISED, ChunkOutcome, unpack_failure
from aiogpu.serialization.serializer import fix_item
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.notebook.progress import Bar

TARGET: Final = 0.004
"""Seconds that a call should take; the cost of a call is up to 0.1 ms."""


LONGEST: Final = 0.05
"""Seconds after which a call with an automatic size ends early."""


MOST: Final = 10_000
"""Most items in a call with an automatic size."""


CALLS: Final = 256
"""Most chunks ahead if the user gives no limit; see `DEFAULT_LIMIT`."""


SHARE: Final = 16
"""Fewest calls with an automatic size that the user's limit has room for."""


FIRST: Final = 1
"""Items in the first call with an automatic size."""


GROWTH: Final = 4
"""Most items of the next call, as a multiple of the items of the measured call."""


class Sizes:
    """Chooses the number of items of the next chunk.

    Attributes:
        size: the number of items.
    """

    def __init__(self, most: int) -> None:
        self.size = FIRST
        self._most = most
        self._each: float | None = None

    def note(self, count: int, seconds: float) -> None:
        """Note that `count` items took `seconds`."""
        each = seconds / count
        if self._each is None or each > self._each:
            # Slower items count in full at once, so that no chunk takes too long.
            self._each = each
        else:
            self._each += (each - self._each) / 4
        fitting = int(TARGET / max(self._each, TARGET / MOST))
        grown = max(self.size, GROWTH * count)
        self.size = max(1, min(fitting, grown, self._most))


Opened = tuple[list[Any], Exception | None, list[Handle[Any]]]
"""The results of a call, which include errors with `return_exceptions`; the error that
comes after them, or None; and the calls that were submitted for remaining items."""


class ItemCalls:
    """Submits each item as a call, and unpacks the result.

    Attributes:
        partial: items that wait until their call has as many as it takes.
    """

    def __init__(self, remote: Any, return_exceptions: bool) -> None:
        self.partial: list[Any] = []
        self._returns_exceptions = return_exceptions
        self._remote = remote

    @property
    def size(self) -> int:
        """The number of items of the next call."""
        return 1

    def add(self, item: Any) -> None:
        """Add an item to the next call."""
        self.partial.append(item)

    def send(self, items: tuple[Any, ...]) -> Handle[Any]:
        """Submit a call; raise the errors of `.remote()`."""
        return self._remote.remote(*items)  # type: ignore[no-any-return]

    def open(self, handle: Handle[Any]) -> Opened:
        """Unpack a call that has ended; raise its error if no item has a result."""
        try:
            return [handle.result()], None, []
        except Exception as failure:
            if not self._returns_exceptions:
                raise
            return [failure], None, []

    def clear(self) -> None:
        """Forget all items."""
        self.partial.clear()


class ChunkCalls(ItemCalls):
    """Submits items in chunks, and unpacks the results of chunks."""

    def __init__(
        self,
        remote: Any,
        chunk: int | Literal["auto"],
        most: int,
        return_exceptions: bool,
    ) -> None:
        super().__init__(remote, return_exceptions)
        self._fixed = None if chunk == "auto" else chunk
        self._sizes = Sizes(min(MOST, most))
        self._seconds = 0.0 if self._fixed else LONGEST
        self._sent: dict[Handle[Any], tuple[tuple[Any, ...], float]] = {}

    @property
    def size(self) -> int:
        """The number of items of the next chunk."""
        return self._fixed or self._sizes.size

    def add(self, item: Any) -> None:
        """Add an item to the next chunk, as the item is now."""
        self.partial.append(fix_item(self._remote.__name__, item))

    def send(self, items: tuple[Any, ...]) -> Handle[Any]:
        """Submit a chunk; raise the errors of `.remote()`."""
        start = perf_counter()
        handle: Handle[Any] = self._remote._remote_chunk((self._seconds, *items))
        self._sent[handle] = items, perf_counter() - start
        return handle

    def open(self, handle: Handle[Any]) -> Opened:
        """Unpack a chunk that has ended; raise its error if no item has a result."""
        items, seconds = self._sent.pop(handle, ((), 0.0))
        start = perf_counter()
        try:
            result = handle.result()
        except Exception as failure:
            if not self._returns_exceptions:
                raise
            return [failure] * (len(items) or 1), None, []
        if not items:
            return [result], None, []  # the retry of a single item
        outcome = ChunkOutcome(*result)
        seconds += outcome.seconds + perf_counter() - start
        done = len(outcome.values)
        self._sizes.note(done or 1, seconds)
        calls: list[Handle[Any]] = []
        values, rest = list(outcome.values), items[done:]
        if outcome.failure is not None:
            failed = Failed(*outcome.failure)
            error = unpack_failure(failed, self._remote.__name__)
            retried = self._remote._for_retry(error) if failed.kind == RAISED else None
            if retried is not None:
                calls.append(retried.remote(rest[0]))
            elif self._returns_exceptions:
                values.append(error)
            else:
                return values, error, calls
            rest = rest[1:]
        size = self.size
        calls += [self.send(rest[i : i + size]) for i in range(0, len(rest), size)]
        return values, None, calls

    def clear(self) -> None:
        """Forget all items."""
        super().clear()
        self._sent.clear()


def check_chunk(chunk: object, limit: int | None) -> int | Literal["auto"] | None:
    """Check the size of chunks; return None if each item is a call of its own.

    Raises:
        OptionError: the size is invalid, or exceeds the limit.
    """
    if chunk is None or chunk == "auto":
        return chunk
    allowed = 'a whole number of items, 1 or more, "auto", or None for 1'
    chunk = whole_number("chunk", chunk, 1, allowed)
    if limit is not None and limit < chunk:
        raise OptionError(
            f"limit={limit} has no room for a chunk of {chunk} items: it counts items, "
            f"not calls. For 16 calls at once write limit={16 * chunk}."
        )
    return chunk if chunk > 1 else None


R = TypeVar("R")


X_contra = TypeVar("X_contra", contravariant=True)


class TakesOne(Protocol[X_contra, R]):
    """A remote function or method that takes one argument."""

    @property
    def __name__(self) -> str:
        """The name for error messages."""

    def remote(self, argument: X_contra, /) -> Handle[R]:
        """Start the call."""

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        """Start a call of the function's `worker.chunk.Chunk`."""


SLICE: Final = 4096
"""Most items that are read for chunks in one iteration of the event loop."""


FILL_TIME: Final = 0.005
"""Seconds that the first item of a chunk waits for more from an async iterable."""


_NOTHING: Final = object()


class MapWindow(LoopSource, Generic[R]):
    """The calls that are ahead of the consumer, and the input for more calls.

    Attributes:
        ahead: number of items whose result was not taken.
        waiter: settled when the waiting asyncio task should call `take` again.
        reader: the task that reads an async iterable; `take` reads a plain iterable.
    """

    def __init__(
        self,
        calls: ItemCalls,
        iterable: Iterable[Any] | AsyncIterable[Any],
        limit: int | None,
        is_ordered: bool,
    ) -> None:
        loop = asyncio._get_running_loop()
        if loop is None:
            from aiogpu.api.session import no_loop

            raise no_loop(".map()")
        self.loop = loop
        self.limit = limit
        self.ahead = 0
        self.is_over = False
        self.waiter: asyncio.Future[None] | None = None
        self.reader: asyncio.Task[None] | None = None
        self._calls = calls
        self._is_ordered = is_ordered
        self._has_more = False
        self._filling: asyncio.TimerHandle | None = None
        self._plain: Iterator[Any] | None = None
        self._async: AsyncIterable[Any] | None = None
        if isinstance(iterable, AsyncIterable):
            self._async = iterable
        else:
            self._plain = _iterator(iterable)
        self._error: BaseException | None = None
        self._room: asyncio.Future[None] | None = None
        # If ordered, all calls in the order of the input; else the calls that ended.
        self._queue: deque[Handle[R]] = deque()
        self._unended: dict[Handle[R], None] = {}

    @property
    def is_through(self) -> bool:
        """True if there are no more results."""
        return not self.ahead and self._plain is None and self._async is None

    def take(self) -> Handle[R] | None:
        """Start calls while there is room; return the next handle that has ended.

        Raises:
            BaseException: the error of the iterable or of `.remote()`.
        """
        if self._plain is not None:
            self._read()
        elif self._async is not None and self.reader is None:
            self.reader = self.loop.create_task(self._read_async(self._async))
        if self._error is not None:
            raise self._error
        queue = self._queue
        if not queue or not queue[0].done():
            return None
        return queue.popleft()

    def release(self, count: int) -> None:
        """Note that `count` results were taken."""
        self.ahead -= count
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def open(self, handle: Handle[Any]) -> tuple[list[Any], Exception | None]:
        """Return the results of a call, and the error that comes after them or None.

        The results count as ahead until they are released.

        Raises:
            Exception: the error of the whole call.
        """
        values, error, calls = self._calls.open(handle)
        if self._is_ordered:
            self._queue.extendleft(reversed(calls))
        else:
            for call in calls:
                self._post(call)
        return values, error

    async def wait_for_change(self) -> None:
        """Wait until `take` may return a handle, or there are no more results."""
        self.waiter = self.loop.create_future()
        if self._has_more:
            self.loop.call_soon(self.notify)
        if self._is_ordered and self._queue:
            self._queue[0].add_done_callback(self.notify)
        try:
            await self.waiter
        finally:
            self.waiter = None

    @property
    def _has_room(self) -> bool:
        if self._calls.partial:
            return True  # checked when the first item of the chunk was read
        if self.limit is None:
            return len(self._queue) + len(self._unended) < CALLS
        return self.ahead + self._calls.size <= self.limit

    def _read(self) -> None:
        assert self._plain is not None
        self._has_more = False
        until = self.ahead + SLICE
        while self._has_room:
            item = next(self._plain, _NOTHING)
            if item is _NOTHING:
                self._plain = None
                self._flush()
                return
            self._submit(item)
            if self.ahead == until:
                self._has_more = True
                return

    async def _read_async(self, iterable: AsyncIterable[Any]) -> None:
        """Read an async iterable while there is room, until the window closes."""
        try:
            async for item in iterable:
                if self.is_over:
                    break  # the iterable caught its CancelledError and goes on
                self._submit(item)
                while not self._has_room:
                    self._room = self.loop.create_future()
                    await self._room
            self._flush()
        except BaseException as error:
            if self.is_over:
                raise
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            # A cancelled task refers to this frame, and so to the iterable: with the
            # window it would be a cycle, and the iterable would not end at once.
            self._async = self.reader = None
            self.notify()

    def _submit(self, item: Any) -> None:
        calls = self._calls
        calls.add(item)
        self.ahead += 1
        if len(calls.partial) >= calls.size or self.ahead == self.limit:
            self._flush()
        elif self._plain is None and self._filling is None:
            self._filling = self.loop.call_later(FILL_TIME, self._flush_late)

    def _flush(self) -> None:
        """Submit the items that wait for their chunk to fill."""
        if self._filling is not None:
            self._filling.cancel()
            self._filling = None
        calls = self._calls
        if calls.partial:
            items = tuple(calls.partial)
            calls.partial.clear()
            self._post(calls.send(items))

    def _flush_late(self) -> None:
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001 - `take` raises it
            self._error = error
            self.notify()

    def _post(self, handle: Handle[Any]) -> None:
        if not self._is_ordered:
            self._unended[handle] = None
            handle.add_done_callback(self._note_end)
        else:
            if not self._queue:
                self.notify()
            self._queue.append(handle)

    def _note_end(self, handle: Handle[R]) -> None:
        if not self.is_over:
            del self._unended[handle]
            self._queue.append(handle)
            self.notify()

    def cancel(self) -> None:
        """Cancel the calls ahead, newest first, so that no queued call starts."""
        if self.is_over:
            return
        self.is_over = True
        handles = [*self._queue, *self._unended]
        self._queue.clear()
        self._unended.clear()
        self.ahead = 0
        self._plain = self._async = self._error = None
        if self._filling is not None:
            self._filling.cancel()
        self._calls.clear()
        if self.reader is not None:
            self.reader.cancel()
        for handle in reversed(handles):
            # If the call has ended, this marks its error as retrieved.
            handle.cancel()
        self.notify()


def _iterator(iterable: Iterable[Any]) -> Iterator[Any]:
    if hasattr(iterable, "__await__"):
        # A handle has an `__iter__` too, but not for `for` loops.
        raise MisuseError(
            f"map() was given {iterable!r}, which must be awaited first; write "
            f"`f.map(await ...)`."
        )
    try:
        return iter(iterable)
    except TypeError as error:
        raise MisuseError(
            f"map() takes an iterable or an async iterable, not {iterable!r} ({error})."
        ) from error


DEFAULT_LIMIT: Final = 256
"""Calls ahead if the user gives no limit: enough to keep a node with a hundred cores
busy with as many tasks queued, and few enough to hold in memory. On two cores, a limit
four times as high does not make empty calls faster."""


class Results(Displayed, IteratedOnLoop, EnteredOnLoop, NotPassedOn, IteratedOnce[R]):
    """The results of `f.map(...)`, by `async for`; made by `RemoteFunction.map`.

    `async with f.map(...) as results:` cancels the remaining calls at the end of its
    block. Otherwise they are cancelled when the last reference to the results is
    dropped: in `async for r in f.map(...)` at the end of the loop.
    """

    _PASS_INSTEAD = "pass a list of the results"

    THROUGH = "have been iterated to their end"
    CLOSED = "were closed"
    CANCELLED = "ended when the task that awaited them was cancelled"

    def __init__(
        self,
        remote: TakesOne[Any, R],
        iterable: Iterable[Any] | AsyncIterable[Any],
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
        return_exceptions: bool = False,
    ) -> None:
        self._name = remote.__name__
        _check_returns(remote)
        self._values: deque[R] = deque()
        self._unreleased = 0
        self._error: Exception | None = None
        if limit is not None:
            allowed = f"a whole number of calls, 1 or more, or None for {DEFAULT_LIMIT}"
            whole_number("limit", limit, 1, allowed)
        check_flag("ordered", ordered)
        check_flag("return_exceptions", return_exceptions)
        chunk = check_chunk(chunk, limit)
        if chunk is None:
            calls = ItemCalls(remote, return_exceptions)
            limit = limit or DEFAULT_LIMIT
        else:
            most = (limit or MOST * SHARE) // SHARE
            calls = ChunkCalls(remote, chunk, most, return_exceptions)
        self._window: MapWindow[R] = MapWindow(calls, iterable, limit, ordered)
        self._source = self._window
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

    async def _html(self) -> str:
        from aiogpu.observe.html import facts

        window, total = self._window, self._total
        limit = window.limit or f"{CALLS} calls"
        return facts(
            repr(self),
            [
                ("state", self._ended or "open"),
                ("items", "" if total is None else str(total)),
                ("ahead", f"{window.ahead} of at most {limit}"),
            ],
        )

    def _as_called(self) -> str:
        return f"{self._name}.map(...)"

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            iter(self)

    def __len__(self) -> int:
        """Return the number of all results, including those already taken.

        Raises:
            TypeError: the iterable has no length.
        """
        if self._total is None:
            raise TypeError(
                f"the iterable of {self._name}.map() has no len(), so the number of "
                f"results is unknown."
            )
        return self._total

    def __bool__(self) -> bool:
        return True

    async def __anext__(self) -> R:
        window = self._window
        if not self._values:
            self._check()
            try:
                while not self._values:
                    if self._error is not None:
                        raise self._error
                    handle = window.take()
                    if handle is not None:
                        values, self._error = window.open(handle)
                        self._unreleased = len(values)
                        self._values.extend(values)
                        del values  # a result is kept until it is taken
                    elif window.is_through:
                        break
                    else:
                        await window.wait_for_change()
            except BaseException as error:
                self._end_by(error)
                raise
        if not self._values:
            self._end(self.THROUGH)
            raise StopAsyncIteration
        value = self._values.popleft()
        if not self._values:
            window.release(self._unreleased)
        return value

    def _end_by(self, error: BaseException) -> None:
        super()._end_by(error)
        if isinstance(error, StopAsyncIteration):
            raise TaskError(
                f"{self._name} or its iterable raised StopAsyncIteration, which would "
                f"end the loop as if all results had come.",
                "StopAsyncIteration",
            ) from error

    def _check(self) -> None:
        """Raise if there can be no next result."""
        if self._ended is not None:
            if self._ended in (self.THROUGH, self.CLOSED):
                raise StopAsyncIteration
            self._refuse()
        if self._window.waiter is not None:
            raise waited_for(f"result of {self._name}")

    async def aclose(self) -> None:
        """Cancel the remaining calls; idempotent.

        Returns when the reader of an async iterable has ended. A loop over these
        results in another asyncio task ends.
        """
        self._end(self.CLOSED)
        reader = self._window.reader
        if reader is not None:
            await asyncio.wait([reader])

    def _end(self, how: str) -> None:
        super()._end(how)
        self._values.clear()
        self._error = None

    def _refuse(self) -> NoReturn:
        raise MisuseError(
            f"these results of {self._name} {self._ended}, and can be iterated only "
            f"once; call {self._name}.map(...) again."
        )


class ResultsWithProgress(Results[R]):
    """The same with a progress bar, from the first iteration to its end."""

    _bar: Bar | None = None
    _is_shown = False

    async def __anext__(self) -> R:
        if not self._is_shown and self._ended is None:
            from aiogpu.notebook.progress import new_bar

            self._is_shown = True
            self._bar = new_bar(self._name, self._total)
        result = await super().__anext__()
        if self._bar is not None:
            self._bar.advance()
        return result

    def _end(self, how: str) -> None:
        super()._end(how)
        self._close_bar()

    def _stop_soon(self) -> None:
        super()._stop_soon()
        self._close_bar()

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


def _check_returns(remote: Any) -> None:
    method = getattr(remote, "_method", None)
    returns = getattr(remote, "_returns", 0) or getattr(method, "returns", 0)
    if returns:
        raise MisuseError(
            f"{remote.__name__} has num_returns={returns}, but map() has one result "
            f"for each item; write num_returns=1 to get tuples."
        )
