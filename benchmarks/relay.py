"""The floor of a call through another process: client, relay, worker, no scheduler.

The relay unpacks each frame, gives it a number of its own and packs it again, as a
node must; it opens no payload. Client and worker are those of `benchmarks.floor`.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import uvloop
from msgpack import packb, unpackb

from benchmarks.floor import Floor


class Hop(asyncio.Protocol):
    """One side of the relay."""

    def __init__(self, forward: Callable[[int, bytes], None]) -> None:
        self._forward = forward
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, number: int, payload: bytes) -> None:
        body: bytes = packb((number, payload))
        self._transport.write(len(body).to_bytes(4, "little") + body)

    def data_received(self, data: bytes) -> None:
        data, start = self._rest + data, 0
        while (body := start + 4) <= len(data):
            end = body + int.from_bytes(data[start:body], "little")
            if end > len(data):
                break
            number, payload = unpackb(data[body:end])
            self._forward(number, payload)
            start = end
        self._rest = data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        asyncio.get_running_loop().stop()


async def relay(near: socket.socket, far: socket.socket) -> None:
    """Forward what comes from the client to the worker, and the answers back."""
    loop = asyncio.get_running_loop()
    asked: dict[int, int] = {}
    last = 0

    def to_worker(number: int, payload: bytes) -> None:
        nonlocal last
        last += 1
        asked[last] = number
        worker.send(last, payload)

    def to_client(number: int, payload: bytes) -> None:
        client.send(asked.pop(number), payload)

    # The worker first: the client may have spoken already.
    _, worker = await loop.create_unix_connection(lambda: Hop(to_client), sock=far)
    _, client = await loop.create_unix_connection(lambda: Hop(to_worker), sock=near)


@asynccontextmanager
async def open_relay() -> AsyncIterator[Floor]:
    """A client whose worker is behind a relay."""
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, f"{theirs.fileno()}"),
            pass_fds=[theirs.fileno()],
        )
    transport, floor = await loop.create_unix_connection(Floor, sock=ours)
    try:
        yield floor
    finally:
        transport.close()
        await process.wait()


def main(near: socket.socket) -> None:
    """Be the relay, with a worker of its own."""
    ours, far = socket.socketpair()
    with far:
        worker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.floor", f"{far.fileno()}"],
            pass_fds=[far.fileno()],
        )
    near.setblocking(False)
    ours.setblocking(False)
    loop = uvloop.new_event_loop()
    loop.create_task(relay(near, ours))
    loop.run_forever()
    ours.close()
    worker.kill()
    worker.wait()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
