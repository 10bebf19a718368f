"""Arguments, results and functions arrive, also where they cannot be imported."""

from __future__ import annotations

import copyreg
import functools
import importlib
import pickle
import subprocess
import sys
import types
from collections import namedtuple
from operator import attrgetter

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import DeserializationError, MisuseError, SerializationError
from aiogpu.serialization.pickler import dump_whole, is_sent_by_value
from aiogpu.serialization.references import SHARED_FROM
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
from tests.unit.serialization.payloads import carried

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


def twice(f):
    payload = dump_function("f", f)
    return load_function(payload)


@steady
@given(st.lists(ANY, max_size=4), st.dictionaries(st.text(), ANY, max_size=3))
def test_arguments_arrive(args, kwargs):
    payload = dump_arguments("f", tuple(args), kwargs)
    assert load_arguments(payload) == (tuple(args), kwargs)


@steady
@given(ANY)
def test_results_arrive(value):
    again = load_result(dump_result(value))
    assert again == value
    assert type(again) is type(value)


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


def test_loaded_arguments_are_not_shared_between_calls():
    payload = dump_arguments("f", (1,), {})
    load_arguments(payload)[1]["extra"] = 1
    assert load_arguments(payload) == ((1,), {})


class Shout(str):
    __slots__ = ()

    def __call__(self):
        return self.upper()


def test_lambdas_local_classes_and_subclasses_of_plain_types_arrive():
    class Point:
        def __init__(self, x):
            self.x = x

    (f, point, shout), names = load_arguments(
        dump_arguments("f", (lambda x: x + 1, Point(3), Shout("a")), {"kind": Point})
    )
    assert (f(1), point.x, shout(), names["kind"](4).x) == (2, 3, "A", 4)
    assert load_result(dump_result(lambda: 5))() == 5
    assert load_result(dump_result(Shout("b")))() == "B"


# Functions


def test_functions_arrive_with_all_that_they_refer_to():
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
    again = twice(outer)
    assert (again(1)(2), again.label) == (15, "mine")
    assert twice(is_even)(10)
    assert twice(Counter(2).add)(3) == 5
    assert twice(functools.partial(Counter(2).add, 4))() == 6
    assert twice(attrgetter("start"))(Counter(7)) == 7


IN_MAIN = """
import pickle, sys
from aiogpu.serialization.exceptions import *
from aiogpu.serialization.serializer import *

LIMIT = 100

class Base:
    def scaled(self, n):
        return min(n * self.factor, LIMIT)

class Model(Base):
    __slots__ = ("factor",)
    def __init__(self, factor):
        self.factor = factor
    def scaled(self, n):
        return super().scaled(n)

def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def build(factor):
    return Model(factor)

class Broken(Exception):
    def __init__(self, code, reason):
        super().__init__(code, reason)

payloads = {
    "function": dump_function("fibonacci", fibonacci),
    "lambda": dump_function("lambda", lambda n: fibonacci(n) + LIMIT),
    "class": dump_function("Model", Model),
    "builder": dump_function("build", build),
    "result": dump_result(Model(3)),
    "arguments": dump_arguments("f", (Model(4), fibonacci), {"kind": Model}),
    "exception": dump_exception(Broken(3, "why"))[0],
}
sys.stdout.buffer.write(pickle.dumps(payloads))
"""


def test_what_the_program_defines_arrives_where_it_cannot_be_imported():
    payloads = pickle.loads(python(IN_MAIN))
    assert load_function(payloads["function"])(10) == 55
    assert load_function(payloads["lambda"])(10) == 155
    assert load_function(payloads["class"])(5).scaled(6) == 30
    assert load_function(payloads["builder"])(50).scaled(6) == 100
    assert load_result(payloads["result"]).scaled(7) == 21
    (model, fibonacci), names = load_arguments(payloads["arguments"])
    assert (model.scaled(2), fibonacci(6), names["kind"].__name__) == (8, 8, "Model")
    error = pickle.loads(payloads["exception"])
    assert (type(error).__name__, error.args) == ("Broken", (3, "why"))


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


def test_what_a_spawned_program_defines_is_sent_by_value(spawned, monkeypatch):
    stream = dump_whole((spawned.doubled, spawned.Pair(1, 2)))
    monkeypatch.delitem(sys.modules, "__mp_main__")  # as it is in a worker
    doubled, pair = pickle.loads(stream)
    result = pickle.loads(dump_whole(doubled(pair)))
    assert (result.one, result.other) == (2, 4)
    assert type(result) is spawned.Pair, "the program knows its own class again"


class Remote:
    """As a decorator leaves it in its module: not a function, and wraps one."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.__aiogpu_function__ = function


@Remote
def decorated():
    return "the function itself"


def test_what_can_be_imported_is_sent_by_name():
    payload = dump_function("twice", twice)
    assert len(payload) < 100
    assert load_function(payload) is twice
    fromkeys = load_function(dump_reference("collections", "OrderedDict.fromkeys"))
    assert fromkeys("ab") == {"a": None, "b": None}
    with pytest.raises(ModuleNotFoundError):
        load_function(dump_reference("aiogpu_no_such_module", "f"))
    with pytest.raises(AttributeError):
        load_function(dump_reference("collections", "no_such_function"))


def test_a_reference_means_the_function_inside_its_decoration():
    function = load_function(dump_reference(__name__, "decorated"))
    assert type(function) is not Remote
    assert function() == "the function itself"


def test_a_callable_tuple_is_no_reference():
    class Adder(namedtuple("Adder", "a b")):
        __slots__ = ()

        def __call__(self):
            return self.a + self.b

    assert twice(Adder(1, 2))() == 3


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module that cloudpickle was asked to send by value."""
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


