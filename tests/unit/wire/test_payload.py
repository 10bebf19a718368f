from __future__ import annotations

import functools
import importlib
import pickle
import subprocess
import sys
import threading
from collections import namedtuple
from operator import attrgetter

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import DeserializationError, MisuseError, SerializationError
from aiogpu.serialization.exceptions import dump_exception, safe_text
from aiogpu.serialization.pickler import is_sent_by_value
from aiogpu.serialization.references import add_handle
from aiogpu.serialization.serializer import (
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


# Arguments and results


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


def test_plain_arguments_need_no_cloudpickle():
    script = (
        "import sys; from aiogpu.serialization.serializer import *;"
        "dump_arguments('f', (1, 'a', None), {}); dump_result(2.5); dump_result(None);"
        "print('cloudpickle' in sys.modules)"
    )
    assert python(script).strip() == b"False"


def test_none_is_the_shortest_payload():
    assert dump_result(None) is NONE_PAYLOAD
    assert load_result(NONE_PAYLOAD) is None


def test_a_subclass_of_a_plain_type_keeps_its_type():
    class Shout(str):
        __slots__ = ()

        def __call__(self):
            return self.upper()

    (again,), _ = load_arguments(dump_arguments("f", (Shout("a"),), {}))
    assert again() == "A"
    assert load_result(dump_result(Shout("b")))() == "B"


def test_loaded_arguments_are_not_shared_between_calls():
    payload = dump_arguments("f", (1,), {})
    load_arguments(payload)[1]["extra"] = 1
    assert load_arguments(payload) == ((1,), {})


def test_lambdas_and_local_classes_are_arguments_and_results():
    class Point:
        def __init__(self, x):
            self.x = x

    (f, point), names = load_arguments(
        dump_arguments("f", (lambda x: x + 1, Point(3)), {"kind": Point})
    )
    assert f(1) == 2
    assert point.x == 3
    assert names["kind"](4).x == 4
    assert load_result(dump_result(lambda: 5))() == 5


# Functions


def test_closures_and_their_values_arrive():
    offset = 10

    def outer(x):
        def inner(y):
            return x + y + offset

        return inner

    assert twice(outer)(1)(2) == 13


def test_a_recursive_closure_arrives():
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    assert twice(factorial)(5) == 120


def test_mutually_recursive_closures_arrive():
    def is_even(n):
        return n == 0 or is_odd(n - 1)

    def is_odd(n):
        return n != 0 and is_even(n - 1)

    assert twice(is_even)(10)


def test_defaults_and_attributes_arrive():
    def f(a=1, *, b=2):
        return a + b

    f.label = "mine"
    again = twice(f)
    assert again() == 3
    assert again.label == "mine"


def test_bound_methods_partials_and_builtins_arrive():
    class Counter:
        def __init__(self, start):
            self.start = start

        def add(self, n):
            return self.start + n

    assert twice(Counter(2).add)(3) == 5
    assert twice(functools.partial(Counter(2).add, 4))() == 6
    assert twice(attrgetter("start"))(Counter(7)) == 7
    assert twice(len)("abc") == 3


def test_what_can_be_imported_is_sent_by_name():
    payload = dump_function("join", twice)
    assert len(payload) < 100
    assert load_function(payload) is twice


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


def python(script: str) -> bytes:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


@pytest.fixture(scope="module")
def in_main():
    """What a script dumped of its own; here it cannot be imported."""
    return pickle.loads(python(IN_MAIN))


def test_functions_in_main_arrive(in_main):
    assert load_function(in_main["function"])(10) == 55
    assert load_function(in_main["lambda"])(10) == 155


def test_classes_in_main_arrive(in_main):
    assert load_function(in_main["class"])(5).scaled(6) == 30
    assert load_function(in_main["builder"])(50).scaled(6) == 100
    assert load_result(in_main["result"]).scaled(7) == 21


def test_arguments_from_main_arrive(in_main):
    (model, fibonacci), names = load_arguments(in_main["arguments"])
    assert model.scaled(2) == 8
    assert fibonacci(6) == 8
    assert names["kind"].__name__ == "Model"


def test_exceptions_from_main_arrive(in_main):
    error = pickle.loads(in_main["exception"])
    assert type(error).__name__ == "Broken"
    assert error.args == (3, "why")


# Sent by name


def test_a_reference_is_imported():
    payload = dump_reference("collections", "OrderedDict.fromkeys")
    assert load_function(payload)("ab") == {"a": None, "b": None}


class Remote:
    """As a decorator leaves it in its module: not a function, and wraps one."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.__aiogpu_function__ = function


@Remote
def decorated():
    return "the function itself"


def test_a_reference_means_the_function_inside_its_decoration():
    function = load_function(dump_reference(__name__, "decorated"))
    assert type(function) is not Remote
    assert function() == "the function itself"


def test_a_reference_to_nothing_raises_what_the_import_raises():
    with pytest.raises(ModuleNotFoundError):
        load_function(dump_reference("aiogpu_no_such_module", "f"))
    with pytest.raises(AttributeError):
        load_function(dump_reference("collections", "no_such_function"))


def test_a_callable_tuple_is_no_reference():
    class Adder(namedtuple("Adder", "a b")):
        __slots__ = ()

        def __call__(self):
            return self.a + self.b

    assert twice(Adder(1, 2))() == 3


# Sent by value


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
    function = dump_function("sides", library.sides)
    result = dump_result(library.Shape())
    monkeypatch.setitem(sys.modules, "aiogpu_library", None)  # it cannot be imported
    assert load_function(function)() == 4
    assert load_result(result).sides == 4


def test_by_value_holds_for_a_package_and_what_is_in_it(library):
    assert is_sent_by_value("aiogpu_library")
    assert is_sent_by_value("aiogpu_library.inner.most")
    assert not is_sent_by_value("aiogpu_library_too")
    assert not is_sent_by_value("collections")
    cloudpickle.unregister_pickle_by_value(library)
    assert not is_sent_by_value("aiogpu_library")


# What cannot be pickled


def test_a_function_that_cannot_be_pickled_is_refused_with_the_path():
    lock = threading.Lock()

    def work():
        return lock

    with pytest.raises(SerializationError) as caught:
        dump_function("work", work)

    text = str(caught.value)
    assert text.startswith(
        "the function work cannot be pickled: work.__closure__.lock (a lock): TypeError"
    )
    assert text.endswith("pass what it is made from.")
    assert isinstance(caught.value.__cause__, TypeError)


class Referring:
    """As a handle is: a part of what is sent, and of nothing else."""

    def __reduce__(self):
        return int, (add_handle("train", lambda: None),)


def test_a_function_that_holds_a_handle_is_refused_with_the_path():
    handle = Referring()

    def work():
        return handle

    with pytest.raises(SerializationError) as caught:
        dump_function("work", work)
    told = str(caught.value)
    assert "work.__closure__.handle (a Referring): MisuseError" in told
    assert told.endswith("Await it, and pickle the value.")


def test_an_argument_that_cannot_be_pickled_is_refused_with_the_path():
    def path(*args, **kwargs):
        with pytest.raises(SerializationError) as caught:
            dump_arguments("f", args, kwargs)
        prefix = "the arguments of f.remote() cannot be pickled: "
        assert str(caught.value).startswith(prefix)
        return str(caught.value).removeprefix(prefix).split(":")[0]

    lock = threading.Lock()
    assert path(lock) == "args[0] (a lock)"
    assert path(1, [2, lock]) == "args[1][1] (a lock)"
    assert path(1, db=lock) == "kwargs['db'] (a lock)"
    assert path([1], a=1, db={"k": lock}) == "kwargs['db']['k'] (a lock)"


def test_a_result_that_cannot_be_pickled_is_refused_with_the_path():
    with pytest.raises(SerializationError, match=r"the result .* result\[0\] \(a lock"):
        dump_result([threading.Lock()])


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


# What cannot be unpickled


def fail(error):
    raise error


class Raising:
    """Raises when it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return fail, (self.error,)


@pytest.mark.parametrize("error", [ValueError("no"), ImportError("gone"), Mute()])
def test_an_error_on_unpickling_a_result_is_the_cause(error):
    payload = dump_result(Raising(error))
    with pytest.raises(DeserializationError, match=type(error).__name__) as caught:
        load_result(payload)
    assert type(caught.value.__cause__) is type(error)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_loop_is_named_and_not_raised(error):
    payload = dump_result(Raising(error))
    with pytest.raises(DeserializationError, match=type(error).__name__) as caught:
        load_result(payload)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "unpickled in this process: KeyboardInterrupt. Is its"),
        (ValueError("no."), "unpickled in this process: ValueError: no. Is its"),
        (MisuseError("not so."), "had in this process: not so.$"),
    ],
)
def test_an_error_on_unpickling_a_result_is_told_in_sentences(error, told):
    payload = dump_result(Raising(error))
    with pytest.raises(DeserializationError, match=f"the result cannot be {told}"):
        load_result(payload)


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


# Exceptions


def test_an_exception_is_pickled_or_not():
    payload, why_not = dump_exception(ValueError("no"))
    assert pickle.loads(payload).args == ("no",)
    assert why_not == ""
    payload, why_not = dump_exception(ValueError(threading.Lock()))
    assert payload is None
    assert "(a lock): TypeError" in why_not


@pytest.mark.parametrize("second", [ValueError(), SystemExit(3), KeyboardInterrupt()])
def test_no_exception_s_reducer_gets_through(second):
    payload, why_not = dump_exception(ValueError(Refusing(second)))
    assert payload is None
    assert type(second).__name__ in why_not


def test_the_text_of_an_exception_can_always_be_had():
    assert safe_text(ValueError("no")) == "no"
    assert safe_text(KeyError("k")) == "'k'"
    assert safe_text(Mute()) == "<its text cannot be had: SystemExit>"
