"""Errors that name the part of an object that cannot be pickled."""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle
import numpy as np
import pytest

from aiogpu.errors import AiogpuWarning, SerializationError
from aiogpu.serialization.diagnostics import (
    MAX_DEPTH,
    MAX_PARTS,
    Line,
    advise,
    find_unpicklable,
    waiting_line,
)
from aiogpu.serialization.references import (
    SHARED_FROM,
    add_handle,
    collect_references,
    is_for_one_node,
)
from aiogpu.serialization.serializer import (
    PUT,
    dump_arguments,
    dump_function,
    dump_result,
)
from tests.unit.serialization.payloads import Holder, local

LOCK = threading.Lock()


def find(value: object) -> str:
    return find_unpicklable({"it": value}, cloudpickle.dumps)


# Containers and instances


class Slotted:
    __slots__ = ("lock", "unset")

    def __init__(self):
        self.lock = LOCK


class WithState:
    """An object whose pickled state lacks its lock."""

    def __init__(self):
        self.lock = LOCK

    def __getstate__(self):
        return {"condition": threading.Condition()}


class OwnState:
    def __getstate__(self):
        return [1, LOCK]

    def __setstate__(self, state):
        pass


class Reduced:
    def __reduce__(self):
        return print, (1, LOCK)


class Named:
    def __reduce__(self):
        return "no_such_name"


class Nonsense:
    def __reduce__(self):
        return 3


class Names(list):
    pass


class Remote(Mapping):
    """A mapping whose items must not be read."""

    def __init__(self):
        self.lock = LOCK

    def __getitem__(self, key):
        raise AssertionError

    __iter__ = __len__ = __getitem__


class Liar(Holder):
    @property
    def __class__(self):
        raise ValueError


class Unprintable:
    def __repr__(self):
        raise ValueError


@dataclass(slots=True)
class Config:
    name: str
    lock: object


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    lock: object


def with_lock(value):
    value.lock = LOCK
    return value


def deep(depth: int) -> object:
    value: object = LOCK
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> object:
    value: list[object] = [1]
    value += [value, {"self": value, "lock": LOCK}]
    return value


