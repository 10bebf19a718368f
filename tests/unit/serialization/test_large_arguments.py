"""Advice about what is large: what makes it so, and what is sent repeatedly."""

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

MIB = 1 << 20


TABLE = list(range(300_000))


SMALL = [1, 2, 3]


def local(function):
    """The function as if it were defined where it cannot be imported from."""
    function.__module__ = "__main__"
    function.__qualname__ = "local.<locals>." + function.__name__
    return function


class Holder:
    def __init__(self, **parts):
        vars(self).update(parts)


class Fickle:
    """Reduces only the first time."""

    calls = 0

    def __reduce_ex__(self, protocol):
        Fickle.calls += 1
        if Fickle.calls > 1:
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
        (Fickle(), "it"),
        (threading.Lock(), "it"),
        (deep(MAX_DEPTH * 2), "it" + "[0]" * MAX_DEPTH),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_path_leads_to_what_stands_out(value, path):
    assert find_heaviest("it", value)[0] == path


def test_the_size_is_that_of_the_part():
    _, size = find_heaviest("it", {"a": np.zeros(MIB), "b": b"x" * 1000})
    assert 0 <= size - 8 * MIB < 1000
    assert pickled_size([threading.Lock()]) == 0, "it cannot be pickled"
    assert format_size(MIB * 25 // 2) == "12.5 MiB"


def test_a_large_function_is_named_with_what_makes_it_large():
    with pytest.warns(AiogpuWarning) as caught:
        advise_on_function("f", closure(np.zeros(MIB)), 8 * MIB + 700)
    text = str(caught[0].message)
    assert text.startswith(
        "f is 8.0 MiB when pickled, of which 8.0 MiB are f.__closure__.values[0]; every"
    )
    assert "await aiogpu.put(" in text
    assert caught[0].filename == __file__
    several = closure(*(np.zeros(MIB) for _ in range(3)))
    with pytest.warns(AiogpuWarning, match=r"24.0 MiB are f.__closure__.values; every"):
        advise_on_function("f", several, 24 * MIB)


# What is passed repeatedly


class Slotted:
    __slots__ = ("lock", "values")

    def __init__(self, values):
        self.values = values


class Opaque:
    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise ZeroDivisionError


class Weightless:
    """Never large when weighed, and never forgotten by weak references."""


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
def told(monkeypatch):
    """The warnings given."""
    texts: list[str] = []
    monkeypatch.setattr(module, "advise", texts.append)
    return texts


def pass_often(repeats, value, count=REPEATS, function="f"):
    for _ in range(count):
        repeats.note(function, (value,), {})


@pytest.mark.parametrize("kind", KINDS)
def test_the_eighth_call_with_the_same_object_is_noticed(kind, told):
    value, repeats = KINDS[kind](), RepeatedArguments()
    pass_often(repeats, value, REPEATS - 1)
    assert told == []
    pass_often(repeats, value, 1)
    (text,) = told
    assert text.startswith(f"args[0] of f was the same {type(value).__name__} in 8 ")
    assert "await aiogpu.put(" in text
    pass_often(repeats, value, 30)
    assert len(told) == 1


def test_objects_that_take_turns_are_noticed_and_a_small_one_beside_them_is_not(told):
    models, repeats = [np.zeros(MIB), np.ones(MIB)], RepeatedArguments()
    small = Weightless()
    for index in range(2 * REPEATS):
        repeats.note("f", (small, "word", models[index % 2]), {})
    assert [text[:12] for text in told] == ["args[2] of f"]


def test_new_bytes_of_other_content_are_not_noticed(told):
    repeats = RepeatedArguments()
    for index in range(20):
        for kind in (bytes, bytearray):
            repeats.note("f", (kind([index]) * 2 * MIB,), {})
        repeats.note("f", (chr(65 + index) * 2 * MIB,), {})
        repeats.note("f", (list(range(index, MIB // 4)),), {})
    assert told == []


@pytest.mark.parametrize("place", [slice(None), 0, MIB // 2, -1])
def test_a_buffer_that_is_filled_anew_is_not_noticed(place, told):
    frame, repeats = np.zeros(MIB), RepeatedArguments()
    for index in range(99):
        frame[place] = index
        repeats.note("f", (frame,), {})
    assert told == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_object_is_kept_alive(kind, told):
    class Witness:
        pass

    witness, repeats = Witness(), RepeatedArguments()
    seen = weakref.ref(witness)
    held = [KINDS[kind](), witness, (witness,), {"a": witness, witness: 1}]
    pass_often(repeats, held, 3)
    pass_often(repeats, witness, 3)
    pass_often(repeats, {1: witness}, 3)
    del witness, held
    gc.collect()
    assert seen() is None


def test_what_is_remembered_is_bounded(told):
    repeats, kept = RepeatedArguments(), [Weightless() for _ in range(REMEMBERED * 3)]
    for value in kept:
        repeats.note("f", (value,), {})
    assert len(repeats._seen) == REMEMBERED
    many = np.zeros(MIB)
    for index in range(REMEMBERED + 5):
        pass_often(repeats, many, REPEATS, f"f{index}")
    assert len(told) == REMEMBERED + 5
    assert len(repeats._warned) == REMEMBERED


def test_what_is_used_is_remembered_longest(told):
    repeats, value = RepeatedArguments(), np.zeros(MIB)
    kept = [Weightless() for _ in range(REMEMBERED * REPEATS)]
    for index, other in enumerate(kept):
        repeats.note("f", (other,), {})
        if index % (REMEMBERED // 2) == 0:
            repeats.note("f", (value,), {})
    assert len(told) == 1


def test_what_cannot_be_reduced_is_passed_over(told):
    repeats = RepeatedArguments()
    pass_often(repeats, Opaque())
    pass_often(repeats, [Opaque(), threading.Lock()])
    pass_often(repeats, ())
    pass_often(repeats, {})
    assert told == []
