"""The node's side of a connection: refusals, protocol errors, order, floods."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from aiogpu.runtime.connection import AT_ONCE, Peer, Recipient
from aiogpu.wire.codec import LARGE, encode
from aiogpu.wire.connection import CLIENT, KEEPER, WORKER, Connection, greeting
from aiogpu.wire.messages import ChildDone, Done, Ended, Exit, Fork, Hello, Log, Message
from tests.support.waits import until
from tests.unit.runtime.fakes import FakeTransport


class FakePool:
    """A pool that records greetings and messages."""

    def __init__(self) -> None:
        self.greetings: list[Hello] = []
        self.heard: list[Message] = []
        self.parts: list[int] = []
        self.lost = 0

    def on_hello(self, _peer: Peer, hello: Hello) -> Recipient:
        self.greetings.append(hello)
        return Recipient(self.hear, self.note_lost)

    def hear(self, messages: list[Message]) -> None:
        self.parts.append(len(messages))
        self.heard += messages

    def note_lost(self) -> None:
        self.lost += 1

    def connect(self, uid: int | None = None) -> tuple[Peer, FakeTransport]:
        peer, transport = Peer(self.on_hello), FakeTransport(uid)
        peer.connection_made(transport)
        return peer, transport


def test_peer_aborted_before_its_connection_is_made_is_cut_off() -> None:
    """A node may close while its loop accepts a connection."""
    pool = FakePool()
    peer, transport = Peer(pool.on_hello), FakeTransport()
    peer.abort()
    assert transport.calls == []
    peer.connection_made(transport)
    assert transport.calls == ["abort"]


def test_connection_of_other_user_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool()
    peer, transport = pool.connect(uid=os.geteuid() + 1)
    assert transport.calls == ["abort"]
    assert f"user {os.geteuid() + 1}" in caplog.text
    # Bytes that arrived already are ignored, and nothing is sent.
    peer.data_received(greeting(WORKER, 1, 1))
    peer.send(Exit())
    peer.abort()
    peer.connection_lost(None)
    assert (pool.greetings, transport.written) == ([], [])
    assert transport.calls == ["abort"]


BROKEN = {
    "too long": b"\xff\xff\xff\xff",
    "no greeting": encode(Done(1, b"")),
    "two greetings": greeting(WORKER, 1, 1) + greeting(WORKER, 1, 1),
    "wrong role": greeting(KEEPER, 1, 1) + encode(Done(1, b"")),
    "role": greeting("stranger", 1, 1),
    "no msgpack": greeting(WORKER, 1, 1) + b"\x01\x00\x00\x00\xc1",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_peer_that_breaks_the_protocol_is_cut_off_alone(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FakePool()
    good, good_transport = pool.connect()
    good.data_received(greeting(WORKER, 7, 1))
    bad, bad_transport = pool.connect()
    bad.data_received(data)
    # Without a greeting, the peer may have another version: it gets the reason.
    is_new = bad._connection.peer is None
    assert bad_transport.calls == ["close" if is_new else "abort"]
    refusals = [Connection(CLIENT).receive(part) for part in bad_transport.written]
    assert sum(map(len, refusals)) == is_new
    assert "cut off" in caplog.text
    bad.data_received(encode(Ended(1, 0)))
    good.data_received(encode(Done(1, b"x")))
    assert pool.heard == [Done(1, b"x")]
    assert good_transport.calls == []


async def test_flood_of_messages_is_handled_in_parts() -> None:
    pool = FakePool()
    peer, transport = pool.connect()
    peer.data_received(greeting(WORKER, 1, 1))
    flood = [Log(1, 1, b"%d" % number) for number in range(2 * AT_ONCE + 1)]
    peer.data_received(b"".join(map(encode, flood)))
    assert pool.parts == [], "not even the first part blocks the loop"
    assert transport.calls == ["pause"]
    peer.data_received(encode(Log(1, 1, b"last")))
    await until(lambda: len(pool.heard) == len(flood) + 1)
    assert pool.parts == [AT_ONCE, AT_ONCE, 2]
    assert pool.heard == [*flood, Log(1, 1, b"last")]
    assert transport.calls[-1] == "resume"


async def test_messages_of_a_peer_that_ends_during_a_write_are_read() -> None:
    """After a failed write, asyncio's transport stops and leaves bytes unread."""
    pool = FakePool()
    ours, theirs = socket.socketpair()
    theirs.sendall(greeting(WORKER, 1, 1))
    loop = asyncio.get_running_loop()
    _, peer = await loop.create_connection(lambda: Peer(pool.on_hello), sock=ours)
    await until(lambda: pool.greetings)
    last = [Done(task, b"x") for task in range(3)]
    # Results, the end and a write come without a turn of the loop in between.
    theirs.sendall(b"".join(map(encode, last)))
    theirs.close()
    peer.send(Exit())
    await until(lambda: pool.lost)
    assert pool.heard == last


async def test_sent_messages_follow_posted_messages() -> None:
    peer, transport = FakePool().connect()
    for number in (1, 2, 3):
        peer.post(Fork(number))
    peer.send(Fork(4))
    peer.post(Fork(5))
    peer.send_one(Fork(6))
    await asyncio.sleep(0)
    frames = [encode(Fork(number)) for number in range(1, 7)]
    assert b"".join(transport.written) == b"".join(frames)
    assert len(transport.written) == 5


async def test_large_posted_message_keeps_its_place() -> None:
    peer, transport = FakePool().connect()
    answers = [ChildDone(size, bytes(size)) for size in (1, 2, LARGE, 3)]
    for answer in answers:
        peer.post(answer)
    await asyncio.sleep(0)
    assert b"".join(transport.written) == b"".join(map(encode, answers))
