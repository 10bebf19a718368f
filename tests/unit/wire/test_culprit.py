from __future__ import annotations

import copyreg
import functools
import socket
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle
import pytest

from aiogpu.serialization.diagnostics import MAX_DEPTH, MAX_PARTS, find_unpicklable

LOCK = threading.Lock()


def find(value: object) -> str:
    return find_unpicklable({"it": value}, cloudpickle.dumps)


def local(function):
    """The function as if it were defined where it cannot be imported from."""
    function.__module__ = "__main__"
    function.__qualname__ = "local.<locals>." + function.__name__
    return function


# Containers


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "it (a lock)"),
        ([1, [2, LOCK]], "it[1][1] (a lock)"),
        ((1, LOCK), "it[1] (a lock)"),
        ({"db": {3: LOCK}}, "it['db'][3] (a lock)"),
        ({LOCK}, "it[0] (a lock)"),
        (frozenset([LOCK]), "it[0] (a lock)"),
        (deque([1, LOCK]), "it[1] (a lock)"),
        (OrderedDict(a=LOCK), "it['a'] (a lock)"),
        (defaultdict(int, a=LOCK), "it['a'] (a lock)"),
        (UserDict(a=LOCK), "it.data['a'] (a lock)"),
        (namedtuple("Pair", "a b")(1, LOCK), "it[1] (a lock)"),
        ({"k" * 99: LOCK}, f"it['{'k' * 59}] (a lock)"),
        ({"rows": (row for row in ())}, "it['rows'] (a generator)"),
    ],
)
def test_the_path_leads_through_containers(value, path):
    assert find(value) == path


def test_the_first_root_that_fails_is_named():
    roots = {"args[0]": 1, "args[1]": [LOCK], "kwargs['db']": LOCK}
    assert find_unpicklable(roots, cloudpickle.dumps) == "args[1][0] (a lock)"


def test_where_nothing_fails_alone_the_first_root_is_named():
    assert find_unpicklable({"f": 1, "g": 2}, cloudpickle.dumps) == "f"
    assert find_unpicklable({}, cloudpickle.dumps) == "it"


# Functions


def test_the_path_leads_through_a_closure():
    class Database:
        def __init__(self):
            self.url = "db://"
            self.socket = socket.socket()

    db = Database()

    def f():
        return db

    with db.socket:
        path = find_unpicklable({"f": f}, cloudpickle.dumps)
    assert path == "f.__closure__.db.socket (a socket)"


def test_an_empty_cell_is_passed_over():
    def f():
        return early, late

    late = LOCK
    assert find(f) == "it.__closure__.late (a lock)"
    early = LOCK
    assert find(f) == "it.__closure__.early (a lock)"


def test_the_path_leads_through_globals():
    @local
    def f():
        return LOCK

    assert find(f) == "it.__globals__.LOCK (a lock)"


def test_the_path_leads_through_globals_of_inner_code():
    @local
    def lambdas():
        return lambda: [LOCK for _ in range(3)]

    @local
    def comprehension():
        return {(n, LOCK) for n in range(3)}

    assert find(lambdas) == "it.__globals__.LOCK (a lock)"
    assert find(comprehension) == "it.__globals__.LOCK (a lock)"


def test_an_attribute_of_a_global_s_name_is_no_global():
    @local
    def f(x, found=(1, LOCK)):
        return x.LOCK, found, undefined_here  # noqa: F821

    assert find(f) == "it.__defaults__[0][1] (a lock)"


def test_the_path_leads_through_defaults_attributes_and_annotations():
    def default(a, b=LOCK):
        pass

    def by_name(a, *, b=LOCK):
        pass

    def attribute():
        pass

    def annotation():
        pass

    attribute.lock = LOCK
    annotation.__annotations__["lock"] = LOCK
    assert find(default) == "it.__defaults__[0] (a lock)"
    assert find(by_name) == "it.__kwdefaults__.b (a lock)"
    assert find(attribute) == "it.lock (a lock)"
    assert find(annotation) == "it.__annotations__.lock (a lock)"


