"""Who may send what, and when: one end of a connection, with its peer's bytes."""

from __future__ import annotations

import struct

import pytest

from aiogpu.errors import ProtocolError
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
    Ready,
    Run,
)
from tests.unit.wire.cases import ROLES, example
from tests.unit.wire.spoiling import framed


def greeted(role: str) -> Connection:
    connection = Connection()
    connection.receive(greeting(role, 1, 2))
    return connection


def refuses(connection: Connection, data: bytes) -> bool:
    """Return whether these bytes close the connection for good."""
    with pytest.raises(ProtocolError):
        connection.receive(data)
    return (
        connection.state is ConnectionState.CLOSED
        and connection.receive(data) == []
        and connection.receive(greeting(WORKER, 1, 2)) == []
        and connection.receive(encode(Done(1, b""))) == []
    )


def test_each_message_is_sent_by_one_side_to_one_kind_of_peer():
    assert set(FROM_PEER) == set(TO_PEER) == {ZYGOTE, KEEPER, WORKER, CLIENT}
    said, heard = (frozenset().union(*table.values()) for table in (FROM_PEER, TO_PEER))
    assert said | heard | {Hello} == set(TAGS)
    assert not said & heard
    assert Hello not in said | heard


def test_a_worker_connects_works_and_leaves():
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
def test_each_side_sends_only_what_the_role_of_the_peer_allows(role):
    for kind in TAGS:
        data = encode(example(kind))
        for end, allowed in (greeted(role), FROM_PEER), (Connection(role), TO_PEER):
            if kind in allowed[role]:
                (found,) = end.receive(data)
                assert (type(found), found) == (kind, example(kind))
            else:
                assert refuses(end, data)
    assert refuses(greeted(role), greeting(role, 1, 2))
    assert refuses(Connection(), greeting(role, 1, 2) * 2)


def test_only_a_greeting_comes_first():
    for kind in set(TAGS) - {Hello}:
        assert refuses(Connection(), encode(example(kind)))


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, -1, 2**64 - 1])
def test_another_version_is_refused(version):
    hello = Hello(version, WORKER, 1, 2)
    assert refuses(Connection(), encode(hello))


@pytest.mark.parametrize("role", ["", "driver", "Worker", "\udcff", "x" * 10_000])
def test_an_unknown_role_is_refused(role):
    assert refuses(Connection(), greeting(role, 1, 2))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (
            encode(Ready((), ())),
            "Ready out of turn on <Connection greeting with unknown>",
        ),
        (encode(Hello(99, WORKER, 1, 2)), "the same version of aiogpu on both"),
        (greeting("king", 1, 2), "a peer calls itself 'king'"),
        (greeting("k" * 99, 1, 2), f"calls itself '{'k' * 40}'$"),
        (b"\xff" * 4, "exceeds the limit"),
        (b"\x01\0\0\0\xc1", "no msgpack"),
    ],
)
def test_a_refusal_says_why_and_closes(data, complaint):
    driver = Connection()
    with pytest.raises(ProtocolError, match=complaint):
        driver.receive(data)
    assert driver.state is ConnectionState.CLOSED
    assert driver.peer is None
    assert driver.receive(greeting(WORKER, 1, 2)) == []


def test_a_refusal_names_the_peer():
    driver = Connection()
    driver.receive(greeting(KEEPER, 3, 4))
    with pytest.raises(ProtocolError, match=r"Done out of turn on .* keeper 3>"):
        driver.receive(encode(Done(1, b"")))


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_too_long_a_frame_is_refused_before_any_of_it_arrives(length):
    assert refuses(greeted(WORKER), struct.pack("<I", length))


def test_a_peer_may_be_held_to_shorter_frames():
    connection = greeted(CLIENT)
    connection.limit_frames(64)
    assert connection.state is ConnectionState.OPEN
    assert refuses(connection, struct.pack(">I", 65))


def test_the_longest_frame_is_waited_for():
    connection = greeted(WORKER)
    assert connection.receive(struct.pack("<I", LIMIT)) == []
    assert connection.missing == LIMIT


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc0", id="nil"),
        pytest.param(b"\x90", id="no tag"),
        pytest.param(b"\xc1", id="a byte that msgpack never uses"),
        pytest.param(b"\x91\x03\x00", id="surplus bytes"),
        pytest.param(b"\x81\xa1a\x01", id="a map"),
        pytest.param(b"\x91\x81\xa1a\x01", id="a map for a tag"),
        pytest.param(b"\x91\xc3", id="true for a tag"),
        pytest.param(b"\x91\xcb\x3f\xf0" + bytes(6), id="1.0 for a tag"),
        pytest.param(b"\x91\x00", id="tag 0"),
        pytest.param(b"\x91\xff", id="tag -1"),
        pytest.param(b"\x91\xcd\xff\xff", id="tag 65535"),
        pytest.param(b"\x92\x02\xd4\x05\x00", id="an extension"),
        pytest.param(b"\x92\x02\xd6\xff" + b"\xff" * 4, id="a timestamp"),
        pytest.param(b"\x92\x02\xd7\xff" + b"\xff" * 8, id="an ill timestamp"),
        pytest.param(b"\x92\x02\xc7\x0c\xff" + b"\xff" * 12, id="a huge timestamp"),
        pytest.param(b"\x92\x02\xa2\xff\xff", id="no utf-8"),
        pytest.param(b"\x92\x02\x81\x90\x01", id="a map keyed by an array"),
        pytest.param(b"\x92\x02\x81\x01\x01", id="a map keyed by a number"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array of billions"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of billions"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="bytes of billions"),
    ],
)
def test_what_is_no_message_is_refused(body):
    for role in ROLES:
        assert refuses(greeted(role), framed(body))
        assert refuses(Connection(role), framed(body))
    assert refuses(Connection(), framed(body))


def test_what_precedes_a_fault_in_the_same_chunk_is_dropped_with_it():
    connection = greeted(WORKER)
    assert refuses(connection, encode(Done(1, b"")) + encode(Exit()))


def test_after_a_fault_in_the_middle_of_a_frame_the_rest_is_not_read():
    connection = Connection(WORKER)
    data = encode(Run(1, 2, b"payload", False))
    assert connection.receive(data[:6]) == []
    spoilt = bytes([data[6] ^ 0xFF]) + data[7:] + framed(b"\xc0")
    assert refuses(connection, spoilt)
    assert connection.receive(data[6:]) == []
