"""Writes what tasks print to the driver's terminal, from a thread of its own.

A terminal may block for as long as it likes; the loop never waits for it. Every
line has a number, so that an answer can be held until the lines before it are out,
and a source that prints faster than the terminal takes is paused.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.runtime.batches import batches

if TYPE_CHECKING:
    from aiogpu.runtime.routes import Routes

_log: Final = logging.getLogger(__name__)

FULL: Final = 1 << 20
"""Bytes of lines that may wait for the terminal before their sources are paused."""


class Source(Protocol):
    """Something that lines come from and that can be made to wait."""

    def pause(self) -> None:
        """Send no more lines for now."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Console:
    """The driver's terminal. Its thread starts with the first line.

    Attributes:
        written: number of the last line that is out.
        routes: has lines taken to other programs; None where there are none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_shown: bool) -> None:
        self.written = 0
        self.routes: Routes | None = None
        self._loop = loop
        self._is_shown = is_shown
        self._is_holding = True
        self._last = 0
        self._waiting = 0
        self._paused: set[Source] = set()
        self._order = count()
        self._after: list[tuple[int, int, Callable[[], None]]] = []
        self._lines: SimpleQueue[tuple[int, int, str] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._drained: asyncio.Future[None] | None = None

    def write(self, stream: int, line: str, source: Source) -> int:
        """Write a line to stdout (1) or stderr (2) soon; gives its number."""
        if not self._is_shown:
            return self._last
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="aiogpu-console", daemon=True
            )
            self._thread.start()
        self._last += 1
        self._waiting += len(line)
        self._lines.put((self._last, stream, line))
        if self._waiting > FULL and source not in self._paused:
            self._paused.add(source)
            source.pause()
        return self._last

    def after(self, number: int, action: Callable[[], None]) -> None:
        """Act once line `number` is out: at once if it is. Order is kept."""
        if number <= self.written or not self._is_holding:
            action()
        else:
            heappush(self._after, (number, next(self._order), action))

    def hold_nothing(self) -> None:
        """Let answers go ahead of their lines from now on; the node is closing."""
        self._is_holding = False
        self._release()

    async def drain(self, timeout: float) -> None:
        """Wait until all lines are out, or the time is up."""
        self._drained = self._loop.create_future()
        timer = self._loop.call_later(timeout, _finish, self._drained)
        if self.written == self._last:
            _finish(self._drained)
        await self._drained
        timer.cancel()

    def close(self) -> None:
        """Let the thread end after what it has been given."""
        self._lines.put(None)

    def _progress(self, number: int, size: int) -> None:
        self.written = number
        self._waiting -= size
        if self._drained is not None and number == self._last:
            _finish(self._drained)
        if self._paused and self._waiting < FULL // 2:
            for source in self._paused:
                source.resume()
            self._paused.clear()
        self._release()

    def _release(self) -> None:
        while self._after and (
            self._after[0][0] <= self.written or not self._is_holding
        ):
            heappop(self._after)[2]()

    def _write_all(self) -> None:
        """The thread: write whatever has come, then report it in one go."""
        for lines in batches(self._lines):
            for stream in (1, 2):
                text = "".join(f"{line}\n" for _, of, line in lines if of == stream)
                if text:
                    _print(stream, text)
            if lines:
                self._report(lines[-1][0], sum(len(line) for _, _, line in lines))

    def _report(self, number: int, size: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._progress, number, size)
        except RuntimeError:
            _log.debug("x the loop closed before line %d was out", number)


def _print(stream: int, text: str) -> None:
    """Write to what `sys.stdout` or `sys.stderr` is now; a notebook changes them."""
    file = sys.stdout if stream == 1 else sys.stderr
    try:
        try:
            file.write(text)
        except UnicodeEncodeError as error:
            raw = text.encode(error.encoding, "backslashreplace")
            file.write(raw.decode(error.encoding))
        file.flush()
    except Exception as error:  # noqa: BLE001 - a notebook's stream may raise anything
        # Closed, a broken pipe, or none at all; the tasks are not to suffer.
        _log.debug("! %d characters of output are lost: %s", len(text), error)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
