"""A program's connection to its node: nothing is lost, torn or copied again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiogpu.engines.node_connection import AT_ONCE, CHUNK, NodeConnection
from aiogpu.errors import ProtocolError
from aiogpu.wire.codec import FrameReader, encode
from aiogpu.wire.connection import CLIENT, greeting
from aiogpu.wire.messages import ChildDone, Depart, Message, Submit

GREETED = greeting(CLIENT, 1, 1)
LARGE = bytes(8 * CHUNK)


class Far:
    """The node's end, which reads when the test says so."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.heard: list[Message] = []
        self._reader = FrameReader()

    def read(self, size: int = CHUNK) -> int:
        """Read once; gives how many bytes there were."""
        try:
            data = self.socket.recv(size)
        except BlockingIOError:
            return 0
        self.heard += self._reader.feed(data)
        return len(data)

    def read_all(self) -> None:
        """Read all that is there now."""
        while self.read():
            pass

    @property
    def numbers(self) -> list[int]:
        """Of the tasks that were submitted."""
        return [one.child for one in self.heard if isinstance(one, Submit)]


@asynccontextmanager
async def joined(
    directory: Path,
    told: list[Message] | None = None,
    lost: list[Exception | None] | None = None,
) -> AsyncIterator[tuple[NodeConnection, Far]]:
    """A line and its other end; the lists get what is said, and the loss."""
    path = str(directory / "s")
    told, lost = [] if told is None else told, [] if lost is None else lost
    line = NodeConnection(asyncio.get_running_loop(), told.extend, lost.append)
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
    """Let the loop look at its descriptors, and do what follows."""
    for _ in range(3):
        await asyncio.sleep(0)


def submit(number: int, payload: bytes = b"") -> Submit:
    return Submit(0, number, 1, payload)


async def until_heard(far: Far, count: int, size: int = CHUNK) -> None:
    """Read on, a little at a time, until so many tasks were heard of."""
    async with asyncio.timeout(60):
        while len(far.numbers) < count:
            far.read(size)
            await asyncio.sleep(0)


async def test_who_reads_slowly_hears_all_in_order(tmp_path: Path) -> None:
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
    """All that was given to the socket, sent or not."""
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


async def test_what_waits_for_room_is_never_copied_again(
    tmp_path: Path, offered: list[bytes | memoryview]
) -> None:
    async with joined(tmp_path) as (line, far):
        line.send(submit(0, LARGE))
        for number in range(1, 200):
            line.send(submit(number, bytes(1000)))
        offered.clear()
        await until_heard(far, 200, size=AT_ONCE)
        views = [data for data in offered if isinstance(data, memoryview)]
        assert len(views) > 10, "it took many times"
        whole = {id(view.obj) for view in views}
        assert len(whole) <= 2, "the first one, and all that came after it"


async def test_a_long_turn_of_the_program_does_not_hold_up_the_node(
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


async def test_what_was_not_sent_ends_with_the_node(tmp_path: Path) -> None:
    lost: list[Exception | None] = []
    async with joined(tmp_path, lost=lost) as (line, far):
        line.send(submit(0, LARGE))
        far.socket.close()
        line.send(submit(1))
        async with asyncio.timeout(60):
            while not lost:
                await asyncio.sleep(0)
        assert not line.is_open
        line.send(submit(2))


async def test_what_waits_for_room_goes_in_the_midst_of_a_turn(tmp_path: Path) -> None:
    async with joined(tmp_path) as (line, far):
        line.send(submit(1, LARGE))
        line.send(submit(2))
        while len(far.numbers) < 2:
            far.read()
            line.press()
        assert far.numbers == [1, 2]


async def test_what_comes_meanwhile_is_told_in_its_turn(tmp_path: Path) -> None:
    told: list[Message] = []
    async with joined(tmp_path, told) as (line, far):
        for number in range(3):
            far.socket.send(encode(ChildDone(number, b"")))
            if number < 2:
                line.press()
        assert told == []
        await settled()
        assert [one.child for one in told if type(one) is ChildDone] == [0, 1, 2]


@pytest.mark.parametrize("said", [encode(Depart())[:-1] + b"\xff", b""])
async def test_a_node_that_is_gone_or_mad_amid_a_turn(
    said: bytes, tmp_path: Path
) -> None:
    lost: list[Exception | None] = []
    async with joined(tmp_path, lost=lost) as (line, far):
        far.socket.send(said)
        far.socket.shutdown(socket.SHUT_WR)
        line.press()
        line.press()
        await settled()
        assert [type(one) for one in lost] == [ProtocolError if said else type(None)]


@pytest.mark.parametrize("sends", [False, True])
async def test_a_node_that_dies_with_what_it_has_not_read(
    sends: bool, tmp_path: Path
) -> None:
    """Its last words are read, and then its end, which uvloop reports only once."""
    told: list[Message] = []
    lost: list[Exception | None] = []
    async with joined(tmp_path, told, lost) as (line, far):
        line.send(submit(1))
        far.socket.send(encode(ChildDone(1, b"")))
        far.socket.close()
        if sends:
            line.send(submit(2))
        async with asyncio.timeout(60):
            while not lost:
                await asyncio.sleep(0)
        assert [type(one) for one in told] == [ChildDone]
        assert lost == [None]
