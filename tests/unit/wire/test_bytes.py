"""Messages to bytes and back, however the bytes are cut, spoilt or ordered."""

from __future__ import annotations

import struct
from itertools import pairwise
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import ProtocolError
from aiogpu.wire.codec import HEADER, LIMIT, FrameReader, encode
from aiogpu.wire.connection import (
    FROM_PEER,
    KEEPER,
    TO_PEER,
    WORKER,
    ZYGOTE,
    Connection,
    ConnectionState,
    greeting,
)
from aiogpu.wire.messages import TAGS, VERSION, Done, Exit, Hello, Message, Run
from tests.support.sampling import examples

# A slow machine must not make a test fail, and a failure must come back.
steady = settings(
    derandomize=True, database=None, deadline=None, max_examples=examples(100)
)

ROLES = (ZYGOTE, KEEPER, WORKER)
KINDS = list(TAGS)

PLAIN = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    # Also lone surrogates, as undecodable file names have them.
    str: st.text(st.characters(exclude_categories=()), max_size=20),
    bytes: st.binary(max_size=100),
    type(None): st.none(),
}


def values(hint: object) -> st.SearchStrategy:
    if hint in PLAIN:
        return PLAIN[hint]
    parts = get_args(hint)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(values, parts), max_size=3)
    if get_origin(hint) is tuple:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    assert isinstance(hint, UnionType)
    return st.one_of(*map(values, parts))


def messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(kind).values()
    return st.tuples(*map(values, hints)).map(kind._make)


MESSAGES = st.one_of(*map(messages_of, KINDS))

SIMPLEST = {
    int: 1,
    str: "a",
    float: 0.5,
    bool: True,
    bytes: b"b",
    dict[str, str]: {"k": "v"},
    dict[str, float]: {"k": 0.5},
    dict[str, int]: {"k": 5},
    dict[str, tuple[int | str, ...]]: {"gpu": (0, "MIG-1")},
    tuple[int, ...]: (1, 2),
    tuple[str, ...]: ("a", "b"),
    tuple[bytes, ...]: (b"a", b""),
    bytes | None: None,
}


def example(kind: type[Message]) -> Message:
    return kind._make(SIMPLEST[hint] for hint in get_type_hints(kind).values())


def same(found: list[Message], wanted: list[Message]) -> bool:
    # Named tuples of different kinds are equal where their fields are.
    return found == wanted and list(map(type, found)) == list(map(type, wanted))


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def packed(*fields: object) -> bytes:
    return frame(msgpack.packb(fields))


def feed_all(reader: FrameReader, chunks: list[bytes]) -> list[Message]:
    return [message for chunk in chunks for message in reader.feed(chunk)]


def greeted(role: str) -> Connection:
    connection = Connection()
    connection.receive(greeting(role, 1, 2))
    return connection


def refuses(connection: Connection, data: bytes) -> bool:
    """Whether these bytes close the connection for good."""
    with pytest.raises(ProtocolError):
        connection.receive(data)
    return (
        connection.state is ConnectionState.CLOSED
        and connection.receive(data) == []
        and connection.receive(greeting(WORKER, 1, 2)) == []
        and connection.receive(encode(Done(1, b""))) == []
    )