def test_the_path_leads_through_a_decorated_function():
    lock = threading.Lock()

    def decorate(function):
        @functools.wraps(function)
        def wrapper():
            with lock:
                return function()

        return wrapper

    @decorate
    def f():
        pass

    assert find(f) == "it.__closure__.lock (a lock)"


def test_the_path_leads_through_a_cached_function():
    lock = threading.Lock()

    @functools.cache
    def f():
        return lock

    assert find(f) == "it.__wrapped__.__closure__.lock (a lock)"


def test_a_recursive_function_is_entered_once():
    lock = threading.Lock()

    def f(n):
        return f(n - 1) if n else lock

    assert find(f) == "it.__closure__.lock (a lock)"


def test_functions_that_call_each_other_are_entered_once():
    lock = threading.Lock()

    def f(n):
        return g(n)

    def g(n):
        return f(n) if n else lock

    assert find(f) == "it.__closure__.g.__closure__.lock (a lock)"


def test_the_path_leads_through_partials_and_bound_methods():
    class Server:
        def __init__(self):
            self.lock = threading.Lock()

        def serve(self):
            pass

        @classmethod
        def make(cls):
            return LOCK

    assert find(Server().serve) == "it.__self__.lock (a lock)"
    assert find(functools.partial(print, 1, LOCK)) == "it.args[1] (a lock)"
    assert find(functools.partial(print, end=LOCK)) == "it.keywords['end'] (a lock)"
    assert find(functools.partial(Server().serve)) == "it.func.__self__.lock (a lock)"


# Instances


def test_the_path_leads_through_attributes_and_slots():
    class Slotted:
        __slots__ = ("lock", "unset")

    class Both(Slotted):
        def __init__(self):
            self.name = "both"
            self.lock = threading.Lock()

    slotted = Slotted()
    slotted.lock = threading.Lock()
    assert find(slotted) == "it.lock (a lock)"
    assert find(Both()) == "it.lock (a lock)"


def test_the_path_leads_through_a_dataclass():
    @dataclass(slots=True)
    class Config:
        name: str
        lock: object

    @dataclass(frozen=True, slots=True)
    class Frozen:
        name: str
        lock: object

    assert find([Config("c", LOCK)]) == "it[0].lock (a lock)"
    assert find([Frozen("c", LOCK)]) == "it[0].__getstate__()[1] (a lock)"


def test_the_path_leads_through_containers_with_attributes():
    class Names(list):
        pass

    class Pair(namedtuple("Pair", "a b")):
        pass

    class Table(dict):
        pass

    for container in (Names(), Pair(1, 2), Table()):
        container.lock = LOCK
        assert find(container) == "it.lock (a lock)"


def test_the_path_leads_through_an_exception():
    error = ValueError("text", LOCK)
    assert find(error) == "it.__reduce__()[2] (a lock)"
    error = ValueError("text")
    error.lock = LOCK
    assert find(error) == "it.lock (a lock)"


def test_the_path_leads_through_a_class_of_main():
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


def test_a_class_that_can_be_imported_is_not_entered():
    assert find([threading.Thread, LOCK]) == "it[1] (a lock)"


def test_what_getstate_leaves_out_is_not_to_blame():
    class Session:
        def __init__(self):
            self.lock = threading.Lock()
            self.socket = threading.Condition()

        def __getstate__(self):
            return {"socket": self.socket}

    assert find(Session()) == "it.socket._lock (a RLock)"


def test_the_path_leads_through_a_state_of_the_object_s_own():
    class Session:
        def __getstate__(self):
            return [1, LOCK]

        def __setstate__(self, state):
            pass

    assert find(Session()) == "it.__getstate__()[1] (a lock)"


def test_the_path_leads_through_what_makes_an_object():
    class Session:
        def __reduce__(self):
            return print, (1, LOCK)

    assert find(Session()) == "it.__reduce__()[2] (a lock)"


class Registered:
    """Pickled by a reducer in `copyreg`."""


def test_the_path_leads_through_a_registered_reducer(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda it: (max, (1, LOCK)))
    assert find(Registered()) == "it.__reduce__()[2] (a lock)"


