"""The floor of streams: a bare worker that sends pickled items, one write for each.

As `floor`: length-prefixed msgpack and pickle; in the driver an asyncio protocol, which
unpickles what comes. Nothing holds the worker back, and nobody can stop it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from benchmarks.floor import Frames, frame


class StreamFloor(asyncio.Protocol):
    """Asks for items and counts them."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._loop, self._frames = asyncio.get_running_loop(), Frames()
        self._left = 0

    def items(self, count: int) -> asyncio.Future[None]:
        """Done when so many have come."""
        self._left, self._all = count, self._loop.create_future()
        self._transport.write(frame(0, count))
        return self._all

    def data_received(self, data: bytes) -> None:
        """Count."""
        for _ in self._frames.feed(data):
            self._left -= 1
        if not self._left:
            self._all.set_result(None)


@asynccontextmanager
async def open_stream_floor() -> AsyncIterator[StreamFloor]:
    """A worker and the driver's end."""
    loop, (ours, far) = asyncio.get_running_loop(), socket.socketpair()
    with far:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, f"{far.fileno()}"),
            pass_fds=[far.fileno()],
        )
    transport, floor = await loop.create_unix_connection(StreamFloor, sock=ours)
    try:
        yield floor
    finally:
        transport.close()
        await worker.wait()


def work(connection: socket.socket) -> None:
    """Send as many items as each question asks for."""
    frames = Frames()
    while data := connection.recv(65536):
        for _, count in frames.feed(data):
            for item in range(count):
                connection.sendall(frame(item, item))


if __name__ == "__main__":
    work(socket.socket(fileno=int(sys.argv[1])))