LARGE = np.zeros(SHARED_FROM)
LOCKED = [LOCK]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "it (a lock)"),
        ([1, [2, (1, LOCK)]], "it[1][1][1] (a lock)"),
        ({"db": {3: LOCK}}, "it['db'][3] (a lock)"),
        ({LOCK}, "it[0] (a lock)"),
        (deque([1, LOCK]), "it[1] (a lock)"),
        (defaultdict(int, a=LOCK), "it['a'] (a lock)"),
        (UserDict(a=LOCK), "it.data['a'] (a lock)"),
        (namedtuple("Pair", "a b")(1, LOCK), "it[1] (a lock)"),
        ({"k" * 99: LOCK}, f"it['{'k' * 59}] (a lock)"),
        ({"rows": (row for row in ())}, "it['rows'] (a generator)"),
        ([LARGE, {"c": LOCK}], "it[1]['c'] (a lock)"),
        (np.array([1, LOCK], object), "it.__getstate__()[4][1] (a lock)"),
        (Slotted(), "it.lock (a lock)"),
        ([Config("c", LOCK)], "it[0].lock (a lock)"),
        ([Frozen("c", LOCK)], "it[0].__getstate__()[1] (a lock)"),
        (with_lock(Names()), "it.lock (a lock)"),
        (with_lock(ValueError("text")), "it.lock (a lock)"),
        (ValueError("text", LOCK), "it.__reduce__()[2] (a lock)"),
        (WithState(), "it.condition._lock (a RLock)"),
        (OwnState(), "it.__getstate__()[1] (a lock)"),
        (Reduced(), "it.__reduce__()[2] (a lock)"),
        ([threading.Thread, LOCK], "it[1] (a lock)"),
        (Remote(), "it.lock (a lock)"),
        ([Named()], "it[0] (a Named)"),
        ([Nonsense()], "it[0] (a Nonsense)"),
        ([weakref.ref(find)], "it[0] (a ReferenceType)"),
        ([{Unprintable(): LOCK}], "it[0] (a dict)"),
        ([Liar(lock=LOCK)], "it[0] (a Liar)"),
        (deep(MAX_DEPTH + 1), f"it{'[0]' * MAX_DEPTH} (a list)"),
        ([*[1] * (MAX_PARTS - 1), LOCK], f"it[{MAX_PARTS - 1}] (a lock)"),
        ([*[1] * MAX_PARTS, LOCK], "it (a list)"),
        (cyclic(), "it[2]['lock'] (a lock)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_path_names_the_part_that_cannot_be_pickled(value, path):
    assert find(value) == path


class Registered:
    """A class with a reducer in `copyreg`."""


def test_path_follows_a_registered_reducer(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda it: (max, (1, LOCK)))
    assert find(Registered()) == "it.__reduce__()[2] (a lock)"


@pytest.mark.parametrize(
    "whole",
    [find, Slotted, Slotted(), Registered(), [1], {1: 2}, (1,), property(find)],
    ids=lambda value: type(value).__name__,
)
def test_object_is_named_if_no_part_of_it_fails_alone(whole):
    def dumps(value):
        if value is whole:
            raise ValueError

    assert find_unpicklable({"it": whole}, dumps) == f"it (a {type(whole).__name__})"


def test_path_names_the_first_root_that_fails():
    roots = {"args[0]": 1, "args[1]": [LOCK], "kwargs['db']": LOCK}
    assert find_unpicklable(roots, cloudpickle.dumps) == "args[1][0] (a lock)"
    assert find_unpicklable({"f": 1, "g": 2}, cloudpickle.dumps) == "f"
    assert find_unpicklable({}, cloudpickle.dumps) == "it"


# Functions and classes


def test_path_follows_closures():
    lock = threading.Lock()

    def decorate(function):
        @functools.wraps(function)
        def wrapper():
            with lock:
                return function()

        return wrapper

    @decorate
    def decorated():
        pass

    @functools.cache
    def cached():
        return lock

    def f(n):
        return g(n)

    def g(n):
        return f(n) if n else lock

    assert find(decorated) == "it.__closure__.lock (a lock)"
    assert find(cached) == "it.__wrapped__.__closure__.lock (a lock)"
    assert find(f) == "it.__closure__.g.__closure__.lock (a lock)"


def test_path_skips_empty_cells():
    def f():
        return early, late

    late = LOCK
    assert find(f) == "it.__closure__.late (a lock)"
    early = LOCK
    assert find(f) == "it.__closure__.early (a lock)"


def test_path_follows_globals_of_functions_and_inner_code():
    @local
    def f():
        return LOCK

    @local
    def lambdas():
        return lambda: [LOCK for _ in range(3)]

    @local
    def attribute(x, default=(1, LOCK)):
        return x.LOCK, default, undefined_here  # noqa: F821

    assert find(f) == "it.__globals__.LOCK (a lock)"
    assert find(lambdas) == "it.__globals__.LOCK (a lock)"
    assert find(attribute) == "it.__defaults__[0][1] (a lock)"


def test_path_follows_defaults_attributes_and_annotations():
    def by_name(a, *, b=LOCK):
        pass

    def attribute():
        pass

    def annotation():
        pass

    attribute.lock = LOCK
    annotation.__annotations__["lock"] = LOCK
    assert find(by_name) == "it.__kwdefaults__.b (a lock)"
    assert find(attribute) == "it.lock (a lock)"
    assert find(annotation) == "it.__annotations__.lock (a lock)"


def test_path_follows_classes_of_the_program():
    class Server:
        lock = threading.Lock()

    class Replica(Server):
        pass

    class Handler:
        __slots__ = ("name",)

        @staticmethod
        def serve():
            return Server

    class Page:
        @property
        def text(self):
            return Server

    class Abstract(ABC):
        @abstractmethod
        def serve(self):
            return Server

        @classmethod
        def make(cls):
            return Server

    assert find(Server) == "it.lock (a lock)"
    assert find(Server()) == "it.__class__.lock (a lock)"
    assert find(Replica()) == "it.__class__.__bases__[0].lock (a lock)"
    served = ".__closure__.Server.lock (a lock)"
    assert find(Handler) == f"it.serve.__func__{served}"
    assert find(Page) == f"it.text.fget{served}"
    assert find(Abstract) == f"it.serve{served}"


# Messages


class Bad(Holder):
    def __reduce__(self):
        raise ZeroDivisionError("not today")


class Referring:
    """An object like a handle, which can only be pickled as an argument."""

    def __reduce__(self):
        return int, (add_handle("train", lambda: None),)


@pytest.mark.parametrize(
    ("pickle", "message"),
    [
        (
            lambda: dump_arguments("f", (LARGE, {"x": LOCK}), {}),
            "the arguments of f.remote() cannot be pickled: args[1]['x'] (a lock): "
            "TypeError: cannot pickle '_thread.lock' object. ",
        ),
        (
            lambda: dump_arguments("f", (LARGE,), {"bad": Bad(a=LARGE)}),
            "the arguments of f.remote() cannot be pickled: kwargs['bad'] (a Bad): "
            "ZeroDivisionError: not today. ",
        ),
        (
            lambda: dump_result([LARGE, Bad()]),
            "the result cannot be pickled: result[1] (a Bad): ZeroDivisionError: not "
            "today. Return what it is made from",
        ),
        (
            lambda: dump_result(LOCK, PUT),
            "the value given to put() cannot be pickled: value (a lock): TypeError: "
            "cannot pickle '_thread.lock' object. Put what it is made from",
        ),
        (
            lambda: dump_function("work", lambda: LOCKED),
            "the function work cannot be pickled: work.__globals__.LOCKED[0] (a lock)",
        ),
        (
            lambda: dump_function("work", functools.partial(print, Referring())),
            "the function work cannot be pickled: work.args[0] (a Referring): "
            "MisuseError: ",
        ),
    ],
    ids=["argument", "by name", "result", "put", "function", "handle"],
)
def test_message_names_the_part_and_says_what_to_do(pickle, message):
    with pytest.raises(SerializationError) as caught:
        pickle()
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value.__cause__, Exception)