# Cuts


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_arrives_whole(kind):
    assert same(FrameReader().feed(encode(example(kind))), [example(kind)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_arrives_byte_by_byte(kind):
    message = example(kind)
    data = encode(message)
    reader = FrameReader()

    for position in range(len(data) - 1):
        assert reader.feed(data[position : position + 1]) == []
        assert reader.missing >= 1

    assert same(reader.feed(data[-1:]), [message])
    assert reader.missing == HEADER


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_arrives_cut_at_any_position(kind):
    message = example(kind)
    data = encode(message)
    for cut in range(len(data) + 1):
        chunks = [data[:cut], data[cut:]]
        assert same(feed_all(FrameReader(), chunks), [message])


def test_all_messages_arrive_in_one_chunk():
    messages = list(map(example, KINDS))
    assert same(FrameReader().feed(b"".join(map(encode, messages))), messages)


def test_a_chunk_may_end_one_frame_and_hold_others_and_begin_one():
    first, second, third = (encode(Done(task, b"x" * 20)) for task in (1, 2, 3))
    reader = FrameReader()
    assert reader.feed(first[:5]) == []
    found = reader.feed(first[5:] + second + third[:3])
    assert [message.task for message in found] == [1, 2]
    assert [message.task for message in reader.feed(third[3:])] == [3]


@steady
@given(st.lists(MESSAGES, max_size=8), st.lists(st.integers(0, 2000), max_size=12))
def test_any_messages_arrive_whatever_the_cuts(messages, cuts):
    data = b"".join(map(encode, messages))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[a:b] for a, b in pairwise(edges)]
    assert same(feed_all(FrameReader(), chunks), messages)


@steady
@given(st.sampled_from(ROLES), st.data())
def test_a_connection_gives_what_its_peer_may_say(role, data):
    kinds = sorted(FROM_PEER[role], key=TAGS.__getitem__)
    said = data.draw(st.lists(st.one_of(*map(messages_of, kinds)), max_size=5))
    stream = greeting(role, 3, 4) + b"".join(map(encode, said))
    cut = data.draw(st.integers(0, len(stream)))

    connection = Connection()
    found = connection.receive(stream[:cut]) + connection.receive(stream[cut:])

    assert same(found, [Hello(VERSION, role, 3, 4), *said])
    assert connection.state is ConnectionState.OPEN


def test_missing_never_asks_for_more_than_there_is():
    data = encode(Done(1, bytes(1000))) + encode(Done(2, b""))
    reader, read, asked = FrameReader(), 0, 0
    while read < len(data):
        wanted = reader.missing
        assert 1 <= wanted <= len(data) - read
        reader.feed(data[read : read + wanted])
        read += wanted
        asked += 1
    assert asked == 4


# Cost


def test_a_large_frame_in_many_chunks_is_looked_at_once():
    message = Done(1, bytes(1 << 20))
    data = encode(message)
    chunks = [data[start : start + 512] for start in range(0, len(data), 512)]
    looks = []

    class Watched(FrameReader):
        def _read(self, source):
            looks.append(len(source))
            return super()._read(source)

    reader = Watched()
    buffer = reader._rest
    for number, chunk in enumerate(chunks[:-1], start=1):
        assert reader.feed(chunk) == []
        assert reader._rest is buffer
        assert len(buffer) == 512 * number

    assert same(reader.feed(chunks[-1]), [message])
    # The first chunk for its header, and all of it once.
    assert looks == [512, len(data)]
    assert not buffer


def test_many_small_frames_in_one_chunk_are_looked_at_together():
    data = encode(Done(1, b"")) * 10_000
    looks = []

    class Watched(FrameReader):
        def _read(self, source):
            looks.append(len(source))
            return super()._read(source)

    assert len(Watched().feed(data)) == 10_000
    assert looks == [len(data)]


# Damage


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_message_never_comes(kind):
    data = encode(example(kind))
    for length in range(len(data)):
        assert FrameReader().feed(data[:length]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_that_claims_less_than_it_holds_is_refused(kind):
    body = encode(example(kind))[HEADER:]
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            FrameReader().feed(frame(body[:length]))


@pytest.mark.parametrize("kind", KINDS)
def test_any_byte_may_be_garbled(kind):
    data = encode(example(kind))
    for position in range(len(data)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            spoilt = bytearray(data)
            spoilt[position] ^= mask
            assert only_messages_or_refusal(bytes(spoilt))


def only_messages_or_refusal(data: bytes) -> bool:
    try:
        found = FrameReader().feed(data)
    except ProtocolError:
        return True
    return all(type(message) in TAGS for message in found)


@steady
@given(st.binary(max_size=300))
def test_random_bytes_are_messages_or_refused(data):
    assert only_messages_or_refusal(data)
    assert only_messages_or_refusal(frame(data))


MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=5)
    | st.text(max_size=5)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**60), st.integers(0, 10**9 - 1)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=8,
)


@steady
@given(MSGPACK)
def test_any_msgpack_is_a_message_or_refused(value):
    assert only_messages_or_refusal(frame(msgpack.packb(value)))


@steady
@given(st.integers(-2, 25) | MSGPACK, st.lists(MSGPACK, max_size=6))
def test_any_tag_with_any_fields_is_a_message_or_refused(tag, fields):
    assert only_messages_or_refusal(packed(tag, *fields))


@steady
@given(st.sampled_from(ROLES), st.lists(st.binary(max_size=60), max_size=6))
def test_a_connection_takes_any_bytes_and_then_no_more(role, chunks):
    connection = greeted(role)
    was_refused = False
    for chunk in chunks:
        try:
            found = connection.receive(chunk)
        except ProtocolError:
            assert not was_refused
            was_refused = True
        else:
            assert not (was_refused and found)
    assert (connection.state is ConnectionState.CLOSED) == was_refused


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_too_long_a_length_is_refused_before_any_of_it_comes(length):
    assert refuses(greeted(WORKER), struct.pack("<I", length))


