"""What is pickled beside the pickle: buffers, handles, several results."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiogpu.errors import MisuseError
from aiogpu.serialization.references import (
    SHARED_FROM,
    STREAM_SHARED_FROM,
    PickledValue,
    add_handle,
    add_reference,
    closed_node_error,
    collect_references,
    extract_handles,
)
from aiogpu.serialization.serializer import (
    NO_ARGUMENTS,
    SplitResults,
    dump_arguments,
    dump_result,
    dump_whole,
    load,
    load_arguments,
    load_result,
    split_results,
)
from tests.unit.wire.parcels import carried

LARGE = np.arange(SHARED_FROM // 8, dtype=np.int64)


class Reference:
    def __init__(self, identity):
        self.id = identity


class Handle:
    """As the handles of the api are."""

    __aiogpu_handle__ = True

    def __init__(self, identity):
        self.reference = Reference(identity)

    def share(self):
        return self.reference

    def __reduce__(self):
        return str, (add_handle("f", self.share),)


def test_handles_among_the_arguments_leave_their_places():
    one, two = Handle(1), Handle(2)
    args, kwargs, handles = extract_handles((5, one), {"x": two, "y": 1})
    assert (args, kwargs) == ((5, None), {"x": None, "y": 1})
    assert list(handles.items()) == [(1, one), ("x", two)]
    assert extract_handles((5,), {}) == ((5,), {}, {})
    assert extract_handles((), {"x": 1}) == ((), {"x": 1}, {})


def test_the_values_come_into_these_places():
    one, two = Handle(1), Handle(2)
    outgoing = dump_arguments("f", (one, 5, one), {"x": two, "y": 6})
    assert outgoing.handles == (one, one, two)
    assert outgoing.places == (0, 2, "x")
    parts = tuple(map(dump_whole, ["a", "b", "c"]))
    payload = carried(outgoing._replace(parts=parts))
    assert load_arguments(payload) == (("a", 5, "b"), {"x": "c", "y": 6})


def test_the_callers_own_arguments_stay_as_they_are():
    kwargs = {"x": Handle(1)}
    dump_arguments("f", (), kwargs)
    assert isinstance(kwargs["x"], Handle)


def test_a_handle_within_an_argument_is_listed():
    handle = Handle(7)
    outgoing = dump_arguments("f", ({"h": [handle]},), {})
    assert outgoing.references == (handle.reference,)
    assert not outgoing.handles
    assert load_arguments(carried(outgoing)) == (({"h": ["7"]},), {})


def test_a_handle_within_a_result_is_listed():
    handle = Handle(7)
    assert dump_result([handle]).references == (handle.reference,)


def test_elsewhere_a_handle_is_not_pickled():
    with pytest.raises(MisuseError, match="the handle of f can only be pickled"):
        dump_whole(Handle(1))


def test_each_thread_lists_its_own():
    with collect_references() as outer:
        with collect_references() as inner:
            add_handle("f", lambda: Reference(1))
        add_handle("f", lambda: Reference(2))

        def other():
            with pytest.raises(MisuseError):
                add_handle("f", lambda: Reference(3))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [one.id for one in inner] == [1]
    assert [one.id for one in outer] == [2]


def test_large_buffers_stay_beside_the_pickle():
    outgoing = dump_arguments("f", (LARGE,), {"n": 1})
    assert isinstance(outgoing, PickledValue)
    assert outgoing.is_large
    assert outgoing.split() == ([memoryview(LARGE).cast("B")], outgoing.stream)
    (args, kwargs) = load_arguments(carried(outgoing))
    assert (args[0] == LARGE).all()
    assert not args[0].flags.writeable
    assert kwargs == {"n": 1}


@pytest.mark.parametrize("dumped", ["result", "argument"])
@pytest.mark.parametrize(
    "value", [b"x" * SHARED_FROM, "y" * SHARED_FROM, list(range(SHARED_FROM))]
)
def test_a_large_pickle_is_no_plain_payload(value, dumped):
    outgoing = (
        dump_result(value) if dumped == "result" else dump_arguments("f", (value,), {})
    )
    assert isinstance(outgoing, PickledValue)
    assert outgoing.is_large
    assert outgoing.split() == ([memoryview(outgoing.stream)], b"")
    found = load(carried(outgoing))
    assert (found if dumped == "result" else found[0][0]) == value


def test_buffers_stay_in_the_pickle_while_there_is_room():
    half, small = np.full(SHARED_FROM // 2, 1, np.uint8), np.full(100, 2, np.uint8)
    outgoing = dump_result([half, half + 1, small, LARGE])
    assert [each.nbytes for each in outgoing.buffers] == [
        SHARED_FROM // 2,
        LARGE.nbytes,
    ]
    assert SHARED_FROM // 2 < len(outgoing.stream) < SHARED_FROM // 2 + 1000
    found = load(carried(outgoing))
    assert [int(each[0]) for each in found] == [1, 2, 2, 0]
    assert [each.flags.writeable for each in found] == [True, False, True, False]


def test_a_long_pickle_goes_along_with_its_buffers():
    short, long = (
        dump_result([b"x", LARGE]),
        dump_result([b"x" * STREAM_SHARED_FROM, LARGE]),
    )
    assert short.split() == ([*short.buffers], short.stream)
    assert long.split() == ([memoryview(long.stream), *long.buffers], b"")
    assert len(long.stream) < SHARED_FROM
    alone = PickledValue(long.stream)
    assert alone.is_plain
    assert alone.split() == ([], long.stream)


@pytest.mark.parametrize("value", [1, "x", b"x", None, [1], np.arange(3)])
def test_a_small_one_is(value):
    assert type(dump_result(value)) is bytes
    assert type(dump_arguments("f", (value,), {})) is bytes


def test_no_arguments_are_one_payload():
    assert dump_arguments("f", (), {}) == NO_ARGUMENTS


def test_a_call_that_wants_several_results_says_so():
    outgoing = dump_arguments("f", (1,), {}, returns=2)
    assert outgoing.returns == 2
    assert load_arguments(carried(outgoing)) == ((1,), {})


def test_several_results_are_payloads_of_their_own():
    payload = carried(dump_arguments("f", (), {}, returns=3))
    results = split_results((1, LARGE, "z"), payload)
    assert type(results) is SplitResults
    parts = carried(dump_result(results)).parts
    assert load_result(parts[0]) == 1
    assert (load_result(parts[1]) == LARGE).all()
    assert load_result(parts[2]) == "z"


def test_one_result_is_what_it_is():
    assert split_results((1, 2), NO_ARGUMENTS) == (1, 2)
    payload = carried(dump_arguments("f", (Handle(1),), {}))
    assert split_results([1], payload) == [1]


@pytest.mark.parametrize("value", [(1,), (1, 2, 3), [], iter(range(5))])
def test_more_or_fewer_are_told(value):
    payload = carried(dump_arguments("f", (), {}, returns=2))
    with pytest.raises(ValueError, match=r"returned \d objects, but num_returns=2"):
        split_results(value, payload)


@pytest.mark.parametrize("value", [1, None, "ab", b"ab"])
def test_what_is_not_several_is_told(value):
    payload = carried(dump_arguments("f", (), {}, returns=2))
    with pytest.raises(TypeError, match=f"returned a {type(value).__name__}, but"):
        split_results(value, payload)


def test_what_goes_along_goes_with_the_pickle_that_is_made():
    one, other = Reference(1), Reference(2)
    assert not add_reference(one), "nothing is sent"
    with collect_references() as first:
        assert add_reference(one)
        with collect_references() as second:
            assert add_reference(other)
    assert (first, second) == ([one], [other])


def test_a_value_of_a_closed_node_is_named():
    assert "the handle of train belongs to a node that was closed" in str(
        closed_node_error("train")
    )
