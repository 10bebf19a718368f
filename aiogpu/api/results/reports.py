"""Reports of running tasks: `aiogpu.report`, and the iterators that read them.

Nobody waits for anybody: a report is sent if there is room for it, and of one task the
newest `KEPT` that nobody has read are kept. A report says how many are missing before
it; the last one always comes. Light to import: workers load this module, and asyncio
costs them too much.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, Self

from aiogpu.api.usage_errors import IteratedOnLoop
from aiogpu.client.current import current, inline_report
from aiogpu.errors import MisuseError, SerializationError
from aiogpu.serialization.serializer import dump_result, load_result

if TYPE_CHECKING:
    import asyncio

KEPT: Final = 1000
"""Reports of one task that are kept until they are read."""

LONGEST: Final = 16 << 10
"""Bytes that one report may have when pickled."""

DEEPEST: Final = 16
"""Lists and dicts within each other in a report, at most."""

_SCALARS: Final = frozenset({NoneType, bool, int, float, str, bytes})


class Report(dict[str, Any]):
    """What a task has said by one `aiogpu.report(...)`: the values by name.

    Attributes:
        dropped: how many reports of the task, right before this one, are missing: they
            were not read in time.
    """

    __slots__ = ("dropped",)

    def __init__(self, values: dict[str, Any], dropped: int = 0) -> None:
        super().__init__(values)
        self.dropped = dropped


def report(**values: Any) -> None:
    """Report how far the running task has come; `handle.reports()` gives the report.

    It holds the task up for 10 ms at most. Of one task the newest 1000 reports that
    were not read are kept, and a report says how many before it are missing. The last
    one always comes. A task that is retried reports anew. Reports of a task that was
    started by another task go to that other task.

    Args:
        **values: scalars, text, and lists, tuples and dicts of these. Arrays of one
            element, of numpy or PyTorch, count as scalars; tuples become lists. 16 KiB
            in all.

    Raises:
        MisuseError: this is no code of a task or method, or nothing was given. An actor
            with `max_concurrency` or `async def` methods cannot report from threads
            that it makes by `threading`; no task can on a Ray cluster.
        SerializationError: a value is something else, or too much was given.

    Example:
        `aiogpu.report(step=step, loss=loss.item())`
    """
    client, send = current.client, inline_report.get()
    if send is None and client is not None:
        send = client.report
    if send is None:
        raise MisuseError(
            "aiogpu.report() was called outside of a task: whoever has called "
            ".remote() reads the reports of that task, by `handle.reports()`."
        )
    if not values:
        raise MisuseError("aiogpu.report() was given nothing: name what you report.")
    plain = {name: _plain(value, name, 0) for name, value in values.items()}
    payload = dump_result(plain)
    assert isinstance(payload, bytes), payload
    if len(payload) > LONGEST:
        raise SerializationError(
            f"aiogpu.report() was given {len(payload)} bytes, and carries {LONGEST}: "
            f"report figures, and return or yield what is large."
        )
    send(payload)


def _plain(value: Any, where: str, depth: int) -> Any:
    """Return a value as one that any process can unpickle."""
    if type(value) in _SCALARS:
        return value
    if depth < DEEPEST:
        if isinstance(value, list | tuple):
            return [
                _plain(one, f"{where}[{place}]", depth + 1)
                for place, one in enumerate(value)
            ]
        if isinstance(value, dict):
            return {
                _plain(key, f"a key of {where}", DEEPEST): _plain(
                    one, f"{where}[{key!r}]", depth + 1
                )
                for key, one in value.items()
            }
    item = getattr(value, "item", None)
    if item is not None:
        try:
            found = item()
        except (TypeError, ValueError, RuntimeError):
            found = value  # an array of several elements
        if type(found) in _SCALARS:
            return found
    raise SerializationError(
        f"aiogpu.report() was given a {type(value).__qualname__} as {where}: a report "
        f"carries numbers, text, None, and lists and dicts of these, {DEEPEST} deep."
    )


class ReportBuffer:
    """The reports of one task that were not read.

    Attributes:
        kept: how many are missing before each, and its pickled values; oldest first.
        waiter: settled to wake the asyncio task that reads; None while none waits.
    """

    __slots__ = ("_dropped", "kept", "waiter")

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self._dropped = 0

    def receive(self, lost: int, payload: bytes) -> None:
        """Take a report, `lost` before which are missing."""
        if len(self.kept) >= KEPT:
            self._dropped += self.kept.popleft()[0] + 1
        self.kept.append((lost, payload))
        self.wake()

    def take(self) -> Report:
        """Return the oldest one."""
        lost, payload = self.kept.popleft()
        dropped, self._dropped = self._dropped, 0
        return Report(load_result(payload), dropped + lost)

    def wake(self) -> None:
        """Wake the reader, if it waits; in any thread."""
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
    """A handle or a stream, of whose task the reports are."""

    @property
    def task_name(self) -> str:
        """Name of the task."""

    def done(self) -> bool:
        """Return whether no more reports will come."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that it belongs to."""

    async def wait_for_report(self, waiter: asyncio.Future[None]) -> None:
        """Wait until the waiter is set, which the task's end does as well."""


class Reports(IteratedOnLoop, AsyncIterator[Report]):
    """The reports of a task as they come, by `async for`; ends with the task.

    Each report is read once, by one asyncio task at a time. To leave the loop stops
    nothing, and reading does not keep a task that nobody awaits from being cancelled.
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
            loop = sys.modules["asyncio"].get_running_loop()
            if loop is not source.get_loop():
                raise MisuseError(
                    f"the reports of {source.task_name} belong to another event loop; "
                    f"read them where .remote() was called."
                )
            if buffer.waiter is not None:
                raise MisuseError(
                    f"another asyncio task waits for the next report of "
                    f"{source.task_name}; let one read and hand on what comes."
                )
            waiter = buffer.waiter = loop.create_future()
            try:
                await source.wait_for_report(waiter)
            finally:
                buffer.waiter = None
        return buffer.take()

    async def aclose(self) -> None:
        """Do nothing: the task goes on. It is here for `contextlib.aclosing`."""


def refuse_others(name: str) -> NoReturn:
    """Refuse to read the reports of a task that somebody else has started.

    Raises:
        MisuseError: always.
    """
    raise MisuseError(
        f"the reports of {name} go to the program or task that has called .remote(), "
        f"and this handle came from elsewhere; read them there."
    )
