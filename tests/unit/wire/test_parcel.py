"""Payloads that refer to values and to shared memory."""

from __future__ import annotations

import pickle

import msgpack
import pytest

from aiogpu.errors import ProtocolError, SerializationError
from aiogpu.serialization.payload import (
    MARK,
    Contents,
    Payload,
    has_handles,
    is_compound,
    pack,
    result_part,
    unpack,
)
from aiogpu.wire import codec as frames

FULL = Contents(
    stream=b"stream",
    segment=7,
    size=4096,
    spans=(0, 10, 64, 20),
    buffers=(b"a", b"b"),
    needs=(3, -4),
    places=(0, "x"),
    parts=(b"p", MARK),
    values=(5,),
    returns=2,
)


class Memory:
    def __init__(self, *views):
        self.found = [memoryview(view) for view in views]
        self.asked = []

    def views(self, contents):
        self.asked.append(contents.segment)
        return self.found


@pytest.mark.parametrize("contents", [Contents(), FULL, FULL._replace(parts=())])
def test_what_it_says_arrives(contents):
    payload = pack(contents)
    assert is_compound(payload)
    assert unpack(payload) == contents


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_is_none(protocol):
    assert not is_compound(pickle.dumps(1, protocol))
    with pytest.raises(ProtocolError, match="not a compound one"):
        unpack(pickle.dumps(1, protocol))


def test_nothing_is_none():
    assert not is_compound(b"")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb(7),
        msgpack.packb(list(FULL)[:-1]),
        msgpack.packb([*FULL, 1]),
        msgpack.packb(list(FULL._replace(segment="7"))),
        msgpack.packb(list(FULL._replace(spans=(1, "2")))),
        msgpack.packb(list(FULL._replace(spans=(1, 2, 3)))),
        msgpack.packb(list(FULL._replace(needs=(3,), parts=()))),
        msgpack.packb(list(FULL._replace(places=(0, None)))),
        msgpack.packb(list(FULL._replace(parts=("text",)))),
    ],
)
def test_what_is_ill_formed_is_refused(body):
    with pytest.raises(ProtocolError):
        unpack(MARK + body)


def test_what_is_too_large_to_pack_is_told(monkeypatch):
    def refuse(fields):
        raise ValueError("bytes object is too large")

    monkeypatch.setattr(frames, "_pack", refuse)
    with pytest.raises(SerializationError, match="too large for a frame"):
        pack(FULL)


def test_it_is_its_bytes_and_knows_what_they_say():
    held = object()
    parcel = Payload.of(FULL, (held,), needs=("n",))
    assert parcel == pack(FULL)
    assert (parcel.contents, parcel.holds, parcel.needs) == (FULL, (held,), ("n",))
    assert parcel.parts == FULL.parts
    assert repr(parcel) == f"<Payload of {len(parcel)} bytes, segment 7>"
    assert Payload.of(FULL, encoded=b"as it came") == b"as it came"


def test_it_opens_with_the_buffers_that_it_carries():
    parcel = Payload.of(Contents(b"stream", buffers=(b"a", b"b")))
    assert parcel.open() == (b"stream", (b"a", b"b"))


def test_it_opens_with_those_of_its_segment():
    memory = Memory(b"a", b"b")
    parcel = Payload.of(Contents(b"stream", segment=7), source=memory)
    stream, buffers = parcel.open()
    assert (stream, list(map(bytes, buffers))) == (b"stream", [b"a", b"b"])
    assert memory.asked == [7]


def test_its_pickle_may_be_there_as_well():
    memory = Memory(b"stream", b"a")
    stream, buffers = Payload.of(Contents(segment=7), source=memory).open()
    assert (bytes(stream), list(map(bytes, buffers))) == (b"stream", [b"a"])


def test_it_may_be_placed_in_a_segment_later():
    placed = FULL.in_segment(9, 8192, [(0, 5), (64, 7)])
    assert (placed.segment, placed.size) == (9, 8192)
    assert placed.spans == (0, 5, 64, 7)
    assert placed.stream == FULL.stream


def test_it_keeps_nothing_alive_once_it_has_let_go():
    parcel = Payload.of(FULL, (object(),), source=Memory(), needs=("n",))
    parcel.release()
    assert (parcel.holds, parcel.parts, parcel.needs) == ((), (), ())
    assert parcel.source is None
    assert unpack(parcel) == FULL


def test_one_of_several_results_is_a_part():
    parcel = Payload.of(Contents(parts=(b"a", b"b")))
    assert result_part(parcel, 1) == b"b"
    assert result_part(parcel, -1) is parcel
    assert result_part(b"plain", 0) == b"plain"


def test_handles_are_in_it_or_in_its_parts():
    plain, holding = Payload.of(Contents()), Payload.of(Contents(values=(3,)))
    assert not has_handles(b"plain")
    assert not has_handles(plain)
    assert has_handles(holding)
    outer = Payload.of(Contents(parts=(b"plain", b"other")))
    assert not has_handles(outer)
    outer.parts = (b"plain", holding)
    assert has_handles(outer)
