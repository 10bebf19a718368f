"""Reports of running tasks: `aiogpu.report`, and the iterators that read them.

Neither side waits: a report is sent if there is room for it, and the newest `KEPT`
unread reports of a task are kept. A report says how many reports before it are missing;
the last report always arrives. Light to import: workers load this module without
asyncio.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, Self

from aiogpu.api.usage_errors import IteratedOnLoop, waited_for
from aiogpu.client.current import current, inline_client
from aiogpu.errors import MisuseError, SerializationError
from aiogpu.serialization.serializer import dump_result, load_result

if TYPE_CHECKING:
    import asyncio

KEPT: Final = 1000
"""Most unread reports of one task that are kept."""

LONGEST: Final = 16 << 10
"""Most bytes of a pickled report."""

DEEPEST: Final = 16
"""Deepest nesting of lists and dicts in a report."""

_SCALARS: Final = frozenset({NoneType, bool, int, float, str, bytes})


class Report(dict[str, Any]):
    """The values of one `aiogpu.report(...)`, by name.

    Attributes:
        dropped: number of reports immediately before this one that were dropped,
            because they were not read in time.
    """

    __slots__ = ("dropped",)

    def __init__(self, values: dict[str, Any], dropped: int = 0) -> None:
        super().__init__(values)
        self.dropped = dropped


def report(**values: Any) -> None:
    """Report the progress of the running task, for readers of `handle.reports()`.

    Delays the task by at most 10 ms. The newest 1000 unread reports of a task are kept,
    and each report says how many before it were dropped. The last report always
    arrives. A retry of a task reports again. The caller of `.remote()` gets the
    reports, which may be another task.

    Args:
        **values: numbers, text, None, and lists, tuples and dicts of these; at most 16
            KiB in all. Arrays of one element, of numpy or PyTorch, count as numbers.
            Tuples become lists.

    Raises:
        MisuseError: called outside of a task or method, or without values. An actor
            with `max_concurrency` or `async def` methods cannot report from threads
            that it makes by `threading`; tasks on a Ray cluster cannot report.
        SerializationError: a value has another type, or the report is too large.

    Example:
        `aiogpu.report(step=step, loss=loss.item())`
    """
    client = inline_client.get() or current.client
    if client is None:
        raise MisuseError(
            "aiogpu.report() was called outside of a task. Tasks call it; the caller "
            "of .remote() reads the reports by `handle.reports()`."
        )
    if not values:
        raise MisuseError(
            "aiogpu.report() needs at least one value, such as aiogpu.report(step=1)."
        )
    plain = {name: _plain(value, name, 0) for name, value in values.items()}
    payload = dump_result(plain)
    assert isinstance(payload, bytes), payload
    if len(payload) > LONGEST:
        raise SerializationError(
            f"aiogpu.report() was given {len(payload)} bytes; the maximum is "
            f"{LONGEST}. Return or yield large values instead."
        )
    client.report(payload)


def _plain(value: Any, where: str, depth: int) -> Any:
    """Convert a value to plain types that any process can unpickle."""
    if type(value) in _SCALARS:
        return value
    if depth < DEEPEST:
        if isinstance(value, list | tuple):
            return [
                _plain(element, f"{where}[{index}]", depth + 1)
                for index, element in enumerate(value)
            ]
        if isinstance(value, dict):
            return {
                _plain(key, f"a key of {where}", DEEPEST): _plain(
                    element, f"{where}[{key!r}]", depth + 1
                )
                for key, element in value.items()
            }
    item = getattr(value, "item", None)
    if item is not None:
        try:
            scalar = item()
        except (TypeError, ValueError, RuntimeError):
            scalar = value  # an array of several elements
        if type(scalar) in _SCALARS:
            return scalar
    raise SerializationError(
        f"aiogpu.report() was given a {type(value).__qualname__} as {where}: a report "
        f"may contain numbers, text, None, and lists and dicts of these, nested at "
        f"most {DEEPEST} deep."
    )


class ReportBuffer:
    """The unread reports of one task.

    Attributes:
        kept: for each report, the number of reports missing before it and its pickled
            values; oldest first.
        waiter: settled to wake the reading asyncio task; None if no task waits.
    """

    __slots__ = ("_dropped", "kept", "waiter")

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self._dropped = 0

    def receive(self, lost: int, payload: bytes) -> None:
        """Add a report; `lost` reports before it are missing."""
        if len(self.kept) >= KEPT:
            self._dropped += self.kept.popleft()[0] + 1
        self.kept.append((lost, payload))
        self.wake()

    def take(self) -> Report:
        """Take the oldest report."""
        lost, payload = self.kept.popleft()
        dropped, self._dropped = self._dropped, 0
        return Report(load_result(payload), dropped + lost)

    def wake(self) -> None:
        """Wake the reader if it waits; callable from any thread."""
        waiter = self.waiter
        if waiter is None:
            return
        loop = waiter.get_loop()
        if sys.modules["asyncio"]._get_running_loop() is loop:
            _set(waiter)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(_set, waiter)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Source(Protocol):
    """The handle or stream of a task that reports."""

    @property
    def task_name(self) -> str:
        """Name of the task."""

    def done(self) -> bool:
        """Return whether no more reports will come."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that the handle or stream belongs to."""

    async def wait_for_report(self, waiter: asyncio.Future[None]) -> None:
        """Wait until `waiter` is set, by a report or by the task's end."""


class Reports(IteratedOnLoop, AsyncIterator[Report]):
    """Async iterator over the reports of a task, until the task ends.

    Each report is read once, by one asyncio task at a time. Leaving the loop stops
    nothing. Reading does not count as waiting for the task.
    """

    def __init__(self, source: Source, buffer: ReportBuffer) -> None:
        self._source = source
        self._buffer = buffer

    def __repr__(self) -> str:
        name, kept = self._source.task_name, len(self._buffer.kept)
        return f"<Reports of {name}: {kept} to read>"

    def _as_called(self) -> str:
        return "handle.reports()"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Report:
        buffer, source = self._buffer, self._source
        while not buffer.kept:
            if source.done():
                raise StopAsyncIteration
            if buffer.waiter is not None:
                raise waited_for(f"report of {source.task_name}")
            waiter = buffer.waiter = source.get_loop().create_future()
            try:
                await source.wait_for_report(waiter)
            finally:
                buffer.waiter = None
        return buffer.take()

    async def aclose(self) -> None:
        """Do nothing, as the task goes on; exists for `contextlib.aclosing`."""


def refuse_others(name: str) -> NoReturn:
    """Refuse to read the reports of a task that another program or task started.

    Raises:
        MisuseError: always.
    """
    raise MisuseError(
        f"the reports of {name} go to the program or task that called .remote(), and "
        f"this handle was received from there; read the reports there."
    )
