"""Payloads that refer to values, actors and shared memory."""

from __future__ import annotations

import pickle
import threading

import msgpack
import pytest

from aiogpu.errors import MisuseError, SerializationError
from aiogpu.serialization.exceptions import RAISED, pack_failure, unpack_failure
from aiogpu.serialization.payload import (
    MARK,
    Contents,
    Payload,
    has_handles,
    is_compound,
    opened,
    pack,
    result_part,
    unpack,
)
from aiogpu.serialization.references import (
    ActorReference,
    add_actor,
    add_handle,
    add_reference,
    closed_node_error,
    collect_references,
    extract_handles,
)
from aiogpu.serialization.serializer import (
    NO_ARGUMENTS,
    dump_arguments,
    dump_result,
    dump_whole,
    load_arguments,
    load_result,
    split_results,
)
from aiogpu.wire import codec as frames
from aiogpu.wire.messages import ProtocolError
from tests.unit.serialization.payloads import carried

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
    """Shared memory that returns the given views and records its calls."""

    def __init__(self, *views):
        self.buffers = [memoryview(view) for view in views]
        self.requests = []

    def views(self, contents):
        self.requests.append(contents.segment)
        return self.buffers


@pytest.mark.parametrize("contents", [Contents(), FULL, FULL._replace(parts=())])
def test_compound_payload_survives_packing(contents):
    payload = pack(contents)
    assert is_compound(payload)
    assert unpack(payload) == contents


def test_pickle_is_no_compound_payload():
    for protocol in range(2, 6):
        assert not is_compound(pickle.dumps(1, protocol))
        with pytest.raises(ProtocolError, match="not a compound one"):
            unpack(pickle.dumps(1, protocol))
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
def test_malformed_payloads_are_refused(body):
    with pytest.raises(ProtocolError):
        unpack(MARK + body)


def test_payload_too_large_to_pack_is_refused(monkeypatch):
    def refuse(fields):
        raise ValueError("bytes object is too large")

    monkeypatch.setattr(frames, "_pack", refuse)
    with pytest.raises(SerializationError, match="too large for a frame"):
        pack(FULL)


def test_payload_keeps_its_references_until_it_is_released():
    value, memory = object(), Memory()
    payload = Payload.of(FULL, (value,), memory, needs=("n",))
    assert payload == pack(FULL)
    assert (payload.contents, payload.parts) == (FULL, FULL.parts)
    assert (payload.holds, payload.source, payload.needs) == ((value,), memory, ("n",))
    assert repr(payload) == f"<Payload of {len(payload)} bytes, segment 7>"
    payload.release()
    assert (payload.holds, payload.parts, payload.needs) == ((), (), ())
    assert payload.source is None
    assert unpack(payload) == FULL
    assert Payload.of(FULL, encoded=b"as it came") == b"as it came"


@pytest.mark.parametrize(
    ("contents", "views"),
    [
        (Contents(b"stream", buffers=(b"a", b"b")), ()),
        (Contents(b"stream", segment=7), (b"a", b"b")),
        (Contents(segment=7), (b"stream", b"a", b"b")),
    ],
    ids=["in the payload", "in the segment", "with the pickle in the segment"],
)
def test_payload_opens_with_its_buffers(contents, views):
    memory = Memory(*views)
    stream, buffers = Payload.of(contents, source=memory).open()
    assert (bytes(stream), list(map(bytes, buffers))) == (b"stream", [b"a", b"b"])
    assert memory.requests == ([7] if views else [])


def test_payload_can_be_placed_in_a_segment_later():
    placed = FULL.in_segment(9, 8192, [(0, 5), (64, 7)])
    assert placed == FULL._replace(segment=9, size=8192, spans=(0, 5, 64, 7))


# Handles


class Reference:
    def __init__(self, identity):
        self.id = identity


class Handle:
    """A handle like those of the API."""

    __aiogpu_handle__ = True

    def __init__(self, identity):
        self.reference = Reference(identity)

    def share(self):
        return self.reference

    def __reduce__(self):
        return str, (add_handle("f", self.share),)


class ActorHandle:
    """A handle to an actor that unpickles as the actor's id."""

    def __init__(self, actor):
        self.actor = actor

    def __reduce__(self):
        add_actor(self.actor, self)
        return int, (self.actor,)


def test_handles_among_the_arguments_leave_places_for_their_values():
    one, two = Handle(1), Handle(2)
    assert extract_handles((5,), {"x": 1}) == ((5,), {"x": 1}, {})
    kwargs = {"x": two, "y": 6}
    outgoing = dump_arguments("f", (one, 5, one), kwargs)
    assert kwargs["x"] is two, "the caller's dictionary is unchanged"
    assert outgoing.handles == (one, one, two)
    assert outgoing.places == (0, 2, "x")
    parts = tuple(map(dump_whole, ["a", "b", "c"]))
    payload = carried(outgoing._replace(parts=parts))
    assert load_arguments(payload) == (("a", 5, "b"), {"x": "c", "y": 6})