def test_an_object_pickled_by_name_is_itself_the_culprit():
    class Named:
        def __reduce__(self):
            return "no_such_name"

    assert find([Named()]) == "it[0] (a Named)"


def test_a_weak_reference_is_itself_the_culprit():
    assert find([weakref.ref(test_a_weak_reference_is_itself_the_culprit)]) == (
        "it[0] (a ReferenceType)"
    )


class Slotted:
    __slots__ = ("name",)

    def __init__(self, name):
        self.name = name


def test_the_names_of_slots_are_not_to_blame():
    class Local(Slotted):
        __slots__ = ("other",)
        lock = LOCK

    assert find(Local) == "it.lock (a lock)"


@pytest.mark.parametrize(
    "whole",
    [find, Slotted, Slotted("a"), Registered(), [1], {1: 2}, (1,), property(find)],
)
def test_where_no_part_fails_alone_the_whole_is_the_culprit(whole):
    def dumps(value):
        if value is whole:
            raise ValueError

    assert find_unpicklable({"it": whole}, dumps) == f"it (a {type(whole).__name__})"


# Foreign code on the way


class Refusing:
    def __reduce_ex__(self, protocol):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), OSError()])
def test_an_object_whose_reducer_raises_is_the_culprit(error):
    refusing = Refusing()
    refusing.error = error
    assert find({"k": refusing}) == "it['k'] (a Refusing)"


def test_an_object_whose_reducer_gives_nonsense_is_the_culprit():
    class Odd:
        def __reduce__(self):
            return 3

    assert find([Odd()]) == "it[0] (a Odd)"


def test_a_key_that_has_no_repr_ends_the_path():
    class Key:
        def __repr__(self):
            raise ValueError

    assert find([{Key(): LOCK}]) == "it[0] (a dict)"


def test_a_mapping_of_the_user_s_is_not_asked_for_its_items():
    class Remote(Mapping):
        def __init__(self):
            self.lock = LOCK

        def __getitem__(self, key):
            raise AssertionError

        __iter__ = __len__ = __getitem__

    assert find(Remote()) == "it.lock (a lock)"


def test_an_object_that_lies_about_its_class_ends_the_path():
    class Liar:
        def __init__(self):
            self.lock = LOCK

        @property
        def __class__(self):
            raise ValueError

    assert find([Liar()]) == "it[0] (a Liar)"


# Bounds


def test_the_path_ends_at_the_deepest():
    value = LOCK
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    assert find(value) == f"it{'[0]' * MAX_DEPTH} (a list)"


def test_the_parts_of_one_object_are_tried_up_to_the_widest():
    assert find([*[1] * (MAX_PARTS - 1), LOCK]) == f"it[{MAX_PARTS - 1}] (a lock)"
    assert find([*[1] * MAX_PARTS, LOCK]) == "it (a list)"


def test_a_structure_that_holds_itself_is_entered_once():
    value = [1]
    value += [value, {"self": value, "lock": LOCK}]
    assert find(value) == "it[2]['lock'] (a lock)"


def test_pickling_is_tried_at_most_once_for_each_part_of_a_level():
    tried = []

    def dumps(value):
        tried.append(value)
        cloudpickle.dumps(value)

    find_unpicklable({"it": [0, 1, [2, LOCK]]}, dumps)
    assert len(tried) == 1 + 3 + 2


IN_MAIN = """
import cloudpickle, threading
from aiogpu.serialization.diagnostics import find_unpicklable

LOCK = threading.Lock()

class Server:
    def serve(self):
        return LOCK

def f():
    return Server()

def fine():
    return 1

print(find_unpicklable({"f": fine}, cloudpickle.dumps))
print(find_unpicklable({"f": f}, cloudpickle.dumps))
print(find_unpicklable({"f": Server().serve}, cloudpickle.dumps))
"""


def test_the_path_leads_through_what_main_defines():
    command = [sys.executable, "-c", IN_MAIN]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    serve = "serve.__globals__.LOCK (a lock)"
    assert out.splitlines() == [
        "f",
        f"f.__globals__.Server.{serve}",
        f"f.__self__.__class__.{serve}",
    ]
