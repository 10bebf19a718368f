"""A pipe of ours, read line by line on the loop."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
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
        self._is_closed = False
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
        if not self._is_closed:
            self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> int:
        """Read once; gives how many bytes came."""
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return 0
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            self._show(line)
        if len(self.partial) >= CHUNK or not data:
            self.end_line()
        if not data:
            self.pause()
        return len(data)

    def end_line(self) -> None:
        """Show what came since the last end of line, if anything."""
        if self.partial:
            line, self.partial = self.partial, b""
            self._show(line)

    def drain(self) -> None:
        """Read what the pipe holds now; whoever writes on may never let it empty."""
        held = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        (rest,) = struct.unpack("i", held)
        while rest > 0 and (read := self._read()):
            rest -= read

    def close(self) -> None:
        """Close the descriptor; a `resume` that comes late does nothing."""
        self._is_closed = True
        self.pause()
        os.close(self._descriptor)
