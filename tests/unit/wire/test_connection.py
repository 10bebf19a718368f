"""Connection: greeting, directions of messages, limits."""

from __future__ import annotations

import struct

import pytest

from aiogpu.wire.codec import LIMIT, encode
from aiogpu.wire.connection import (
    CLIENT,
    FROM_PEER,
    KEEPER,
    TO_PEER,
    WORKER,
    ZYGOTE,
    Connection,
    ConnectionState,
    greeting,
)
from aiogpu.wire.messages import (
    TAGS,
    VERSION,
    Cancel,
    Done,
    Exit,
    Hello,
    ProtocolError,
    Run,
)
from tests.unit.wire.cases import ROLES, example
from tests.unit.wire.spoiling import framed


def greeted(role: str) -> Connection:
    connection = Connection()
    connection.receive(greeting(role, 1, 2))
    return connection


def refuses(connection: Connection, data: bytes) -> bool:
    """Return True if these bytes close the connection for good."""
    with pytest.raises(ProtocolError):
        connection.receive(data)
    return (
        connection.state is ConnectionState.CLOSED
        and connection.receive(data) == []
        and connection.receive(greeting(WORKER, 1, 2)) == []
        and connection.receive(encode(Done(1, b""))) == []
    )


def test_each_message_has_one_direction():
    assert set(FROM_PEER) == set(TO_PEER) == {ZYGOTE, KEEPER, WORKER, CLIENT}
    sent, received = (
        frozenset().union(*table.values()) for table in (FROM_PEER, TO_PEER)
    )
    assert sent | received | {Hello} == set(TAGS)
    assert not sent & received
    assert Hello not in sent | received


def test_worker_connection_opens_works_and_closes():
    driver, worker = Connection(), Connection(WORKER)
    assert repr(driver) == "<Connection greeting with unknown>"
    assert worker.state is ConnectionState.OPEN

    hello, ready = Hello(VERSION, WORKER, 7, 4711), Done(3, b"")
    data = greeting(WORKER, 7, 4711) + encode(ready)
    assert driver.receive(data[:10]) == []
    assert driver.missing == len(encode(hello)) - 10
    assert driver.receive(data[10:]) == [hello, ready]
    assert (driver.state, driver.peer) == (ConnectionState.OPEN, hello)
    assert repr(driver) == "<Connection open with worker 7>"

    orders = [Run(1, 2, b"args", False), Cancel(1), Exit()]
    assert worker.receive(b"".join(map(encode, orders))) == orders
    assert driver.receive(encode(Done(1, b"result"))) == [Done(1, b"result")]

    driver.close()
    assert repr(driver) == "<Connection closed with worker 7>"
    assert driver.receive(encode(Done(2, b"late"))) == []


@pytest.mark.parametrize("role", ROLES)
def test_peer_may_send_only_messages_of_its_role(role):
    for kind in TAGS:
        data = encode(example(kind))
        for end, allowed in (greeted(role), FROM_PEER), (Connection(role), TO_PEER):
            if kind in allowed[role]:
                (message,) = end.receive(data)
                assert (type(message), message) == (kind, example(kind))
            else:
                assert refuses(end, data)
    assert refuses(greeted(role), greeting(role, 1, 2))
    assert refuses(Connection(), greeting(role, 1, 2) * 2)


def test_first_message_must_be_a_greeting():
    for kind in set(TAGS) - {Hello}:
        assert refuses(Connection(), encode(example(kind)))


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, -1, 2**64 - 1])
def test_other_version_is_refused(version):
    hello = Hello(version, WORKER, 1, 2)
    assert refuses(Connection(), encode(hello))


@pytest.mark.parametrize("role", ["", "driver", "Worker", "\udcff", "x" * 10_000])
def test_unknown_role_is_refused(role):
    assert refuses(Connection(), greeting(role, 1, 2))


def test_error_names_the_peer():
    driver = Connection()
    driver.receive(greeting(KEEPER, 3, 4))
    with pytest.raises(ProtocolError, match=r"Done out of turn on .* keeper 3>"):
        driver.receive(encode(Done(1, b"")))


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_long_frame_is_refused_by_its_header(length):
    assert refuses(greeted(WORKER), struct.pack("<I", length))


def test_limit_frames_refuses_longer_frames():
    connection = greeted(CLIENT)
    connection.limit_frames(64)
    assert connection.state is ConnectionState.OPEN
    assert refuses(connection, struct.pack(">I", 65))


def test_longest_frame_is_accepted():
    connection = greeted(WORKER)
    assert connection.receive(struct.pack("<I", LIMIT)) == []
    assert connection.missing == LIMIT


def test_messages_before_a_fault_in_the_chunk_are_dropped():
    connection = greeted(WORKER)
    assert refuses(connection, encode(Done(1, b"")) + encode(Exit()))


def test_nothing_is_read_after_a_fault():
    connection = Connection(WORKER)
    data = encode(Run(1, 2, b"payload", False))
    assert connection.receive(data[:6]) == []
    spoilt = bytes([data[6] ^ 0xFF]) + data[7:] + framed(b"\xc0")
    assert refuses(connection, spoilt)
    assert connection.receive(data[6:]) == []
