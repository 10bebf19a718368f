from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import threading
import types
from array import array
from dataclasses import dataclass

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.serialization.pickler import (
    dump,
    dump_whole,
    is_sent_by_value,
    measure,
)
from aiogpu.serialization.references import SHARED_FROM
from tests.support.sampling import examples
from tests.unit.wire.parcels import load

steady = settings(
    derandomize=True, database=None, deadline=None, max_examples=examples(80)
)
EDGE = SHARED_FROM // 8


def twice(value: object):
    stream, buffers = dump(value)
    return load(stream, buffers)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@dataclass
class Sample:
    name: str
    values: np.ndarray


# What goes beside the stream


@pytest.mark.parametrize(("items", "count"), [(EDGE - 1, 0), (EDGE, 1), (EDGE * 9, 1)])
def test_an_array_goes_beside_the_stream_from_a_size_on(items, count):
    stream, buffers = dump((np.arange(items), {}))
    assert len(buffers) == count
    assert (len(stream) < 1000) == bool(count)


def test_a_buffer_is_a_flat_view_of_the_memory_itself():
    values = np.arange(EDGE * 6.0).reshape(2, 3, EDGE)
    _, (buffer,) = dump(values)
    assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, values.nbytes)
    assert buffer.c_contiguous
    assert address(np.frombuffer(buffer, np.uint8)) == address(values)


def test_an_array_arrives_as_a_read_only_view_of_its_buffer():
    stream, _ = dump(np.arange(EDGE))
    memory = bytearray(np.arange(EDGE)[::-1].tobytes())
    again = load(stream, [memoryview(memory)])
    assert address(again) == address(np.frombuffer(memory, np.uint8))
    assert not again.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        again.flags.writeable = True
    memory[:8] = bytes(8)
    assert again[0] == 0


def test_buffers_keep_what_they_show_alive():
    _, (buffer,) = dump(np.full(EDGE, 7))
    assert bytes(buffer[:1]) == b"\7"


def test_many_buffers_keep_their_order():
    arrays = [np.full(EDGE, index) for index in range(100)]
    stream, buffers = dump({"all": arrays, "small": np.arange(3)})
    assert len(buffers) == 100
    again = load(stream, iter(buffers))
    assert [int(each[-1]) for each in again["all"]] == list(range(100))


def test_too_few_buffers_are_an_error():
    stream, _ = dump([np.arange(EDGE), np.arange(EDGE)])
    with pytest.raises(pickle.UnpicklingError, match="buffers"):
        load(stream, [memoryview(bytes(SHARED_FROM))])


def test_what_is_one_object_stays_one():
    values = np.arange(EDGE)
    stream, buffers = dump([values, values, {"again": values}])
    first, second, third = load(stream, buffers)
    assert len(buffers) == 1
    assert first is second is third["again"]


def test_views_of_one_array_arrive_apart():
    values = np.arange(EDGE * 2)
    stream, buffers = dump([values[:EDGE], values[EDGE:]])
    assert len(buffers) == 2
    first, second = load(stream, buffers)
    assert [int(first[0]), int(second[0])] == [0, EDGE]


def test_what_contains_itself_arrives():
    values: list[object] = [np.arange(EDGE)]
    values.append(values)
    again = twice(values)
    assert again[1] is again


def test_all_stays_in_the_stream_if_asked():
    values = np.arange(EDGE)
    assert (load(dump_whole([values, b"a"]))[0] == values).all()


def test_a_stream_may_be_a_view():
    stream, buffers = dump([1, np.arange(EDGE)])
    assert load(memoryview(stream), buffers)[0] == 1


# Arrays of every kind

KINDS = {
    "C order": np.arange(EDGE * 2.0).reshape(2, EDGE),
    "Fortran order": np.asfortranarray(np.arange(EDGE * 2.0).reshape(2, EDGE)),
    "with gaps": np.arange(EDGE * 4)[::2],
    "backwards": np.arange(EDGE)[::-1],
    "broadcast": np.broadcast_to(np.arange(EDGE), (3, EDGE)),
    "structured": np.zeros(EDGE, [("a", "i4"), ("b", "f8", 2), ("c", "S3")]),
    "big-endian": np.arange(EDGE, dtype=">i8"),
    "half": np.ones(EDGE * 4, np.float16),
    "complex": np.ones(EDGE) * 1j,
    "bool": np.ones(SHARED_FROM, bool),
    "text": np.full(EDGE, "word"),
    "dates": np.full(EDGE, np.datetime64("2026-01-01")),
    "no items": np.zeros((0, EDGE)),
    "no dimensions": np.array(3.5),
    "items of no size": np.zeros(EDGE, "V0"),
    "objects": np.array([{"a": 1}, "b", None] * 3, object),
    "masked": np.ma.masked_greater(np.arange(EDGE), 5),
    "record": np.zeros(EDGE, [("a", "i4")]).view(np.recarray),
    "matrix": np.arange(EDGE * 2)
    .reshape(2, EDGE)
    .view(type("Mine", (np.ndarray,), {})),
    "small": np.arange(3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_arrives_as_it_was(kind):
    values = KINDS[kind]
    again = twice([values])[0]
    assert type(again).__name__ == type(values).__name__
    assert (again.dtype, again.shape) == (values.dtype, values.shape)
    if kind == "objects":
        assert again.tolist() == values.tolist()
    else:
        assert again.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("C order", 1),
        ("Fortran order", 1),
        ("structured", 1),
        ("with gaps", 0),
        ("objects", 0),
        ("no items", 0),
    ],
)
def test_which_arrays_go_beside_the_stream(kind, count):
    assert len(dump(KINDS[kind])[1]) == count


