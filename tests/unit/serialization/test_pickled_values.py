"""Arguments, results and functions survive pickling, also without an import."""

from __future__ import annotations

import functools
import importlib
import pickle
import subprocess
import sys
import types
from operator import attrgetter

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import DeserializationError, MisuseError, SerializationError
from aiogpu.serialization.pickler import dump_whole, is_sent_by_value
from aiogpu.serialization.references import (
    SHARED_FROM,
    add_handle,
    collect_references,
    end_collecting,
)
from aiogpu.serialization.serializer import (
    NO_ARGUMENTS,
    NONE_PAYLOAD,
    dump_arguments,
    dump_function,
    dump_reference,
    dump_result,
    load_arguments,
    load_function,
    load_result,
)
from tests.support.sampling import examples
from tests.unit.serialization.payloads import InterruptingRepr, Mute, carried

steady = settings(
    derandomize=True, database=None, deadline=None, max_examples=examples(60)
)


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)


ANY = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


def sent(function):
    return load_function(dump_function("f", function))


@steady
@given(st.lists(ANY, max_size=4), st.dictionaries(st.text(), ANY, max_size=3))
def test_arguments_survive_pickling(args, kwargs):
    payload = dump_arguments("f", tuple(args), kwargs)
    assert load_arguments(payload) == (tuple(args), kwargs)


def python(script: str) -> bytes:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def test_plain_arguments_need_no_cloudpickle():
    script = (
        "import sys; from aiogpu.serialization.serializer import *;"
        "dump_arguments('f', (1, 'a', None), {}); dump_result(2.5); dump_result(None);"
        "print('cloudpickle' in sys.modules)"
    )
    assert python(script).strip() == b"False"


def test_small_values_are_plain_pickles():
    assert dump_result(None) is NONE_PAYLOAD
    assert load_result(NONE_PAYLOAD) is None
    assert dump_arguments("f", (), {}) == NO_ARGUMENTS
    for value in (1, "x", b"x", [1], np.arange(3)):
        assert type(dump_result(value)) is bytes
        assert type(dump_arguments("f", (value,), {})) is bytes


# Functions


def test_functions_survive_pickling_with_their_references():
    offset = 10

    def outer(x):
        def inner(y, *, z=2):
            return x + y + z + offset

        return inner

    def is_even(n):
        return n == 0 or is_odd(n - 1)

    def is_odd(n):
        return n != 0 and is_even(n - 1)

    class Counter:
        def __init__(self, start):
            self.start = start

        def add(self, n):
            return self.start + n

    outer.label = "mine"
    again = sent(outer)
    assert (again(1)(2), again.label) == (15, "mine")
    assert sent(is_even)(10)
    assert sent(Counter(2).add)(3) == 5
    assert sent(functools.partial(Counter(2).add, 4))() == 6
    assert sent(attrgetter("start"))(Counter(7)) == 7


@pytest.fixture
def spawned(monkeypatch):
    """The main module of a process that multiprocessing spawned."""
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


def test_objects_of_a_spawned_program_are_sent_by_value(spawned, monkeypatch):
    stream = dump_whole((spawned.doubled, spawned.Pair(1, 2)))
    monkeypatch.delitem(sys.modules, "__mp_main__")  # a worker does not have it
    doubled, pair = pickle.loads(stream)
    result = pickle.loads(dump_whole(doubled(pair)))
    assert (result.one, result.other) == (2, 4)
    assert type(result) is spawned.Pair, "the program gets its own class"


class Remote:
    """An object that a decorator puts in place of a function."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.__aiogpu_function__ = function


@Remote
def decorated():
    return "the function itself"


def test_importable_functions_are_sent_by_name():
    payload = dump_function("sent", sent)
    assert len(payload) < 100
    assert load_function(payload) is sent
    fromkeys = load_function(dump_reference("collections", "OrderedDict.fromkeys"))
    assert fromkeys("ab") == {"a": None, "b": None}
    with pytest.raises(ModuleNotFoundError):
        load_function(dump_reference("aiogpu_no_such_module", "f"))
    with pytest.raises(AttributeError):
        load_function(dump_reference("collections", "no_such_function"))


def test_reference_loads_the_function_inside_its_decorator():
    function = load_function(dump_reference(__name__, "decorated"))
    assert type(function) is not Remote
    assert function() == "the function itself"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module that is registered for pickling by value."""
    (tmp_path / "aiogpu_library.py").write_text(
        "class Shape:\n    sides = 4\n\ndef sides():\n    return Shape().sides\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("aiogpu_library")
    cloudpickle.register_pickle_by_value(module)
    yield module
    if "aiogpu_library" in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)
    sys.modules.pop("aiogpu_library", None)


