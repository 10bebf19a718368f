"""What cannot be pickled or read is named, among arrays and their like too."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

from aiogpu.errors import DeserializationError, SerializationError
from aiogpu.serialization.diagnostics import find_unpicklable
from aiogpu.serialization.pickler import dump, dump_whole, measure
from aiogpu.serialization.references import SHARED_FROM
from aiogpu.serialization.serializer import (
    PUT,
    dump_arguments,
    dump_function,
    dump_result,
    load_result,
)
from tests.unit.wire.parcels import carried

LARGE = np.zeros(SHARED_FROM)
LOCK = threading.Lock()


class Bad:
    def __init__(self, **parts):
        vars(self).update(parts)

    def __reduce__(self):
        raise ZeroDivisionError("not today")


class Trap:
    """Pickles well, and raises when it is read."""

    def __init__(self, *raised):
        self.raised = raised

    def __reduce__(self):
        return raising, self.raised


def raising(error):
    raise error


def released():
    view = memoryview(bytes(9))
    view.release()
    return view


CULPRITS = {
    "beside an array": ([LARGE, LOCK], "it[1] (a lock)"),
    "within an array": (np.array([1, LOCK], object), "(a lock)"),
    "a reducer": ({"model": Bad()}, "it['model'] (a Bad)"),
    "below arrays": (
        {"a": LARGE, "b": [LARGE, {"c": Bad()}]},
        "it['b'][1]['c'] (a Bad)",
    ),
    "a view": ([memoryview(b"a"), released()], "it[1] (a memoryview)"),
    "many arrays": (
        [np.zeros(SHARED_FROM) for _ in range(99)] + [LOCK],
        "it[99] (a lock)",
    ),
}


@pytest.mark.parametrize("case", CULPRITS)
@pytest.mark.parametrize("pickled", [dump, dump_whole, measure])
def test_the_culprit_is_found_by_each_way_of_pickling(case, pickled):
    value, path = CULPRITS[case]
    assert find_unpicklable({"it": value}, pickled).endswith(path)


def test_the_culprit_stands_in_the_message():
    with pytest.raises(
        SerializationError, match=r"args\[1\]\['x'\] \(a lock\): TypeError: cannot"
    ):
        dump_arguments("f", (LARGE, {"x": LOCK}), {})
    with pytest.raises(
        SerializationError, match=r"kwargs\['bad'\] \(a Bad\): ZeroDivisionError: not t"
    ) as caught:
        dump_arguments("f", (LARGE,), {"bad": Bad(a=LARGE)})
    assert type(caught.value.__cause__) is ZeroDivisionError
    with pytest.raises(
        SerializationError, match=r"result\[1\] \(a Bad\).* Return what it is made"
    ):
        dump_result([LARGE, Bad()])
    with pytest.raises(
        SerializationError, match=r"put\(\) .*: value \(a lock\).* Put what it is made"
    ):
        dump_result(LOCK, PUT)
    bad = Bad()
    with pytest.raises(SerializationError, match=r"f\.__closure__\.bad \(a Bad\)"):
        dump_function("f", lambda: (LARGE, bad))


def test_what_cannot_be_read_says_so():
    for error in (KeyError("weights"), SystemExit(3)):
        payload = carried(dump_result([LARGE, Trap(error)]))
        with pytest.raises(DeserializationError, match=type(error).__name__):
            load_result(payload)


def hidden(make):
    """What a decorator has made of a function that its name finds no more."""
    made = make(lambda: None)
    made.__qualname__ = "sizes"
    return made


def test_a_function_that_cannot_be_pickled_may_be_imported():
    """Not so one that is made within another."""
    with pytest.raises(SerializationError, match=r"or put sizes into a module, which"):
        dump_function("sizes", hidden(functools.singledispatch))
    with pytest.raises(SerializationError, match=r"pass what it is made from\.$"):
        dump_function("inner", lambda: LOCK)