def test_the_order_of_an_array_is_kept():
    assert twice(KINDS["Fortran order"]).flags.f_contiguous


def test_a_read_only_array_goes_beside_the_stream():
    values = np.arange(EDGE)
    values.flags.writeable = False
    stream, (buffer,) = dump(values)
    assert buffer.readonly
    assert not load(stream, [buffer]).flags.writeable


def test_objects_in_arrays_are_pickled_by_cloudpickle():
    again = twice(np.array([lambda: 5], object))
    assert again[0]() == 5


@steady
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["u1", "<i4", ">f8", "?", "c16", "S5", "U2", "M8[s]"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_arrays_of_any_shape_arrive(shape, dtype, is_fortran, step):
    sized = [size * 30 for size in shape]
    values = np.zeros(sized, dtype, "F" if is_fortran else "C")
    values = values[::step] if sized else values
    values[...] = 1
    again = twice(values)
    # numpy itself makes the byte order native where it copies into the stream.
    assert again.dtype.newbyteorder("=") == values.dtype.newbyteorder("=")
    assert again.shape == values.shape
    assert (again == values).all()


def test_a_sparse_array_arrives():
    sparse = pytest.importorskip("scipy.sparse", reason="scipy has sparse arrays")
    values = sparse.eye_array(EDGE, format="csr")
    stream, buffers = dump(values)
    assert len(buffers) >= 1
    assert (load(stream, buffers) != values).nnz == 0


def test_an_arrow_table_arrives_over_its_buffers():
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow has tables of its own")
    table = pyarrow.table({"x": np.arange(EDGE * 2), "y": ["word"] * EDGE * 2})
    stream, buffers = dump(table)
    assert len(stream) < SHARED_FROM
    assert sum(buffer.nbytes for buffer in buffers) >= EDGE * 16
    assert load(stream, buffers).equals(table)
    (raw,) = dump(pyarrow.py_buffer(bytes(SHARED_FROM)))[1]
    assert raw.nbytes == SHARED_FROM


# Bytes and views


def test_large_bytes_stay_in_the_stream():
    for value in (bytes(SHARED_FROM), bytearray(SHARED_FROM)):
        stream, buffers = dump(value)
        assert not buffers
        again = load(stream, buffers)
        assert (again, type(again)) == (value, type(value))


def test_a_bytearray_arrives_as_one_of_its_own():
    value = bytearray(SHARED_FROM)
    again = twice([value])[0]
    again += b"more"
    assert len(value) == SHARED_FROM


@pytest.mark.parametrize("size", [0, 8, SHARED_FROM])
def test_a_view_arrives_as_a_read_only_view_of_any_size(size):
    stream, buffers = dump(memoryview(bytearray(range(8)) * (size // 8)))
    assert len(buffers) == (size >= SHARED_FROM)
    again = load(stream, buffers)
    assert type(again) is memoryview
    assert again.readonly
    assert bytes(again) == bytes(range(8)) * (size // 8)


def test_a_large_view_is_not_copied():
    stream, (buffer,) = dump(memoryview(array("d", bytes(SHARED_FROM))))
    memory = bytearray(SHARED_FROM)
    again = load(stream, [memoryview(memory)])
    assert (again.format, again.shape) == ("d", (EDGE,))
    assert buffer.nbytes == SHARED_FROM
    memory[:8] = b"\xff" * 8
    assert again[0] != 0


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
def test_a_view_keeps_its_format_and_shape_where_it_can(values, kind, shape):
    values[...] = 1
    again = twice(memoryview(values))
    assert (again.format, again.shape) == (kind, shape)
    assert again.tobytes() == values.tobytes()


def test_a_view_of_native_items_keeps_its_format():
    again = twice(memoryview(bytes(range(16))).cast("@d"))
    assert (again.format, again.shape) == ("d", (2,))


def test_a_buffer_with_gaps_is_an_error_as_ever():
    for pickled in (dump, measure, dump_whole):
        with pytest.raises(pickle.PicklingError, match="non-contiguous"):
            pickled(pickle.PickleBuffer(memoryview(bytes(SHARED_FROM))[::2]))


# Reducers, cloudpickle's and others


def test_what_cloudpickle_can_goes_by_it():
    base = 3

    class Local:
        @property
        def doubled(self):
            return base * 2

    for value, probe in [
        (lambda: base, lambda f: f()),
        (Local, lambda kind: kind().doubled),
        (Local().__init__, callable),
        ({"a": 1}.keys(), list),
        (functools.partial(lambda x: x, 2), lambda f: f()),
        (sys, id),
    ]:
        assert probe(load(dump_whole(value))) == probe(value)
        assert probe(twice(value)) == probe(value)


@functools.lru_cache(maxsize=3)
def remembered(n):
    return n


def in_the_program(text: str, name: str):
    """What a program defines under a name, which is gone when it is unpickled."""
    program = types.ModuleType("__main__")
    vars(program)["functools"] = functools
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", program)
        exec(text, vars(program))
        stream = dump_whole(vars(program)[name])
    return load(stream)


def test_a_cached_function_goes_by_its_name_where_that_can_be_imported():
    assert twice(remembered) is remembered


def test_a_cached_function_of_the_program_goes_by_value():
    again = in_the_program(
        """
@functools.lru_cache(50, typed=True)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

fib(9)
""",
        "fib",
    )
    assert again.cache_info() == (0, 0, 50, 0)
    assert again.cache_parameters() == {"maxsize": 50, "typed": True}
    assert again(30) == 832040
    assert again.cache_info().hits == 28, "it calls itself, not another copy"


def test_what_is_cached_of_a_class_of_the_program_goes_with_it():
    again = in_the_program(
        """
class Model:
    @functools.cache
    def twice(self, n):
        return n * 2
""",
        "Model",
    )
    assert again().twice(4) == 8


def test_a_cached_function_that_no_name_finds_goes_by_value():
    base = 3

    @functools.cache
    def add(n):
        return base + n

    hidden = functools.cache(remembered.__wrapped__)
    nameless = functools.cache(functools.partial(max, 4))
    assert [twice(one)(1) for one in (add, hidden, nameless)] == [4, 1, 4]
    assert twice(hidden) is not remembered


def test_a_cached_function_of_a_module_sent_by_value(monkeypatch):
    register = "list_registry_pickle_by_value"
    monkeypatch.setattr(cloudpickle, register, lambda: {__name__})
    again = twice(remembered)
    assert again is not remembered
    assert again(2) == 2


def test_a_dataclass_with_an_array_arrives():
    again = twice(Sample("a", np.arange(EDGE)))
    assert (again.name, again.values[-1]) == ("a", EDGE - 1)
    assert not again.values.flags.writeable


def test_a_reducer_registered_later_is_used(monkeypatch):
    class Odd:
        pass

    dump_whole(Odd())
    monkeypatch.setitem(copyreg.dispatch_table, Odd, lambda odd: (str, ("copyreg",)))
    assert twice(Odd()) == "copyreg"
    monkeypatch.setitem(
        cloudpickle.Pickler.dispatch_table, Odd, lambda odd: (str, ("cloudpickle",))
    )
    assert twice([Odd()]) == ["cloudpickle"]


def test_a_reducer_that_raises_raises():
    class Bad:
        def __reduce__(self):
            raise ZeroDivisionError("no")

    for pickled in (dump, dump_whole, measure):
        with pytest.raises(ZeroDivisionError, match="no"):
            pickled([np.arange(EDGE), Bad()])


def test_unpickling_that_raises_raises():
    class Trap:
        def __reduce__(self):
            return divmod, (1, 0)

    stream, buffers = dump([np.arange(EDGE), Trap()])
    with pytest.raises(ZeroDivisionError):
        load(stream, buffers)


def test_what_lies_too_deep_is_an_error_with_a_name():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(pickle.PicklingError, match="recursion"):
        dump(deep)


def test_modules_sent_by_value_are_known():
    assert not is_sent_by_value("threading")
    cloudpickle.register_pickle_by_value(threading)
    try:
        assert is_sent_by_value("threading")
    finally:
        cloudpickle.unregister_pickle_by_value(threading)


@pytest.fixture
def spawned(monkeypatch):
    """The program, as a process has it that multiprocessing has spawned."""
    program = types.ModuleType("__mp_main__")
    exec(SPAWNED, vars(program))
    monkeypatch.setitem(sys.modules, program.__name__, program)
    yield program
    if is_sent_by_value(program.__name__):
        sys.modules[program.__name__] = program
        cloudpickle.unregister_pickle_by_value(program)


SPAWNED = """
class Pair:
    def __init__(self, one, other):
        self.one, self.other = one, other

def twice(number):
    return 2 * number

def doubled(pair):
    return Pair(twice(pair.one), twice(pair.other))
"""


def test_what_a_spawned_program_defines_goes_by_value(spawned, monkeypatch):
    stream = dump_whole((spawned.doubled, spawned.Pair(1, 2)))
    monkeypatch.delitem(sys.modules, "__mp_main__")  # as it is in a worker
    doubled, pair = load(stream)
    result = load(dump_whole(doubled(pair)))
    assert (result.one, result.other) == (2, 4)
    assert type(result) is spawned.Pair, "the program knows its own class again"


# Sizes


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"x" * 1_000_000,
        bytearray(1_000_000),
        list(range(100_000)),
        np.arange(10),
        [np.arange(EDGE * 10), "a"],
        memoryview(bytes(100_000)),
        lambda: 1,
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_size_is_that_of_stream_and_buffers(value):
    stream, buffers = dump(value)
    size = len(stream) + sum(buffer.nbytes for buffer in buffers)
    assert abs(measure(value) - size) < 100
