from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import pytest

from aiogpu.errors import ProtocolError, SerializationError
from aiogpu.wire.codec import (
    HEADER,
    LARGE,
    MAX_DEPTH,
    FrameReader,
    RecordCodec,
    decode,
    encode,
    encode_all,
)
from aiogpu.wire.messages import (
    TAGS,
    ChildItems,
    Define,
    Done,
    Exit,
    Failed,
    Forked,
    Items,
    Keep,
    Log,
)


def test_a_frame_is_a_length_and_an_array():
    assert encode(Keep(3)) == b"\x03\0\0\0" + msgpack.packb([TAGS[Keep], 3])


def test_decode_undoes_encode():
    assert decode(encode(Done(1, b"x"))[HEADER:]) == Done(1, b"x")
    assert decode(memoryview(encode(Done(1, b"x")))[HEADER:]) == Done(1, b"x")


@pytest.mark.parametrize("size", [0, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE])
def test_a_payload_of_any_size_travels(size):
    message = Done(1, bytes(size))
    assert FrameReader().feed(encode(message)) == [message]


def test_undecodable_text_travels():
    line = Failed(1, "raised", "\udcff", "a\ud800b", "\udfff\n", None)
    assert FrameReader().feed(encode(line)) == [line]


def test_bytes_that_are_no_text_travel():
    line = Log(1, 2, b"\xff\xfe\x00")
    assert FrameReader().feed(encode(line)) == [line]


def test_a_message_above_the_limit_is_not_sent():
    size = len(encode(Done(1, bytes(100)))) - HEADER
    assert encode(Done(1, bytes(100)), limit=size)
    with pytest.raises(SerializationError, match=f"message of {size} bytes exceeds"):
        encode(Done(1, bytes(100)), limit=size - 1)


@pytest.mark.parametrize(
    "message",
    [
        Done(1, bytes(100)),
        Items(1, (bytes(50), bytes(50))),
        ChildItems(1, (bytes(50), bytes(50))),
        Failed(1, "raised", "x" * 100, "", "", None),
    ],
)
def test_nor_is_it_among_others(message):
    """Whichever field is long: a reader would refuse the frame and all after it."""
    size = len(encode(message)) - HEADER
    whole = encode_all([Exit(), message], limit=size)
    assert FrameReader(limit=size).feed(whole) == [Exit(), message]
    with pytest.raises(SerializationError, match=f"message of {size} bytes exceeds"):
        encode_all([Exit(), message], limit=size - 1)


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"k": value}
    return value


def test_a_value_that_msgpack_refuses_is_not_sent_and_spoils_nothing():
    deep = Define(1, 1, "f", nested(2000), b"")
    with pytest.raises(SerializationError, match="too large for a frame"):
        encode(deep)
    with pytest.raises(SerializationError, match="too large for a frame"):
        encode_all([Exit(), deep])
    with pytest.raises(OverflowError):
        encode(Forked(1, 1 << 70))
    assert FrameReader().feed(encode(Keep(3))) == [Keep(3)]


def test_a_reader_waits_for_a_header_first():
    reader = FrameReader()
    assert reader.missing == HEADER
    assert reader.feed(b"\x01") == []
    assert reader.missing == HEADER - 1
    assert reader.feed(b"") == []
    assert reader.missing == HEADER - 1


def test_a_reader_then_waits_for_the_rest_of_the_frame():
    data = encode(Done(1, bytes(50)))
    reader = FrameReader()
    reader.feed(data[:HEADER])
    assert reader.missing == len(data) - HEADER
    reader.feed(data[HEADER:-1])
    assert reader.missing == 1
    assert reader.feed(data[-1:]) == [Done(1, bytes(50))]
    assert reader.missing == HEADER


def test_a_reader_waits_anew_behind_a_whole_frame():
    data = encode(Exit())
    reader = FrameReader()
    assert reader.feed(data + data[:5]) == [Exit()]
    assert reader.missing == len(data) - 5


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "header only"])
def test_a_reader_refuses_a_frame_above_its_limit(whole):
    data = encode(Done(1, bytes(50)))
    exact = FrameReader(limit=len(data) - HEADER)
    assert exact.feed(data) == [Done(1, bytes(50))]
    small = FrameReader(limit=len(data) - HEADER - 1)
    with pytest.raises(ProtocolError, match=r"exceeds the limit of \d+$"):
        small.feed(data if whole else data[:HEADER])


def test_a_reader_refuses_what_is_too_long_behind_a_whole_frame():
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        FrameReader(limit=10).feed(encode(Exit()) + b"\xff\xff\xff\xff")


def test_a_reader_refuses_what_is_no_message_in_a_cut_frame():
    reader = FrameReader()
    assert reader.feed(b"\x01\0\0") == []
    with pytest.raises(ProtocolError, match="no msgpack"):
        reader.feed(b"\0\xc1")


@pytest.mark.parametrize("size", [0, 3, LARGE, LARGE + 1])
def test_what_goes_out_together_is_the_frames_of_each(size: int) -> None:
    messages = [Done(1, bytes(size)), Exit(), Done(2, b"x")]
    assert encode_all(messages) == b"".join(map(encode, messages))
    assert encode_all([]) == b""
    frames = [one if place % 2 else encode(one) for place, one in enumerate(messages)]
    assert encode_all(frames) == b"".join(map(encode, messages))


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
def test_records_travel_by_their_fields(value):
    assert CODEC.load(CODEC.dump(value)) == value


def test_sequences_become_tuples():
    assert CODEC.load(CODEC.dump([Part("a"), [1]])) == (Part("a"), (1,))
    assert CODEC.load(CODEC.dump(Whole([1]))) == ((1,), None)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1 << 64, nested(2000)])
def test_what_has_no_plain_form_is_not_packed(value):
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
def test_what_is_no_record_is_told(data):
    with pytest.raises(ProtocolError, match="cannot be read"):
        CODEC.load(data)


def test_records_within_records_without_end_are_told():
    value: object = Part("a")
    for _ in range(MAX_DEPTH - 1):
        value = Part("a", (value,))  # type: ignore[arg-type]
    assert CODEC.load(CODEC.dump(value)) == value
    data = msgpack.packb(["a", []])
    for _ in range(2000):
        data = msgpack.packb(["a", msgpack.ExtType(0, data)])
    with pytest.raises(ProtocolError, match="cannot be read"):
        CODEC.load(data)