def test_message_suggests_a_module_unless_the_function_is_local():
    decorated = functools.singledispatch(lambda: None)
    decorated.__qualname__ = "sizes"
    with pytest.raises(SerializationError, match=r"or put sizes into a module, which"):
        dump_function("sizes", decorated)
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"pass what it is made from\.$"):
        dump_function("inner", lambda: lock)


# Lines of warnings


def test_warning_skips_only_frames_of_aiogpu_and_cloudpickle():
    space = {"__name__": "cloudpickle.cloudpickle", "advise": advise}
    exec("def pickled(): advise('slow')", space)
    inner = {"__name__": "aiogpu.api.remote_function", "pickled": space["pickled"]}
    exec("def remote(): pickled()", inner)
    with pytest.warns(AiogpuWarning) as caught:
        inner["remote"]()
    assert caught[0].filename == __file__
    space = {"__name__": "aiogpuish.tasks", "advise": advise}
    exec(compile("def f(): advise('slow')", "theirs.py", "exec"), space)
    with pytest.warns(AiogpuWarning) as caught:
        space["f"]()
    assert caught[0].filename == "theirs.py"


def test_advice_to_a_waiting_thread_names_its_line_and_its_api() -> None:
    before = waiting_line.set(Line("user.py", 3, {"__name__": "user"}))
    with pytest.warns(AiogpuWarning, match=r"write aiogpu\.sync\.put") as told:
        advise("write aiogpu.put(x)")
    waiting_line.reset(before)
    assert (told[0].filename, told[0].lineno) == ("user.py", 3)


def test_only_values_are_for_one_node() -> None:
    assert not is_for_one_node()
    with collect_references():
        assert is_for_one_node()
