"""Encoding and decoding of messages, also cut or damaged."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import pairwise
from types import UnionType
from typing import NamedTuple, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import SerializationError
from aiogpu.wire.codec import (
    HEADER,
    LARGE,
    MAX_DEPTH,
    FrameReader,
    RecordCodec,
    encode,
    encode_all,
    from_fields,
    pack,
    unpack_as,
)
from aiogpu.wire.messages import (
    CHUNKED,
    IN_GROUP,
    TAGS,
    Bind,
    ChildItems,
    Define,
    Done,
    Exit,
    Failed,
    Forked,
    Items,
    Keep,
    Message,
    ProtocolError,
    Setup,
    descriptor_path,
    output_path,
    plain_name,
    socket_path,
    visible,
)
from tests.support.sampling import examples
from tests.unit.wire.cases import example
from tests.unit.wire.spoiling import framed

steady = settings(
    derandomize=True, database=None, deadline=None, max_examples=examples(100)
)


PLAIN = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    # Also lone surrogates, as in undecodable file names.
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


KINDS = list(TAGS)


MESSAGES = st.one_of(*map(messages_of, KINDS))


def same(found: list[Message], wanted: list[Message]) -> bool:
    # Named tuples of different classes are equal if their fields are.
    return found == wanted and list(map(type, found)) == list(map(type, wanted))


def packed(*fields: object) -> bytes:
    return framed(msgpack.packb(fields))


def feed_all(reader: FrameReader, chunks: list[bytes]) -> list[Message]:
    return [message for chunk in chunks for message in reader.feed(chunk)]


# Whole


def test_plain_name_strips_group_and_chunk_suffix():
    assert [plain_name(f"add{end}") for end in ("", CHUNKED, f"{IN_GROUP}io")] == (
        ["add"] * 3
    )


def test_frame_is_a_length_and_a_tagged_array():
    assert encode(Keep(3)) == b"\x03\0\0\0" + msgpack.packb([TAGS[Keep], 3])
    assert set(TAGS) == set(get_args(Message))
    assert sorted(TAGS.values()) == list(range(1, len(TAGS) + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_message_arrives_however_the_stream_is_cut(kind):
    message, data = example(kind), encode(example(kind))
    for cut in range(len(data) + 1):
        assert same(feed_all(FrameReader(), [data[:cut], data[cut:]]), [message])
    single = [data[place : place + 1] for place in range(len(data))]
    assert same(feed_all(FrameReader(), single), [message])


@steady
@given(st.lists(MESSAGES, max_size=8), st.lists(st.integers(0, 2000), max_size=12))
def test_any_messages_arrive_however_the_stream_is_cut(messages, cuts):
    data = b"".join(map(encode, messages))
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[a:b] for a, b in pairwise(edges)]
    assert same(feed_all(FrameReader(), chunks), messages)


@pytest.mark.parametrize("size", [0, 3, LARGE - 1, LARGE, 3 * LARGE])
def test_messages_of_any_size_are_encoded_together(size: int) -> None:
    """Some messages may be encoded already."""
    messages = [Done(1, bytes(size)), Exit(), Done(2, b"x")]
    whole = b"".join(map(encode, messages))
    assert FrameReader().feed(whole) == messages
    assert encode_all(messages) == whole
    assert encode_all([encode(messages[0]), *messages[1:]]) == whole
    assert encode_all([]) == b""


def test_missing_counts_the_rest_of_header_or_frame():
    ends = []
    data = b""
    for message in (Done(1, bytes(50)), Exit(), Done(2, b"x")):
        data += encode(message)
        ends.append(len(data))
    for cut in range(len(data)):
        start = max([0, *(end for end in ends if end <= cut)])
        header = start + HEADER
        expected = min(end for end in ends if end > cut) if cut >= header else header
        once, bytewise = FrameReader(), FrameReader()
        once.feed(data[:cut])
        feed_all(bytewise, [b"", *(data[n : n + 1] for n in range(cut))])
        assert once.missing == bytewise.missing == expected - cut


# Limits and cost


@pytest.mark.parametrize(
    "message",
    [
        Done(1, bytes(100)),
        Items(1, (bytes(50), bytes(50))),
        ChildItems(1, (bytes(50), bytes(50))),
        Failed(1, "raised", "x" * 100, "", "", None),
    ],
)
def test_message_above_the_limit_is_refused(message):
    """For any long field: a reader would close the connection."""
    size = len(encode(message)) - HEADER
    whole = encode_all([Exit(), message], limit=size)
    assert FrameReader(limit=size).feed(whole) == [Exit(), message]
    assert encode(message, limit=size)
    refusal = f"message of {size} bytes exceeds"
    with pytest.raises(SerializationError, match=refusal):
        encode(message, limit=size - 1)
    with pytest.raises(SerializationError, match=refusal):
        encode_all([Exit(), message], limit=size - 1)


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"k": value}
    return value


def test_value_that_msgpack_refuses_leaves_the_packer_usable():
    deep = Define(1, 1, "f", nested(2000), b"")
    with pytest.raises(SerializationError, match="too large for a frame"):
        encode(deep)
    with pytest.raises(SerializationError, match="too large for a frame"):
        encode_all([Exit(), deep])
    with pytest.raises(OverflowError):
        encode(Forked(1, 1 << 70))
    assert FrameReader().feed(encode(Keep(3))) == [Keep(3)]


# Damage


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_message_is_another_message_or_refused(kind):
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
@given(
    st.binary(max_size=300)
    | MSGPACK.map(msgpack.packb)
    | st.tuples(st.integers(-2, 25) | MSGPACK, st.lists(MSGPACK, max_size=6)).map(
        lambda drawn: msgpack.packb([drawn[0], *drawn[1]])
    )
)
def test_any_bytes_are_a_message_or_refused(body):
    assert only_messages_or_refusal(body)
    assert only_messages_or_refusal(framed(body))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_field_types_are_refused(kind):
    tag, *fields = TAGS[kind], *example(kind)
    other = (1, 1.0, "a", b"b", True, None, [1], {"k": 1}, msgpack.ExtType(5, b""))
    hints = list(get_type_hints(kind).values())
    for position, hint in enumerate(hints):
        allowed = {get_origin(part) or part for part in get_args(hint) or (hint,)}
        if get_origin(hint) is dict:
            allowed = {dict}
        elif get_origin(hint) is tuple:
            allowed = {list}  # packed, the two are the same
        for value in other:
            if type(value) in allowed:
                continue
            some = [*fields[:position], value, *fields[position + 1 :]]
            with pytest.raises(ProtocolError, match=kind.__name__):
                FrameReader().feed(packed(tag, *some))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_item_types_are_refused(kind):
    tag, *fields = TAGS[kind], *example(kind)
    for position, (name, hint) in enumerate(get_type_hints(kind).items()):
        for other in (None, (), {"k": ()}, -1.5, True):
            held = {tuple: [other], dict: {"k": other}}.get(get_origin(hint))
            if held is None or (other == () and "tuple" in str(get_args(hint)[1])):
                continue
            some = [*fields[:position], held, *fields[position + 1 :]]
            if other == -1.5 and hint == dict[str, float]:
                FrameReader().feed(packed(tag, *some))
                continue
            with pytest.raises(
                ProtocolError, match=f"{kind.__name__}.{name} has an item"
            ):
                FrameReader().feed(packed(tag, *some))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x92\x01"])
@pytest.mark.parametrize("depth", [10, 500, 1000, 5000, 100_000])
def test_deeply_nested_msgpack_is_refused(opening, depth):
    with pytest.raises(ProtocolError):
        FrameReader().feed(framed(opening * depth + b"\xc0"))


def test_error_text_is_short_for_a_large_frame():
    huge = "x" * 100_000
    for fields in ([huge], [3, huge], [3, *[1] * 10_000], [huge] * 3):
        with pytest.raises(ProtocolError) as caught:
            FrameReader().feed(packed(*fields))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (None, "holds a NoneType, not a message"),
        ([1, 2], "holds a list, not a message"),
        ({}, "holds a dict, not a message"),
        ((), "holds a tuple, not a message"),
        (Forked(1, 2), "holds a Forked, not a message"),
        (("a",), "begins with a str, not with a tag"),
        ((True,), "begins with a bool, not with a tag"),
        ((1.0,), "begins with a float, not with a tag"),
        (({},), "begins with a dict, not with a tag"),
        ((0,), "the unknown tag 0"),
        ((len(TAGS) + 1,), f"the unknown tag {len(TAGS) + 1}"),
        ((TAGS[Exit], 1), r"Exit does not take \(int\)"),
        ((TAGS[Done], 1, "text"), r"Done does not take \(int, str\)"),
        ((TAGS[Done], True, b""), r"Done does not take \(bool, bytes\)"),
        ((TAGS[Done],), r"Done does not take \(\)"),
        ((TAGS[Done], *[1] * 50), r"Done does not take \(int(, int){7}\)"),
    ],
)
def test_error_text_says_what_is_wrong(fields, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        from_fields(fields)


# Records, and what else is packed


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


class Whole(NamedTuple):
    parts: object
    by_name: object = None


CODEC = RecordCodec(Part)


@pytest.mark.parametrize(
    "value",
    [
        None,
        ("a", 1, 2.5, True, None, b"x", "\udcff"),
        Part("a", (1, 2)),
        {"a": (Part("b"), {1: Part("\udcff")}), 2: ()},
    ],
)
def test_records_round_trip_by_their_fields(value):
    assert CODEC.load(CODEC.dump(value)) == value


def test_sequences_become_tuples():
    assert CODEC.load(CODEC.dump([Part("a"), [1]])) == (Part("a"), (1,))
    assert CODEC.load(CODEC.dump(Whole([1]))) == ((1,), None)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1 << 64, nested(2000)])
def test_unknown_classes_are_not_packed(value):
    with pytest.raises(SerializationError, match="cannot be packed"):
        CODEC.dump(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        CODEC.dump(1) + b"x",
        pickle.dumps(Part("a")),
        msgpack.packb(msgpack.ExtType(0, msgpack.packb([]))),
        msgpack.packb(msgpack.ExtType(0, msgpack.packb(1))),
        msgpack.packb(msgpack.ExtType(0, msgpack.packb([1, 2, 3]))),
        msgpack.packb(msgpack.ExtType(1, msgpack.packb(["a"]))),
    ],
)
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(ProtocolError, match="cannot be read"):
        CODEC.load(data)


def test_deeply_nested_records_are_refused():
    value: object = Part("a")
    for _ in range(MAX_DEPTH - 1):
        value = Part("a", (value,))  # type: ignore[arg-type]
    assert CODEC.load(CODEC.dump(value)) == value
    data = msgpack.packb(["a", []])
    for _ in range(2000):
        data = msgpack.packb(["a", msgpack.ExtType(0, data)])
    with pytest.raises(ProtocolError, match="cannot be read"):
        CODEC.load(data)


GRANT = Bind(
    {"CUDA_VISIBLE_DEVICES": "1,GPU-x", "AIOGPU_LEASE": "t.1"},
    {"GPU": (1, "GPU-x"), "neuron_cores": ()},
    (1 << 30, 0),
    (3, 4),
)


def test_grant_round_trips():
    assert unpack_as(Bind, pack(GRANT)) == GRANT
    assert unpack_as(Bind, pack(Bind({}, {}))) == Bind({}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        msgpack.packb([1]),
        msgpack.packb([{}, [], [], []]),
        msgpack.packb([{"A": 1}, {}, [], []]),
        msgpack.packb([{}, {}, ["1"], []]),
        pickle.dumps(GRANT),
    ],
)
def test_bytes_that_are_no_grant_are_refused(data):
    with pytest.raises(ProtocolError):
        unpack_as(Bind, data)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"", b""),
        (b"plain", b"plain"),
        (b"   ", b"   "),
        (b"from elsewhere\r", b"from elsewhere"),
        (b"\r10%\r20%", b"20%"),
        (b"10%\r20%\r", b"20%"),
        (b"\r10%\r    \r", b""),
        (b"\r10%\r    ", b""),
        (b"\r", b""),
    ],
)
def test_visible_part_of_a_line(line: bytes, shown: bytes) -> None:
    assert visible(line) == shown


def test_setup_is_plain_values():
    given = Setup(["/src"], "node", "/run/node", driver=1, page=3, preload=["json"])
    assert Setup(*eval(repr(tuple(given)))) == given
    assert socket_path("/run/node") == "/run/node/node.sock"
    assert output_path("/run/node", 2, 1) == "/run/node/2.1"
    assert descriptor_path("/run/node") == "/run/node/memory.sock"