def test_handles_inside_arguments_are_listed():
    handle, actor = Handle(7), ActorHandle(5)
    outgoing = dump_arguments("f", ({"h": [handle]}, [actor]), {})
    assert not outgoing.handles
    assert (outgoing.values, outgoing.actors) == ((7,), (5,))
    assert load_arguments(carried(outgoing)) == (({"h": ["7"]}, [5]), {})
    assert dump_result([handle]).references == (handle.reference,)


def test_plain_pickle_refuses_handles_of_values_and_accepts_handles_of_actors():
    with pytest.raises(MisuseError, match="the handle of f can only be pickled"):
        dump_whole(Handle(1))
    assert pickle.loads(pickle.dumps(ActorHandle(5))) == 5
    assert not add_reference(Reference(1)), "nothing is pickled now"
    message = str(closed_node_error("train"))
    assert "the handle of train belongs to a node that was closed" in message


def test_each_pickle_and_each_thread_has_its_own_list_of_references():
    one, two = Reference(1), Reference(2)
    with collect_references() as outer:
        with collect_references() as inner:
            assert add_reference(one)
        add_handle("f", lambda: two)

        def other():
            with pytest.raises(MisuseError):
                add_handle("f", lambda: Reference(3))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert (inner, outer) == ([one], [two])


def test_arguments_can_release_their_actors():
    other = object()
    payload = Payload.of(Contents(actors=(5,)), (ActorReference(5, None), other))
    payload.release_actors()
    assert payload.holds == (other,)


def test_error_holds_the_actors_whose_handles_it_contains():
    def packed(outgoing):
        contents = Contents(outgoing.stream, actors=outgoing.actors)
        return Payload.of(contents, tuple(outgoing.references))

    error = ValueError(ActorHandle(5))
    failed = pack_failure(1, RAISED, error, "", packed)
    assert failed.payload.contents.actors == (5,)
    assert unpack_failure(failed, "f").args == (5,)
    plain = pack_failure(1, RAISED, error, "")
    assert type(plain.payload) is bytes
    assert unpack_failure(plain, "f").args == (5,)


def test_payload_has_the_handles_of_its_parts():
    plain, holding = Payload.of(Contents()), Payload.of(Contents(values=(3,)))
    outer = Payload.of(Contents(parts=(b"plain", b"other")))
    assert not any(map(has_handles, (b"plain", plain, outer)))
    outer.parts = (b"plain", holding)
    assert has_handles(holding)
    assert has_handles(outer)


# Several results


def test_several_results_are_separate_payloads():
    arguments = dump_arguments("f", (1,), {}, returns=3)
    assert load_arguments(carried(arguments)) == ((1,), {})
    results = split_results((1, [2], "z"), carried(arguments))
    payload = carried(dump_result(results))
    parts = [result_part(payload, part) for part in range(3)]
    assert [load_result(part) for part in parts] == [1, [2], "z"]
    assert result_part(payload, -1) is payload
    assert result_part(b"plain", 0) == b"plain"
    one = carried(dump_arguments("f", (Handle(1),), {}))
    assert split_results((1, 2), NO_ARGUMENTS) == (1, 2)
    assert split_results([1], one) == [1]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ((1,), ValueError, "returned 1 objects, but num_returns=2"),
        (iter(range(5)), ValueError, "returned 5 objects, but num_returns=2"),
        (None, TypeError, "returned a NoneType, but num_returns=2"),
        ("ab", TypeError, "returned a str, but num_returns=2"),
        (b"ab", TypeError, "returned a bytes, but num_returns=2"),
    ],
)
def test_wrong_number_of_results_is_refused(value, error, message):
    payload = carried(dump_arguments("f", (), {}, returns=2))
    with pytest.raises(error, match=message):
        split_results(value, payload)


def find(identity):
    """Find the value of a handle that is unpickled."""
    return opened.find(identity)


class Restored:
    def __reduce__(self):
        return find, (-7,)


def test_handle_finds_its_value_in_the_opened_payload():
    value = Reference(-7)
    contents = Contents(stream=pickle.dumps(Restored()), values=(-7,))
    assert Payload.of(contents, (None, value)).load() is value
    with pytest.raises(ProtocolError, match="does not hold the value -7"):
        Payload.of(contents).load()
    with pytest.raises(ProtocolError):
        find(-7)
