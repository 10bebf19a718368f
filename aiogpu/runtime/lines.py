"""A pipe of ours, read line by line on the loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

CHUNK: Final = 1 << 16
"""Bytes of one read, and the length at which a line is cut."""


class LinePipe:
    """The reading end of a pipe; `show` gets each line without its end.

    Attributes:
        partial: what came since the last end of line.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        show: Callable[[bytes], None],
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._show = show
        self.partial = b""
        os.set_blocking(descriptor, False)
        self.resume()

    def fileno(self) -> int:
        """Its descriptor."""
        return self._descriptor

    def pause(self) -> None:
        """Read no more for now; writers will block when the pipe is full."""
        self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Read whenever there is something."""
        self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> bool:
        """Read once; False when there was nothing, or nothing will come."""
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return False
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self.partial) >= CHUNK or not data:
            self.end_line()
        if not data:
            self.pause()
        return bool(data)

    def end_line(self) -> None:
        """Show what came since the last end of line, if anything."""
        if self.partial:
            line, self.partial = self.partial, b""
            self._show(line)

    def drain(self) -> None:
        """Read until the pipe is empty."""
        while self._read():
            continue

    def close(self) -> None:
        """Close the descriptor."""
        self.pause()
        os.close(self._descriptor)
