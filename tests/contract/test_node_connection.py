"""A program's connection to its node loses, tears and recopies nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiogpu.engines.node_connection import AT_ONCE, CHUNK, NodeConnection
from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.connection import CLIENT, greeting
from aiogpu.wire.messages import ChildDone, Depart, Message, ProtocolError, Submit
from tests.support.waits import until

GREETED = greeting(CLIENT, 1, 1)
LARGE = bytes(8 * CHUNK)


class Far:
    """The node's end, which reads when the test calls it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.heard: list[Message] = []
        self._reader = FrameReader()

    def read(self, size: int = CHUNK) -> int:
        """Read once, and return the number of bytes."""
        try:
            data = self.socket.recv(size)
        except BlockingIOError:
            return 0
        self.heard += self._reader.feed(data)
        return len(data)

    def read_all(self) -> None:
        """Read until there are no bytes."""
        while self.read():
            pass

    @property
    def numbers(self) -> list[int]:
        """Numbers of the submitted tasks that were read."""
        return [one.child for one in self.heard if isinstance(one, Submit)]


@asynccontextmanager
async def joined(
    directory: Path,
    heard: list[Message] | None = None,
    lost: list[Exception | None] | None = None,
) -> AsyncIterator[tuple[NodeConnection, Far]]:
    """Connect; the lists get the messages for the program, and its loss."""
    path = str(directory / "s")
    heard, lost = [] if heard is None else heard, [] if lost is None else lost
    line = NodeConnection(asyncio.get_running_loop(), heard.extend, lost.append)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        await line.connect(path, GREETED, Depart())
        far = Far(listening.accept()[0])
        await settled()
        far.read_all()
        try:
            yield line, far
        finally:
            line.close()
            far.socket.close()


async def settled() -> None:
    """Let the loop poll its descriptors and run the callbacks."""
    for _ in range(3):
        await asyncio.sleep(0)


def submit(number: int, payload: bytes = b"") -> Submit:
    return Submit(0, number, 1, payload)


async def until_heard(far: Far, count: int, size: int = CHUNK) -> None:
    """Read in small pieces until this number of tasks has arrived."""
    async with asyncio.timeout(60):
        while len(far.numbers) < count:
            far.read(size)
            await asyncio.sleep(0)


async def test_a_slow_reader_gets_all_messages_in_order(tmp_path: Path) -> None:
    async with joined(tmp_path) as (line, far):
        for number in range(40):
            line.send(submit(number, LARGE if number % 20 == 3 else bytes(number)))
            if number % 10 == 9:
                await settled()
        await until_heard(far, 40, size=AT_ONCE)
        assert far.numbers == [*range(40)]
        assert [len(one.payload) for one in far.heard if isinstance(one, Submit)] == [
            len(LARGE) if number % 20 == 3 else number for number in range(40)
        ]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes | memoryview]]:
    """All data that was offered to the socket, sent or not."""
    offered: list[bytes | memoryview] = []
    send = NodeConnection._send_now

    def note(
        line: NodeConnection, connected: socket.socket, data: bytes | memoryview
    ) -> int:
        offered.append(data)
        return send(line, connected, data)

    monkeypatch.setattr(NodeConnection, "_send_now", note)
    yield offered
    offered.clear()


async def test_waiting_data_is_copied_only_once(
    tmp_path: Path, offered: list[bytes | memoryview]
) -> None:
    async with joined(tmp_path) as (line, far):
        line.send(submit(0, LARGE))
        for number in range(1, 200):
            line.send(submit(number, bytes(1000)))
        offered.clear()
        await until_heard(far, 200, size=AT_ONCE)
        views = [data for data in offered if isinstance(data, memoryview)]
        assert len(views) > 10, "the data left in many pieces"
        whole = {id(view.obj) for view in views}
        assert len(whole) <= 2, "the first message, and all that follow"


async def test_a_long_turn_of_the_loop_does_not_delay_the_node(
    tmp_path: Path,
) -> None:
    async with joined(tmp_path) as (line, far):
        many = 3 * AT_ONCE // len(encode(submit(1)))
        for number in range(many):
            line.send(submit(number))
        far.read_all()
        assert 0.6 * many < len(far.numbers) < many, "the loop has not turned since"
        await until_heard(far, many)
        assert far.numbers == [*range(many)]


async def test_unsent_data_is_dropped_when_the_node_ends(tmp_path: Path) -> None:
    lost: list[Exception | None] = []
    async with joined(tmp_path, lost=lost) as (line, far):
        line.send(submit(0, LARGE))
        far.socket.close()
        line.send(submit(1))
        await until(lambda: lost)
        assert not line.is_open
        line.send(submit(2))


async def test_press_sends_waiting_data_within_a_turn(tmp_path: Path) -> None:
    async with joined(tmp_path) as (line, far):
        line.send(submit(1, LARGE))
        line.send(submit(2))
        while len(far.numbers) < 2:
            far.read()
            line.press()
        assert far.numbers == [1, 2]


async def test_messages_that_press_reads_are_delivered_in_order_later(
    tmp_path: Path,
) -> None:
    heard: list[Message] = []
    async with joined(tmp_path, heard) as (line, far):
        for number in range(3):
            far.socket.send(encode(ChildDone(number, b"")))
            if number < 2:
                line.press()
        assert heard == []
        await settled()
        assert [each.child for each in heard if type(each) is ChildDone] == [0, 1, 2]


@pytest.mark.parametrize("data", [encode(Depart())[:-1] + b"\xff", b""])
async def test_press_reports_a_lost_or_broken_node(data: bytes, tmp_path: Path) -> None:
    lost: list[Exception | None] = []
    async with joined(tmp_path, lost=lost) as (line, far):
        far.socket.send(data)
        far.socket.shutdown(socket.SHUT_WR)
        line.press()
        line.press()
        await settled()
        assert [*map(type, lost)] == [ProtocolError if data else type(None)]


@pytest.mark.parametrize("sends", [False, True])
async def test_the_last_messages_of_a_dead_node_are_read(
    sends: bool, tmp_path: Path
) -> None:
    """Then its end is read, which uvloop reports only once."""
    heard: list[Message] = []
    lost: list[Exception | None] = []
    async with joined(tmp_path, heard, lost) as (line, far):
        line.send(submit(1))
        far.socket.send(encode(ChildDone(1, b"")))
        far.socket.close()
        if sends:
            line.send(submit(2))
        await until(lambda: lost)
        assert [*map(type, heard)] == [ChildDone]
        assert lost == [None]
