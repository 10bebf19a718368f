from __future__ import annotations

import pytest

from aiogpu.errors import ProtocolError
from aiogpu.wire.codec import HEADER, encode
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


def test_every_message_is_said_by_one_side_to_one_kind_of_peer():
    assert set(FROM_PEER) == set(TO_PEER) == {ZYGOTE, KEEPER, WORKER, CLIENT}
    said, heard = (frozenset().union(*table.values()) for table in (FROM_PEER, TO_PEER))
    assert said | heard | {Hello} == set(TAGS)
    assert not said & heard
    assert Hello not in said | heard


def test_a_worker_connects_works_and_goes():
    driver, worker = Connection(), Connection(WORKER)
    assert driver.state is ConnectionState.GREETING
    assert worker.state is ConnectionState.OPEN

    hello = Hello(VERSION, WORKER, 7, 4711)
    assert driver.receive(greeting(WORKER, 7, 4711)) == [hello]
    assert driver.state is ConnectionState.OPEN
    assert driver.peer == hello

    orders = [Run(1, 2, b"args", False), Cancel(1), Exit()]
    assert worker.receive(b"".join(map(encode, orders))) == orders
    assert driver.receive(encode(Done(1, b"result"))) == [Done(1, b"result")]

    driver.close()
    assert driver.state is ConnectionState.CLOSED
    assert driver.receive(encode(Done(2, b"late"))) == []


def test_a_greeting_and_what_follows_may_come_together():
    driver = Connection()
    found = driver.receive(greeting(ZYGOTE, 0, 1) + encode(Ready((), ())))
    assert [type(message) for message in found] == [Hello, Ready]


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


def test_missing_is_the_reader_s():
    driver = Connection()
    assert driver.missing == HEADER
    data = greeting(WORKER, 1, 2)
    driver.receive(data[:-2])
    assert driver.missing == 2


def test_repr_is_one_line_of_what_is_known():
    driver = Connection()
    assert repr(driver) == "<Connection greeting with unknown>"
    driver.receive(greeting(WORKER, 7, 4711))
    assert repr(driver) == "<Connection open with worker 7>"
    driver.close()
    assert repr(driver) == "<Connection closed with worker 7>"
