from __future__ import annotations

import gc
import threading
import weakref
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

from aiogpu.errors import AiogpuWarning
from aiogpu.serialization import large_arguments as module
from aiogpu.serialization.large_arguments import REMEMBERED, REPEATS, RepeatedArguments

MIB = 1 << 20


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
def test_the_eighth_call_with_the_same_object_is_told(kind, told):
    value, repeats = KINDS[kind](), RepeatedArguments()
    pass_often(repeats, value, REPEATS - 1)
    assert told == []
    pass_often(repeats, value, 1)
    (text,) = told
    assert text.startswith(f"args[0] of f was the same {type(value).__name__} in 8 ")
    assert "await aiogpu.put(" in text
    pass_often(repeats, value, 30)
    assert len(told) == 1


def test_it_is_a_warning_at_the_line_of_the_call():
    value, repeats = np.zeros(MIB), RepeatedArguments()
    pass_often(repeats, value, REPEATS - 1)
    with pytest.warns(AiogpuWarning, match=r"8\.0 MiB") as caught:
        repeats.note("f", (value,), {})
    assert caught[0].filename == __file__


def test_an_argument_by_name_is_named(told):
    value, repeats = np.zeros(MIB), RepeatedArguments()
    for index in range(REPEATS):
        repeats.note("f", (index, None), {"x": value})
    assert told[0].startswith("kwargs['x'] of f ")


def test_each_function_and_argument_is_told_for_itself(told):
    value, repeats = np.zeros(MIB), RepeatedArguments()
    pass_often(repeats, value, REPEATS - 1)
    pass_often(repeats, value, REPEATS - 1, "g")
    assert told == []
    pass_often(repeats, value, 1)
    pass_often(repeats, value, 1, "g")
    assert [text[:12] for text in told] == ["args[0] of f", "args[0] of g"]


def test_objects_that_take_turns_are_told(told):
    models, repeats = [np.zeros(MIB), np.ones(MIB)], RepeatedArguments()
    for index in range(2 * REPEATS):
        repeats.note("f", (models[index % 2],), {})
    assert len(told) == 1


def test_a_small_object_beside_a_large_one_is_not_blamed(told):
    small, repeats = Weightless(), RepeatedArguments()
    for _ in range(99):
        repeats.note("f", (small, "word", np.zeros(MIB)), {})
    assert told == []


@pytest.mark.parametrize(
    "kind", sorted(set(KINDS) - {"bytes", "bytearray", "text", "numbers", "deep"})
)
def test_a_new_object_each_time_is_not_told(kind, told):
    """Though it has the address of the one before, more often than not."""
    repeats = RepeatedArguments()
    for _ in range(99):
        repeats.note("f", (KINDS[kind](),), {})
    assert told == []


def test_new_bytes_of_other_content_are_not_told(told):
    repeats = RepeatedArguments()
    for index in range(20):
        for kind in (bytes, bytearray):
            repeats.note("f", (kind([index]) * 2 * MIB,), {})
        repeats.note("f", (chr(65 + index) * 2 * MIB,), {})
        repeats.note("f", (list(range(index, MIB // 4)),), {})
    assert told == []


@pytest.mark.parametrize("place", [slice(None), 0, MIB // 2, -1])
def test_a_buffer_that_is_filled_anew_is_not_told(place, told):
    frame, repeats = np.zeros(MIB), RepeatedArguments()
    for index in range(99):
        frame[place] = index
        repeats.note("f", (frame,), {})
    assert told == []


def test_a_list_that_grows_is_not_told(told):
    rows, repeats = [0] * 2 * MIB, RepeatedArguments()
    for _ in range(99):
        rows.append(0)
        repeats.note("f", (rows,), {})
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
    assert len(repeats._told) == REMEMBERED


def test_what_is_used_is_remembered_longest(told):
    repeats, value = RepeatedArguments(), np.zeros(MIB)
    kept = [Weightless() for _ in range(REMEMBERED * REPEATS)]
    for index, other in enumerate(kept):
        repeats.note("f", (other,), {})
        if index % (REMEMBERED // 2) == 0:
            repeats.note("f", (value,), {})
    assert len(told) == 1


def test_a_call_of_a_thousand_arguments_is_looked_at_in_part(told):
    repeats, values = RepeatedArguments(), tuple(Weightless() for _ in range(1000))
    repeats.note("f", values, {})
    assert len(repeats._seen) == module.MAX_ITEMS


@dataclass
class Elementwise:
    """Compares as arrays do, and must never be asked to."""

    values: object

    def __eq__(self, other):
        raise ZeroDivisionError

    __hash__ = None


def test_objects_are_never_compared(told):
    repeats = RepeatedArguments()
    box = [Elementwise(np.zeros(MIB)), Elementwise(np.zeros(MIB))]
    for _ in range(REPEATS):
        repeats.note("f", (box,), {})
        box.reverse()
    assert told == []


def test_what_will_not_be_reduced_is_left_alone(told):
    repeats = RepeatedArguments()
    pass_often(repeats, Opaque())
    pass_often(repeats, [Opaque(), threading.Lock()])
    pass_often(repeats, ())
    pass_often(repeats, {})
    assert told == []