def test_registered_module_is_sent_by_value(library, monkeypatch):
    assert is_sent_by_value("aiogpu_library")
    assert is_sent_by_value("aiogpu_library.inner.most")
    assert not is_sent_by_value("aiogpu_library_too")
    function = dump_function("sides", library.sides)
    result = dump_result(library.Shape())
    monkeypatch.setitem(sys.modules, "aiogpu_library", None)  # blocks its import
    assert load_function(function)() == 4
    assert load_result(result).sides == 4
    monkeypatch.undo()
    cloudpickle.unregister_pickle_by_value(library)
    assert not is_sent_by_value("aiogpu_library")


# Functions of `functools.cache`


@functools.lru_cache(maxsize=3)
def remembered(n):
    return n


def test_cached_function_is_sent_by_name_only_if_its_name_finds_it(monkeypatch):
    base = 3

    @functools.cache
    def add(n):
        return base + n

    assert sent(remembered) is remembered
    hidden = functools.cache(remembered.__wrapped__)
    nameless = functools.cache(functools.partial(max, 4))
    assert [sent(function)(1) for function in (add, hidden, nameless)] == [4, 1, 4]
    assert sent(hidden) is not remembered
    register = "list_registry_pickle_by_value"
    monkeypatch.setattr(cloudpickle, register, lambda: {__name__})
    again = sent(remembered)
    assert again is not remembered
    assert again(2) == 2


# Reducers


class Refusing:
    """An object that raises the given error when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("no"), StopIteration(), Mute(), InterruptingRepr()]
)
def test_error_of_a_reducer_is_the_cause(error):
    value = Refusing(error)
    for dump in (
        lambda: dump_result([value]),
        lambda: dump_arguments("f", (value,), {}),
        lambda: dump_function("f", functools.partial(print, value)),
    ):
        with pytest.raises(SerializationError, match=type(error).__name__) as caught:
            dump()
        assert caught.value.__cause__ is error


# Errors of unpickling


def fail(error):
    raise error


class Raising:
    """An object that raises when it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return fail, (self.error,)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no."), "unpickled in this process: ValueError: no. Is its class"),
        (ImportError("gone"), "unpickled in this process: ImportError: gone. Is its"),
        (
            Mute(),
            "unpickled in this process: Mute: <its text is not available: SystemEx",
        ),
        (MisuseError("not so."), "not available in this process: not so.$"),
        (SystemExit(3), "unpickled in this process: SystemExit: 3. Is its"),
        (KeyboardInterrupt(), "unpickled in this process: KeyboardInterrupt. Is its"),
        (GeneratorExit(), "unpickled in this process: GeneratorExit. Is its"),
    ],
)
def test_error_of_unpickling_a_result_is_the_cause(error, message):
    """Exceptions that would end a loop are named, but neither cause nor context."""
    for payload in (
        dump_result(Raising(error)),
        carried(dump_result([np.zeros(SHARED_FROM), Raising(error)])),
    ):
        with pytest.raises(
            DeserializationError, match=f"^the result .* {message}"
        ) as caught:
            load_result(payload)
        cause = type(error) if isinstance(error, Exception) else type(None)
        assert type(caught.value.__cause__) is cause
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("payload", [b"", b"garbage", NONE_PAYLOAD[:-1], b"\x80\xff."])
def test_result_that_is_no_pickle_is_an_error(payload):
    with pytest.raises(DeserializationError, match="the result cannot be unpickled"):
        load_result(payload)


def test_errors_of_unpickling_arguments_and_functions_are_raised_unchanged():
    payload = dump_arguments("f", (Raising(SystemExit(3)),), {})
    with pytest.raises(SystemExit):
        load_arguments(payload)
    with pytest.raises(KeyError):
        load_function(dump_function("f", Raising(KeyError("k"))))


def test_end_collecting_closes_an_interrupted_collection():
    collecting = collect_references()
    collecting.__enter__()
    end_collecting()
    with pytest.raises(MisuseError, match="the handle of train can only be pickled"):
        add_handle("train", lambda: None)
