"""Arrays of numbers, pickled without cloudpickle; all else goes by it."""

from __future__ import annotations

import copyreg
import pickle
import sys
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

from aiogpu.serialization import pickler
from aiogpu.serialization.references import SHARED_FROM, PickledValue
from aiogpu.serialization.serializer import (
    are_numbers,
    dump_arguments,
    dump_numbers,
    dump_result,
    load,
    load_arguments,
)

NUMBERS = {
    "bytes": np.arange(5, dtype=np.uint8),
    "floats": np.arange(6.0).reshape(2, 3),
    "truths": np.ones(3, bool),
    "complex": np.ones(3) * 1j,
    "big-endian": np.arange(5, dtype=">i8"),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "with gaps": np.arange(9)[::2],
    "no dimensions": np.array(3.5),
    "no items": np.zeros((0, 4)),
    "large": np.arange(SHARED_FROM),
    "large, with gaps": np.arange(SHARED_FROM * 2)[::2],
    "read-only": np.broadcast_to(np.arange(3), (2, 3)),
}
OTHERS = {
    "objects": np.array([1, None], object),
    "a class in it": np.zeros(2, np.dtype("f8", metadata={"of": object()})),
    "a class in parts of it": np.zeros(
        2, np.dtype(("u1", [("a", np.dtype("u1", metadata={"of": object()}))]))
    ),
    "text": np.array(["a"]),
    "records": np.zeros(2, [("a", "i4"), ("b", object)]),
    "of a class of its own": np.zeros(2).view(np.recarray),
    "masked": np.ma.masked_greater(np.arange(3), 1),
    "one number": np.float64(1),
    "a list": [1],
    "a subclass": type("Mine", (int,), {})(1),
    "of the same name": type("ndarray", (), {})(),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("place", ["argument", "by name", "result"])
def test_numbers_arrive_as_they_were(kind, place):
    value = NUMBERS[kind]
    with patch.object(pickler, "dump", side_effect=AssertionError("cloudpickle")):
        if place == "result":
            dumped = dump_result(value)
        else:
            named = {"x": value} if place == "by name" else {}
            dumped = dump_arguments("f", () if named else (value, 1), named)
    outgoing = dumped if isinstance(dumped, PickledValue) else PickledValue(dumped)
    stream, buffers = outgoing.stream, outgoing.buffers
    found = pickle.loads(stream, buffers=buffers)
    if place != "result":
        found = found[0][0] if place == "argument" else found[1]["x"]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()
    assert bool(buffers) == (kind == "large")


@pytest.mark.parametrize("kind", OTHERS)
def test_what_may_hold_more_goes_by_cloudpickle(kind):
    assert not are_numbers([1, OTHERS[kind]])


def test_scalars_count_where_arrays_are():
    assert are_numbers([1, "a", None, np.arange(3)])
    assert are_numbers([])


def test_without_numpy_there_are_no_arrays():
    with patch.dict(sys.modules):
        del sys.modules["numpy"]
        assert are_numbers([1])
        assert not are_numbers([NUMBERS["floats"]])


def test_numpy_is_not_loaded_by_a_look_at_what_is_none_of_its():
    """`importlib.util.LazyLoader` loads a module when it is asked for anything."""

    class Lazy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(name)

    with patch.dict(sys.modules, numpy=Lazy("numpy")):
        assert not are_numbers([[1]])


def test_a_program_may_pickle_arrays_its_own_way():
    with patch.dict(copyreg.dispatch_table, {np.ndarray: lambda _: (str, ("mine",))}):
        assert load(dump_result(NUMBERS["floats"])) == "mine"
        assert not are_numbers([NUMBERS["floats"]])


def test_an_array_that_is_copied_is_its_readers_own():
    array = np.arange(1000)
    (args, _) = load_arguments(dump_arguments("f", (array,), {}))
    args[0][0] = 7
    assert array[0] == 0


def test_one_array_twice_is_one_again():
    array = np.arange(10)
    first, second = load(dump_numbers((array, array)))
    assert first is second


def test_several_that_are_large_together_are_parted():
    third = np.zeros(SHARED_FROM // 3 + 1, np.uint8)
    outgoing = dump_numbers((third, third.copy(), third.copy()))
    assert isinstance(outgoing, PickledValue)
    assert [each.nbytes for each in outgoing.buffers] == [third.nbytes]


def test_a_long_pickle_without_buffers_is_no_plain_payload():
    outgoing = dump_numbers((np.arange(3), b"x" * SHARED_FROM))
    assert isinstance(outgoing, PickledValue)
    assert not outgoing.buffers
