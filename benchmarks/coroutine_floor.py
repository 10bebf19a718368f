"""The floor of coroutine methods: what one call costs that runs on a bare event loop.

As `floor`, but its worker is an asyncio loop, and each message a coroutine of its own.
The loop is the standard library's, as that of an actor is.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, cast

from benchmarks.floor import Frames, frame


class Worker(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop, self._frames = asyncio.get_running_loop(), Frames()
        self.has_ended = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for number, (args, kwargs) in self._frames.feed(data):
            self._loop.create_task(self._call(number, args, kwargs))

    async def _call(self, number: int, args: Any, kwargs: Any) -> None:
        self._transport.write(frame(number, await called(*args, **kwargs)))

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended.set_result(None)


async def noop(number: int) -> None:
    pass


called: Any = noop


async def work(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    _, worker = await loop.create_unix_connection(Worker, sock=connection)
    await worker.has_ended


if __name__ == "__main__":
    asyncio.run(work(socket.socket(fileno=int(sys.argv[1]))))
