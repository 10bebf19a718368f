"""Floors: what a call costs with no scheduler, no states and no errors.

The worker is a process on a Unix socket; messages are length-prefixed msgpack around a
pickle; the driver has an asyncio protocol and one future for each call. All benchmarks
compare with these floors, so their code must not change.
`python -m benchmarks.floors KIND FD ...` runs the worker, or one forked worker for each
descriptor. Kinds:

- blocking: reads, calls and answers, one message after the other.
- coroutine: an event loop of the standard library, as in an actor; each message is a
  coroutine in a task of its own.
- stream: sends the requested number of items, one write each, without back-pressure.
- relay: a process between the driver and a blocking worker, which unpacks each frame,
  assigns a number and packs the frame again, as a node must, but opens no payload.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final, cast

from msgpack import packb, unpackb


def frame(number: int, value: object) -> bytes:
    return raw_frame(number, pickle.dumps(value, 5))


def raw_frame(number: int, payload: bytes) -> bytes:
    body: bytes = packb((number, payload))
    return len(body).to_bytes(4, "little") + body


class Frames:
    """Incoming frames: numbers and loaded payloads."""

    def __init__(self, load: Callable[[bytes], Any] = pickle.loads) -> None:
        self._rest, self._load = b"", load

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        data, start = self._rest + data, 0
        while (body := start + 4) <= len(data):
            end = body + int.from_bytes(data[start:body], "little")
            if end > len(data):
                break
            number, payload = unpackb(data[body:end])
            yield number, self._load(payload)
            start = end
        self._rest = data[start:]


class Client(asyncio.Protocol):
    """The driver's side of one worker."""

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


class StreamClient(Client):
    """The driver's side of a worker that sends items; counts the items."""

    def items(self, count: int) -> asyncio.Future[None]:
        """Return a future that is done when `count` items have arrived."""
        self._left, self._all = count, self._loop.create_future()
        self._transport.write(frame(0, count))
        return self._all

    def data_received(self, data: bytes) -> None:
        for _ in self._frames.feed(data):
            self._left -= 1
        if not self._left:
            self._all.set_result(None)


@asynccontextmanager
async def open_floors(
    count: int, kind: str = "blocking", client: Callable[[], Any] = Client
) -> AsyncIterator[list[Any]]:
    """Start `count` workers of a kind; yield the driver's side of each."""
    pairs = [socket.socketpair() for _ in range(count)]
    descriptors = [far.fileno() for _, far in pairs]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, kind, *map(str, descriptors)),
        pass_fds=descriptors,
    )
    loop, opened = asyncio.get_running_loop(), []
    for ours, far in pairs:
        far.close()
        opened.append(await loop.create_unix_connection(client, sock=ours))
    try:
        yield [protocol for _, protocol in opened]
    finally:
        for transport, _ in opened:
            transport.close()
        await process.wait()


@asynccontextmanager
async def open_floor(kind: str = "blocking") -> AsyncIterator[Any]:
    """Start one worker; yield the driver's side."""
    client = StreamClient if kind == "stream" else Client
    async with open_floors(1, kind, client) as (floor,):
        yield floor


@contextmanager
def pinned_to(cores: set[int]) -> Iterator[None]:
    """Run this thread, and the processes that it starts, on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def first_core() -> set[int]:
    """Return the first core that this process may use."""
    return {min(os.sched_getaffinity(0))}


def second_core() -> set[int]:
    """Return the second core that this process may use, or the only one."""
    return {sorted(os.sched_getaffinity(0))[:2][-1]}


@asynccontextmanager
async def open_floor_apart(kind: str = "blocking") -> AsyncIterator[Any]:
    """Start a worker on a core of its own, with this thread on another.

    The kernel by itself runs both on one core for minutes, and then on two for minutes.
    A call takes 15 us on one core and 50 to 75 us on two, mostly to wake a core up, so
    a ratio would say more about the kernel than about the workload. Processes that were
    started before may run on any core.
    """
    first, second = first_core(), second_core()
    async with AsyncExitStack() as stack:
        with pinned_to(second):
            floor = await stack.enter_async_context(open_floor(kind))
        with pinned_to(first):
            yield floor


def serve_blocking(connection: socket.socket) -> None:
    noop, frames = cast("Any", lambda number: None), Frames()
    while data := connection.recv(65536):
        for number, (args, kwargs) in frames.feed(data):
            connection.sendall(frame(number, noop(*args, **kwargs)))


def serve_stream(connection: socket.socket) -> None:
    frames = Frames()
    while data := connection.recv(65536):
        for _, count in frames.feed(data):
            for item in range(count):
                connection.sendall(frame(item, item))


class CoroutineServer(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop, self._frames = asyncio.get_running_loop(), Frames()
        self.has_ended = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for number, (args, kwargs) in self._frames.feed(data):
            self._loop.create_task(self._call(number, args, kwargs))

    async def _call(self, number: int, args: Any, kwargs: Any) -> None:
        self._transport.write(frame(number, await _method(*args, **kwargs)))

    def connection_lost(self, error: Exception | None) -> None:
        self.has_ended.set_result(None)


async def _noop(number: int) -> None:
    pass


_method: Any = _noop


def serve_coroutines(connection: socket.socket) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        _, server = await loop.create_unix_connection(CoroutineServer, sock=connection)
        await server.has_ended

    asyncio.run(serve())


class RelaySide(asyncio.Protocol):
    """One side of the relay; forwards frames to the other side."""

    def __init__(self, forward: Callable[[int, bytes], None]) -> None:
        self._forward, self._frames = forward, Frames(bytes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, number: int, payload: bytes) -> None:
        self._transport.write(raw_frame(number, payload))

    def data_received(self, data: bytes) -> None:
        for number, payload in self._frames.feed(data):
            self._forward(number, payload)

    def connection_lost(self, error: Exception | None) -> None:
        asyncio.get_running_loop().stop()


def serve_relay(connection: socket.socket) -> None:
    import uvloop

    ours, far = socket.socketpair()
    with far:
        worker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.floors", "blocking", f"{far.fileno()}"],
            pass_fds=[far.fileno()],
        )
    numbers: dict[int, int] = {}
    last = 0

    def to_worker(number: int, payload: bytes) -> None:
        nonlocal last
        last += 1
        numbers[last] = number
        worker_side.send(last, payload)

    worker_side = RelaySide(
        lambda n, payload: client_side.send(numbers.pop(n), payload)
    )
    client_side = RelaySide(to_worker)

    async def connect() -> None:
        # The worker first: the client may have sent frames already.
        await loop.create_unix_connection(lambda: worker_side, sock=ours)
        await loop.create_unix_connection(lambda: client_side, sock=connection)

    loop = uvloop.new_event_loop()
    loop.create_task(connect())
    loop.run_forever()
    ours.close()
    worker.kill()
    worker.wait()


WORKERS: Final = {
    "blocking": serve_blocking,
    "coroutine": serve_coroutines,
    "stream": serve_stream,
    "relay": serve_relay,
}


def main(kind: str, *descriptors: str) -> None:
    """Serve each connection in a process of its own, until all are closed."""
    connections = [socket.socket(fileno=int(each)) for each in descriptors]
    if len(connections) == 1:
        WORKERS[kind](connections[0])
        return
    for connection in connections:
        if not os.fork():
            WORKERS[kind](connection)
            os._exit(0)
    for _ in connections:
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
