"""The floor: what one call costs with no scheduler, no states and no errors.

A blocking worker on a Unix socket; length-prefixed msgpack and pickle; in the driver
an asyncio protocol and a future per call. Fixed, since all is measured against it.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

from msgpack import packb, unpackb


def frame(number: int, value: object) -> bytes:
    body: bytes = packb((number, pickle.dumps(value, 5)))
    return len(body).to_bytes(4, "little") + body


class Frames:
    rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        data, start = self.rest + data, 0
        while (body := start + 4) <= len(data):
            end = body + int.from_bytes(data[start:body], "little")
            if end > len(data):
                break
            number, payload = unpackb(data[body:end])
            yield number, pickle.loads(payload)
            start = end
        self.rest = data[start:]


class Floor(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop, self._frames, self._last = asyncio.get_running_loop(), Frames(), 0
        self._futures: dict[int, asyncio.Future[None]] = {}

    def call(self, *args: object) -> asyncio.Future[None]:
        self._last += 1
        future = self._futures[self._last] = self._loop.create_future()
        self._transport.write(frame(self._last, (args, {})))
        return future

    def data_received(self, data: bytes) -> None:
        for number, result in self._frames.feed(data):
            self._futures.pop(number).set_result(result)


@asynccontextmanager
async def open_floor(module: str = __name__) -> AsyncIterator[Floor]:
    loop, (ours, far) = asyncio.get_running_loop(), socket.socketpair()
    with far:
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, f"{far.fileno()}", pass_fds=[far.fileno()]
        )
    transport, floor = await loop.create_unix_connection(Floor, sock=ours)
    try:
        yield floor
    finally:
        transport.close()
        await worker.wait()


def work(connection: socket.socket) -> None:
    noop, frames = cast("Any", lambda number: None), Frames()
    while data := connection.recv(65536):
        for number, (args, kwargs) in frames.feed(data):
            connection.sendall(frame(number, noop(*args, **kwargs)))


if __name__ == "__main__":
    work(socket.socket(fileno=int(sys.argv[1])))