def test_a_module_may_be_sent_by_value(library, monkeypatch):
    assert is_sent_by_value("aiogpu_library")
    assert is_sent_by_value("aiogpu_library.inner.most")
    assert not is_sent_by_value("aiogpu_library_too")
    function = dump_function("sides", library.sides)
    result = dump_result(library.Shape())
    monkeypatch.setitem(sys.modules, "aiogpu_library", None)  # it cannot be imported
    assert load_function(function)() == 4
    assert load_result(result).sides == 4
    monkeypatch.undo()
    cloudpickle.unregister_pickle_by_value(library)
    assert not is_sent_by_value("aiogpu_library")


# What `functools.cache` has made


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
    return pickle.loads(stream)


def test_a_cached_function_of_the_program_is_sent_by_value():
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


def test_a_cached_function_is_sent_by_name_only_if_that_name_finds_it(monkeypatch):
    base = 3

    @functools.cache
    def add(n):
        return base + n

    assert twice(remembered) is remembered
    hidden = functools.cache(remembered.__wrapped__)
    nameless = functools.cache(functools.partial(max, 4))
    assert [twice(one)(1) for one in (add, hidden, nameless)] == [4, 1, 4]
    assert twice(hidden) is not remembered
    register = "list_registry_pickle_by_value"
    monkeypatch.setattr(cloudpickle, register, lambda: {__name__})
    again = twice(remembered)
    assert again is not remembered
    assert again(2) == 2


# Reducers


def test_a_reducer_registered_later_is_used(monkeypatch):
    class Local:
        pass

    dump_whole(Local())
    monkeypatch.setitem(copyreg.dispatch_table, Local, lambda _: (str, ("copyreg",)))
    assert load_result(dump_result(Local())) == "copyreg"
    table = cloudpickle.Pickler.dispatch_table
    monkeypatch.setitem(table, Local, lambda _: (str, ("cloudpickle",)))
    assert load_result(dump_result([Local()])) == ["cloudpickle"]


class Refusing:
    """Raises what it is told when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Mute(Exception):
    """Its own text cannot be had."""

    def __str__(self):
        raise SystemExit(3)


class Spiteful(Mute):
    def __repr__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "error", [ValueError("no"), StopIteration(), Mute(), Spiteful()]
)
def test_whatever_a_reducer_raises_is_the_cause(error):
    value = Refusing(error)
    for dump in (
        lambda: dump_result([value]),
        lambda: dump_arguments("f", (value,), {}),
        lambda: dump_function("f", functools.partial(print, value)),
    ):
        with pytest.raises(SerializationError, match=type(error).__name__) as caught:
            dump()
        assert caught.value.__cause__ is error


def test_what_is_nested_too_deeply_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError, match="recursion"):
        dump_result(value)
    # Taken apart from the outside: it may be too deep to be freed at once, too.
    while value:
        (value,) = value


# What cannot be read


def fail(error):
    raise error


class Raising:
    """Raises when it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return fail, (self.error,)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no."), "unpickled in this process: ValueError: no. Is its class"),
        (ImportError("gone"), "unpickled in this process: ImportError: gone. Is its"),
        (Mute(), "unpickled in this process: Mute: <its text cannot be had: SystemEx"),
        (MisuseError("not so."), "had in this process: not so.$"),
        (SystemExit(3), "unpickled in this process: SystemExit: 3. Is its"),
        (KeyboardInterrupt(), "unpickled in this process: KeyboardInterrupt. Is its"),
        (GeneratorExit(), "unpickled in this process: GeneratorExit. Is its"),
    ],
)
def test_an_error_on_reading_a_result_is_the_cause(error, told):
    """What would end the loop is named only, and not even the context."""
    for payload in (
        dump_result(Raising(error)),
        carried(dump_result([np.zeros(SHARED_FROM), Raising(error)])),
    ):
        with pytest.raises(DeserializationError, match=f"^the result .* {told}") as why:
            load_result(payload)
        cause = type(error) if isinstance(error, Exception) else type(None)
        assert type(why.value.__cause__) is cause
        assert why.value.__suppress_context__


@pytest.mark.parametrize("payload", [b"", b"garbage", NONE_PAYLOAD[:-1], b"\x80\xff."])
def test_bytes_that_are_no_pickle_are_an_error(payload):
    with pytest.raises(DeserializationError, match="the result cannot be unpickled"):
        load_result(payload)


def test_arguments_and_functions_raise_what_unpickling_raises():
    payload = dump_arguments("f", (Raising(SystemExit(3)),), {})
    with pytest.raises(SystemExit):
        load_arguments(payload)
    with pytest.raises(KeyError):
        load_function(dump_function("f", Raising(KeyError("k"))))
