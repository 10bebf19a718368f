"""What is pickled beside the pickle: buffers, handles, several results."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiogpu.errors import MisuseError
from aiogpu.serialization.references import (
    ALONG,
    APART,
    PickledValue,
    attach,
    collecting,
    of_closed_node,
    refer,
    take_out,
)
from aiogpu.serialization.serializer import (
    NO_ARGUMENTS,
    Results,
    dump_arguments,
    dump_result,
    dump_whole,
    load,
    load_arguments,
    load_result,
    several,
)
from tests.wire.parcels import carried

LARGE = np.arange(APART // 8, dtype=np.int64)


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
        return str, (refer("f", self.share),)


def test_handles_among_the_arguments_leave_their_places():
    one, two = Handle(1), Handle(2)
    assert take_out((5, one), {"x": two, "y": 1}) == ((one, two), (1, "x"))
    assert take_out((5,), {}) == ((), ())
    assert take_out((), {"x": 1}) == ((), ())


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
    with collecting() as outer:
        with collecting() as inner:
            refer("f", lambda: Reference(1))
        refer("f", lambda: Reference(2))

        def other():
            with pytest.raises(MisuseError):
                refer("f", lambda: Reference(3))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [one.id for one in inner] == [1]
    assert [one.id for one in outer] == [2]


def test_large_buffers_stay_beside_the_pickle():
    outgoing = dump_arguments("f", (LARGE,), {"n": 1})
    assert isinstance(outgoing, PickledValue)
    assert outgoing.is_large
    assert outgoing.laid_out() == ([memoryview(LARGE).cast("B")], outgoing.stream)
    (args, kwargs) = load_arguments(carried(outgoing))
    assert (args[0] == LARGE).all()
    assert not args[0].flags.writeable
    assert kwargs == {"n": 1}


@pytest.mark.parametrize("dumped", ["result", "argument"])
@pytest.mark.parametrize("value", [b"x" * APART, "y" * APART, list(range(APART))])
def test_a_large_pickle_is_no_plain_payload(value, dumped):
    outgoing = (
        dump_result(value) if dumped == "result" else dump_arguments("f", (value,), {})
    )
    assert isinstance(outgoing, PickledValue)
    assert outgoing.is_large
    assert outgoing.laid_out() == ([memoryview(outgoing.stream)], b"")
    found = load(carried(outgoing))
    assert (found if dumped == "result" else found[0][0]) == value


def test_buffers_stay_in_the_pickle_while_there_is_room():
    half, small = np.full(APART // 2, 1, np.uint8), np.full(100, 2, np.uint8)
    outgoing = dump_result([half, half + 1, small, LARGE])
    assert [each.nbytes for each in outgoing.buffers] == [APART // 2, LARGE.nbytes]
    assert APART // 2 < len(outgoing.stream) < APART // 2 + 1000
    found = load(carried(outgoing))
    assert [int(each[0]) for each in found] == [1, 2, 2, 0]
    assert [each.flags.writeable for each in found] == [True, False, True, False]


def test_a_long_pickle_goes_along_with_its_buffers():
    short, long = dump_result([b"x", LARGE]), dump_result([b"x" * ALONG, LARGE])
    assert short.laid_out() == ([*short.buffers], short.stream)
    assert long.laid_out() == ([memoryview(long.stream), *long.buffers], b"")
    assert len(long.stream) < APART
    alone = PickledValue(long.stream)
    assert alone.is_plain
    assert alone.laid_out() == ([], long.stream)


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
    results = several((1, LARGE, "z"), payload)
    assert type(results) is Results
    parts = carried(dump_result(results)).parts
    assert load_result(parts[0]) == 1
    assert (load_result(parts[1]) == LARGE).all()
    assert load_result(parts[2]) == "z"


def test_one_result_is_what_it_is():
    assert several((1, 2), NO_ARGUMENTS) == (1, 2)
    payload = carried(dump_arguments("f", (Handle(1),), {}))
    assert several([1], payload) == [1]


@pytest.mark.parametrize("value", [(1,), (1, 2, 3), [], iter(range(5))])
def test_more_or_fewer_are_told(value):
    payload = carried(dump_arguments("f", (), {}, returns=2))
    with pytest.raises(ValueError, match=r"returned \d objects, but num_returns=2"):
        several(value, payload)


@pytest.mark.parametrize("value", [1, None, "ab", b"ab"])
def test_what_is_not_several_is_told(value):
    payload = carried(dump_arguments("f", (), {}, returns=2))
    with pytest.raises(TypeError, match=f"returned a {type(value).__name__}, but"):
        several(value, payload)


def test_what_goes_along_goes_with_the_pickle_that_is_made():
    one, other = Reference(1), Reference(2)
    assert not attach(one), "nothing is sent"
    with collecting() as first:
        assert attach(one)
        with collecting() as second:
            assert attach(other)
    assert (first, second) == ([one], [other])


def test_a_value_of_a_closed_node_is_named():
    assert "the handle of train belongs to a node that was closed" in str(
        of_closed_node("train")
    )