def test_the_longest_length_is_waited_for():
    connection = greeted(WORKER)
    assert connection.receive(struct.pack("<I", LIMIT)) == []
    assert connection.missing == LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arity_is_refused(kind):
    tag, *fields = TAGS[kind], *example(kind)
    wrong = [[*fields, 1], [*fields, None], fields[:-1], [*fields, *fields]]
    for some in wrong if fields else [[1]]:
        with pytest.raises(ProtocolError, match=kind.__name__):
            FrameReader().feed(packed(tag, *some))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_field_types_are_refused(kind):
    tag, *fields = TAGS[kind], *example(kind)
    odd = (1, 1.0, "a", b"b", True, None, [1], {"k": 1}, msgpack.ExtType(5, b""))
    hints = list(get_type_hints(kind).values())
    for position, hint in enumerate(hints):
        allowed = {get_origin(part) or part for part in get_args(hint) or (hint,)}
        if get_origin(hint) is dict:
            allowed = {dict}
        elif get_origin(hint) is tuple:
            allowed = {list}  # packed, the two are the same
        for value in odd:
            if type(value) in allowed:
                continue
            some = [*fields[:position], value, *fields[position + 1 :]]
            with pytest.raises(ProtocolError, match=kind.__name__):
                FrameReader().feed(packed(tag, *some))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_field_holds_is_of_its_type(kind):
    tag, *fields = TAGS[kind], *example(kind)
    for position, (name, hint) in enumerate(get_type_hints(kind).items()):
        for odd in (None, (), {"k": ()}, -1.5, True):
            held = {tuple: [odd], dict: {"k": odd}}.get(get_origin(hint))
            if held is None or (odd == () and "tuple" in str(get_args(hint)[1])):
                continue
            some = [*fields[:position], held, *fields[position + 1 :]]
            if odd == -1.5 and hint == dict[str, float]:
                FrameReader().feed(packed(tag, *some))
                continue
            with pytest.raises(ProtocolError, match=f"{kind.__name__}.{name} holds"):
                FrameReader().feed(packed(tag, *some))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x92\x01"])
@pytest.mark.parametrize("depth", [10, 500, 1000, 5000, 100_000])
def test_deeply_nested_msgpack_is_refused(opening, depth):
    with pytest.raises(ProtocolError):
        FrameReader().feed(frame(opening * depth + b"\xc0"))


@pytest.mark.parametrize("depth", [10, 500, 1000])
def test_a_deep_tag_is_refused_however_little_stack_is_left(depth):
    """To print such a tag would itself need a deep stack."""
    data = frame(b"\x92" + b"\x91" * depth + b"\xc0\xc0")

    def at_depth(left: int) -> None:
        if left:
            at_depth(left - 1)
        else:
            with pytest.raises(ProtocolError):
                FrameReader().feed(data)

    at_depth(700)


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
        assert refuses(greeted(role), frame(body))
        assert refuses(Connection(role), frame(body))
    assert refuses(Connection(), frame(body))


def test_a_refusal_is_short_however_large_the_frame():
    huge = "x" * 100_000
    for fields in ([huge], [3, huge], [3, *[1] * 10_000], [huge] * 3):
        with pytest.raises(ProtocolError) as caught:
            FrameReader().feed(packed(*fields))
        assert len(str(caught.value)) < 300


# Turns


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_greeting_may_come_first(kind):
    if kind is not Hello:
        assert refuses(Connection(), encode(example(kind)))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_says_only_what_its_role_may(role, kind):
    data = encode(example(kind))
    if kind in FROM_PEER[role]:
        assert same(greeted(role).receive(data), [example(kind)])
    else:
        assert refuses(greeted(role), data)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_driver_says_only_what_a_role_hears(role, kind):
    data = encode(example(kind))
    if kind in TO_PEER[role]:
        assert same(Connection(role).receive(data), [example(kind)])
    else:
        assert refuses(Connection(role), data)


@pytest.mark.parametrize("role", ROLES)
def test_a_second_greeting_is_refused(role):
    assert refuses(greeted(role), greeting(role, 1, 2))
    assert refuses(Connection(), greeting(role, 1, 2) * 2)


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 1, -1, 2**64 - 1])
def test_another_version_is_refused(version):
    hello = Hello(version, WORKER, 1, 2)
    assert refuses(Connection(), encode(hello))


@pytest.mark.parametrize("role", ["", "driver", "Worker", "\udcff", "x" * 10_000])
def test_an_unknown_role_is_refused(role):
    assert refuses(Connection(), greeting(role, 1, 2))


def test_what_precedes_a_fault_in_the_same_chunk_is_dropped_with_it():
    connection = greeted(WORKER)
    assert refuses(connection, encode(Done(1, b"")) + encode(Exit()))


def test_after_a_fault_in_the_middle_of_a_frame_the_rest_is_not_read():
    connection = Connection(WORKER)
    data = encode(Run(1, 2, b"payload", False))
    assert connection.receive(data[:6]) == []
    spoilt = bytes([data[6] ^ 0xFF]) + data[7:] + frame(b"\xc0")
    assert refuses(connection, spoilt)
    assert connection.receive(data[6:]) == []
