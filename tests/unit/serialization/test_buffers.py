"""Arrays and views: which buffers are kept out of a pickle, and their copies."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

from aiogpu.serialization import pickler
from aiogpu.serialization.pickler import dump, dump_whole, measure
from aiogpu.serialization.references import (
    SHARED_FROM,
    STREAM_SHARED_FROM,
    PickledValue,
)
from aiogpu.serialization.serializer import (
    are_numbers,
    dump_arguments,
    dump_result,
    load_arguments,
    load_result,
)
from tests.unit.serialization.payloads import carried, load, round_trip

EDGE = SHARED_FROM // 8


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class OwnArray(np.ndarray):
    pass


def numbers(count: int, kind: str = "f8") -> np.ndarray:
    return np.arange(count).astype(kind)


NUMBERS = {
    "C order": numbers(EDGE * 2).reshape(2, EDGE),
    "Fortran order": np.asfortranarray(numbers(EDGE * 2).reshape(2, EDGE)),
    "with gaps": numbers(EDGE * 4)[::2],
    "backwards": numbers(EDGE)[::-1],
    "broadcast": np.broadcast_to(numbers(EDGE), (3, EDGE)),
    "big-endian": numbers(EDGE, ">i8"),
    "half": np.ones(EDGE * 4, np.float16),
    "complex": np.ones(3) * 1j,
    "truths": np.ones(SHARED_FROM, bool),
    "no items": np.zeros((0, EDGE)),
    "no dimensions": np.array(3.5),
    "small": np.arange(3),
}
OTHERS = {
    "records": np.zeros(EDGE, [("a", "i4"), ("b", "f8", 2), ("c", "S3")]),
    "text": np.full(EDGE, "word"),
    "dates": np.full(EDGE, np.datetime64("2026-01-01")),
    "items of no size": np.zeros(EDGE, "V0"),
    "objects": np.array([{"a": 1}, "b", None] * 3, object),
    "an object in it": np.zeros(2, np.dtype("f8", metadata={"of": object()})),
    "an object in a field": np.zeros(
        2, np.dtype(("u1", [("a", np.dtype("u1", metadata={"of": object()}))]))
    ),
    "masked": np.ma.masked_greater(np.arange(EDGE), 5),
    "record array": np.zeros(EDGE, [("a", "i4")]).view(np.recarray),
    "of a class of its own": numbers(EDGE * 2).reshape(2, EDGE).view(OwnArray),
}
WITH_BUFFER = {
    *("C order", "Fortran order", "big-endian", "half", "truths"),
    *("records", "text"),
}
"""Large arrays without gaps and without objects: they have a separate buffer."""


# Arrays


@pytest.mark.parametrize("kind", [*NUMBERS, *OTHERS])
def test_array_arrives_unchanged(kind):
    value = {**NUMBERS, **OTHERS}[kind]
    stream, buffers = dump([value])
    (again,) = load(stream, buffers)
    assert (type(again), again.shape) == (type(value), value.shape)
    assert again.dtype == value.dtype
    assert again.flags.f_contiguous == value.flags.f_contiguous or not buffers
    if kind == "objects":
        assert again.tolist() == value.tolist()
    else:
        assert again.tobytes() == value.tobytes()
    assert bool(buffers) == (kind in WITH_BUFFER)
    assert len(stream) < 1000 or not buffers


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_arrive_without_cloudpickle(kind):
    value = NUMBERS[kind]
    with patch.object(pickler, "dump", side_effect=AssertionError("cloudpickle")):
        dumped = [
            dump_result(value),
            dump_arguments("f", (value, 1), {}),
            dump_arguments("f", (), {"x": value}),
        ]
    assert (type(dumped[0]) is PickledValue) == (value.nbytes >= SHARED_FROM)
    result, positional, named = (load_arguments(carried(pickled)) for pickled in dumped)
    for array in (result, positional[0][0], named[1]["x"]):
        assert (array.dtype, array.shape) == (value.dtype, value.shape)
        assert array.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        *OTHERS.values(),
        *(np.float64(1), [1], OwnArray((1,)), type("int", (int,), {})(1)),
        type("ndarray", (), {})(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_pickled_by_cloudpickle(value):
    assert not are_numbers([1, value])


def test_check_of_other_values_does_not_load_numpy():
    """`importlib.util.LazyLoader` loads a module on any access."""

    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(name)

    with patch.dict(sys.modules, numpy=Lazy("numpy")):
        assert not are_numbers([[1]])


def test_values_are_no_arrays_without_numpy():
    with patch.dict(sys.modules):
        del sys.modules["numpy"]
        assert are_numbers([1])
        assert not are_numbers([NUMBERS["small"]])


# Separate buffers


@pytest.mark.parametrize(("items", "count"), [(EDGE - 1, 0), (EDGE, 1), (EDGE * 9, 1)])
def test_large_array_has_a_separate_buffer(items, count):
    stream, buffers = dump((np.arange(items), {}))
    assert len(buffers) == count
    assert (len(stream) < 1000) == bool(count)


def test_array_arrives_as_a_read_only_view_of_its_buffer():
    stream, _ = dump(np.arange(EDGE))
    memory = bytearray(np.arange(EDGE)[::-1].tobytes())
    again = load(stream, [memoryview(memory)])
    assert address(again) == address(np.frombuffer(memory, np.uint8))
    assert not again.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        again.flags.writeable = True
    memory[:8] = bytes(8)
    assert again[0] == 0


def test_many_buffers_keep_their_order_and_must_be_complete():
    arrays = [np.full(EDGE, index) for index in range(100)]
    stream, buffers = dump({"all": arrays, "small": np.arange(3)})
    assert len(buffers) == 100
    again = load(memoryview(stream), iter(buffers))
    assert [int(array[-1]) for array in again["all"]] == list(range(100))
    with pytest.raises(pickle.UnpicklingError, match="buffers"):
        load(stream, buffers[1:])


def test_small_buffers_stay_in_the_pickle_up_to_a_limit():
    half, small = np.full(SHARED_FROM // 2, 1, np.uint8), np.full(100, 2, np.uint8)
    large = numbers(EDGE)
    outgoing = dump_result([half, half + 1, small, large])
    assert [buffer.nbytes for buffer in outgoing.buffers] == [half.nbytes, large.nbytes]
    assert SHARED_FROM // 2 < len(outgoing.stream) < SHARED_FROM // 2 + 1000
    arrays = load_result(carried(outgoing))
    assert [int(array[0]) for array in arrays] == [1, 2, 2, 0]
    assert [array.flags.writeable for array in arrays] == [True, False, True, False]
    whole = dump_whole([half, large])
    assert len(whole) > half.nbytes + large.nbytes
    assert (load(whole)[1] == large).all()


# Shared memory


def test_long_pickle_is_shared_with_its_buffers():
    large = numbers(EDGE)
    short = dump_result([b"x", large])
    long = dump_result([b"x" * STREAM_SHARED_FROM, large])
    assert short.is_large
    assert short.split() == ([memoryview(large).cast("B")], short.stream)
    assert long.split() == ([memoryview(long.stream), *long.buffers], b"")
    assert len(long.stream) < SHARED_FROM
    alone = PickledValue(long.stream)
    assert alone.is_plain
    assert alone.split() == ([], long.stream)


# Bytes and views


@pytest.mark.parametrize("size", [0, 8, SHARED_FROM])
def test_view_of_any_size_arrives_as_a_read_only_view(size):
    stream, buffers = dump(memoryview(bytearray(range(8)) * (size // 8)))
    assert len(buffers) == (size >= SHARED_FROM)
    again = load(stream, buffers)
    assert type(again) is memoryview
    assert again.readonly
    assert bytes(again) == bytes(range(8)) * (size // 8)


@pytest.mark.parametrize(
    ("values", "kind", "shape"),
    [
        (np.zeros((2, EDGE)), "d", (2, EDGE)),
        (np.zeros((2, EDGE), "u1"), "B", (2, EDGE)),
        (np.zeros((2, EDGE), "?"), "?", (2, EDGE)),
        (np.array(2.5), "d", ()),
        (np.asfortranarray(np.zeros((2, EDGE))), "d", (2, EDGE)),
        (np.zeros(EDGE * 2)[::2], "d", (EDGE,)),
        (np.zeros((0, 3)), "B", (0,)),
        (np.zeros(EDGE, ">f8"), "B", (SHARED_FROM,)),
        (np.zeros(EDGE, [("a", "f8")]), "B", (SHARED_FROM,)),
    ],
)
def test_view_keeps_its_format_and_shape_if_possible(values, kind, shape):
    values[...] = 1
    again = round_trip(memoryview(values))
    assert (again.format, again.shape) == (kind, shape)
    assert again.tobytes() == values.tobytes()


def test_buffer_with_gaps_is_an_error():
    for pickled in (dump, measure, dump_whole):
        with pytest.raises(pickle.PicklingError, match="non-contiguous"):
            pickled(pickle.PickleBuffer(memoryview(bytes(SHARED_FROM))[::2]))
