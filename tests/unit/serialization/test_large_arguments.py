"""Advice about large functions and about arguments that are sent repeatedly."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import namedtuple

import numpy as np
import pytest

from aiogpu.errors import AiogpuWarning
from aiogpu.serialization import large_arguments as module
from aiogpu.serialization.diagnostics import MAX_DEPTH
from aiogpu.serialization.large_arguments import (
    REMEMBERED,
    REPEATS,
    RepeatedArguments,
    advise_on_function,
    find_heaviest,
    format_size,
    pickled_size,
)
from tests.unit.serialization.payloads import Holder, local

MIB = 1 << 20


TABLE = list(range(300_000))


SMALL = [1, 2, 3]


class PickledOnce:
    """An object that can be pickled only the first time."""

    calls = 0

    def __reduce_ex__(self, protocol):
        PickledOnce.calls += 1
        if PickledOnce.calls > 1:
            raise ZeroDivisionError
        return bytes, (b"x" * MIB,)


def cyclic() -> object:
    loop: list[object] = [b"x" * MIB, b"y" * MIB, b"z" * MIB]
    loop.insert(0, loop)
    return loop


def deep(depth: int) -> object:
    value: object = b"x" * MIB
    for _ in range(depth):
        value = [value]
    return value


def closure(*values):
    def f():
        return values

    return f


@local
def with_globals():
    return SMALL, TABLE


class Server:
    @local
    def serve(self):
        return TABLE


local(Server)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (b"x" * MIB, "it"),
        (np.zeros(MIB), "it"),
        (np.array([b"x" * MIB, b"y"], object), "it"),
        ({"a": {"b": (0, bytearray(MIB))}}, "it['a']['b'][1]"),
        (Holder(small=1, model=np.zeros(MIB)), "it.model"),
        (Holder(layers=[np.zeros(MIB)] * 2), "it.layers[0]"),
        ([np.zeros(MIB), np.zeros(MIB)], "it"),
        ([np.zeros(MIB), np.zeros(MIB // 2)], "it[0]"),
        ([np.zeros(MIB), *[np.zeros(MIB // 10)] * 2, np.zeros(MIB)], "it"),
        (json.JSONDecoder, "it"),
        (closure(np.zeros(MIB)), "it.__closure__.values[0]"),
        (with_globals, "it.__globals__.TABLE"),
        (cyclic(), "it"),
        (PickledOnce(), "it"),
        (threading.Lock(), "it"),
        (deep(MAX_DEPTH * 2), "it" + "[0]" * MAX_DEPTH),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_path_names_the_largest_part(value, path):
    assert find_heaviest("it", value)[0] == path


def test_size_is_that_of_the_largest_part():
    _, size = find_heaviest("it", {"a": np.zeros(MIB), "b": b"x" * 1000})
    assert 0 <= size - 8 * MIB < 1000
    assert pickled_size([threading.Lock()]) == 0, "a lock cannot be pickled"
    assert format_size(MIB * 25 // 2) == "12.5 MiB"


def test_warning_names_a_large_function_and_its_largest_part():
    with pytest.warns(AiogpuWarning) as caught:
        advise_on_function("f", closure(np.zeros(MIB)), 8 * MIB + 700)
    text = str(caught[0].message)
    assert text.startswith(
        "f is 8.0 MiB when pickled, of which 8.0 MiB are f.__closure__.values[0]; every"
    )
    assert "aiogpu.put(" in text
    assert caught[0].filename == __file__
    several = closure(*(np.zeros(MIB) for _ in range(3)))
    with pytest.warns(AiogpuWarning, match=r"24.0 MiB are f.__closure__.values; every"):
        advise_on_function("f", several, 24 * MIB)


# Repeated arguments


class Slotted:
    __slots__ = ("lock", "values")

    def __init__(self, values):
        self.values = values


class Opaque:
    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise ZeroDivisionError


class Small:
    """A small object that can have weak references."""


Pair = namedtuple("Pair", "a b")


KINDS = {
    "array": lambda: np.zeros(MIB),
    "array with gaps": lambda: np.zeros(MIB * 2)[::2],
    "bytes": lambda: bytes(2 * MIB),
    "bytearray": lambda: bytearray(2 * MIB),
    "text": lambda: "x" * 2 * MIB,
    "numbers": lambda: list(range(400_000)),
    "list": lambda: [np.zeros(MIB)],
    "tuple": lambda: (1, np.zeros(MIB)),
    "named tuple": lambda: Pair(np.zeros(MIB), None),
    "dictionary": lambda: {"model": {"weights": [np.zeros(MIB)]}},
    "slots": lambda: Slotted(np.zeros(MIB)),
    "deep": lambda: [[[[[np.zeros(MIB)]]]]],
}


@pytest.fixture
def warnings(monkeypatch):
    """The texts of the warnings."""
    texts: list[str] = []
    monkeypatch.setattr(module, "advise", texts.append)
    return texts


def pass_often(repeats, value, count=REPEATS, function="f"):
    for _ in range(count):
        repeats.note(function, (value,), {})


@pytest.mark.parametrize("kind", KINDS)
def test_eighth_call_with_the_same_object_is_warned_of(kind, warnings):
    value, repeats = KINDS[kind](), RepeatedArguments()
    pass_often(repeats, value, REPEATS - 1)
    assert warnings == []
    pass_often(repeats, value, 1)
    (text,) = warnings
    assert text.startswith(f"args[0] of f was the same {type(value).__name__} in 8 ")
    assert "aiogpu.put(" in text
    pass_often(repeats, value, 30)
    assert len(warnings) == 1


def test_alternating_large_objects_are_warned_of_and_small_ones_are_not(warnings):
    models, repeats = [np.zeros(MIB), np.ones(MIB)], RepeatedArguments()
    small = Small()
    for index in range(2 * REPEATS):
        repeats.note("f", (small, "word", models[index % 2]), {})
    assert [text[:12] for text in warnings] == ["args[2] of f"]


def test_new_objects_with_other_content_are_not_warned_of(warnings):
    repeats = RepeatedArguments()
    for index in range(20):
        for kind in (bytes, bytearray):
            repeats.note("f", (kind([index]) * 2 * MIB,), {})
        repeats.note("f", (chr(65 + index) * 2 * MIB,), {})
        repeats.note("f", (list(range(index, MIB // 4)),), {})
    assert warnings == []


@pytest.mark.parametrize("place", [slice(None), 0, MIB // 2, -1])
def test_buffer_with_changing_content_is_not_warned_of(place, warnings):
    frame, repeats = np.zeros(MIB), RepeatedArguments()
    for index in range(99):
        frame[place] = index
        repeats.note("f", (frame,), {})
    assert warnings == []


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_not_kept_alive(kind, warnings):
    class Witness:
        pass

    witness, repeats = Witness(), RepeatedArguments()
    reference = weakref.ref(witness)
    container = [KINDS[kind](), witness, (witness,), {"a": witness, witness: 1}]
    pass_often(repeats, container, 3)
    pass_often(repeats, witness, 3)
    pass_often(repeats, {1: witness}, 3)
    del witness, container
    gc.collect()
    assert reference() is None


def test_number_of_remembered_arguments_is_limited(warnings):
    repeats, values = RepeatedArguments(), [Small() for _ in range(REMEMBERED * 3)]
    for value in values:
        repeats.note("f", (value,), {})
    assert len(repeats._seen) == REMEMBERED
    many = np.zeros(MIB)
    for index in range(REMEMBERED + 5):
        pass_often(repeats, many, REPEATS, f"f{index}")
    assert len(warnings) == REMEMBERED + 5
    assert len(repeats._warned) == REMEMBERED


def test_recently_used_arguments_are_remembered_longest(warnings):
    repeats, value = RepeatedArguments(), np.zeros(MIB)
    others = [Small() for _ in range(REMEMBERED * REPEATS)]
    for index, other in enumerate(others):
        repeats.note("f", (other,), {})
        if index % (REMEMBERED // 2) == 0:
            repeats.note("f", (value,), {})
    assert len(warnings) == 1


def test_objects_that_cannot_be_pickled_are_ignored(warnings):
    repeats = RepeatedArguments()
    pass_often(repeats, Opaque())
    pass_often(repeats, [Opaque(), threading.Lock()])
    pass_often(repeats, ())
    pass_often(repeats, {})
    assert warnings == []
