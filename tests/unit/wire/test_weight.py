from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from aiogpu.errors import AiogpuWarning
from aiogpu.serialization.diagnostics import MAX_DEPTH
from aiogpu.serialization.large_arguments import (
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


# The path


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (b"x" * MIB, "it"),
        (np.zeros(MIB), "it"),
        (np.array([b"x" * MIB, b"y"], object), "it"),
        ([1, b"x" * MIB], "it[1]"),
        ({"a": {"b": (0, bytearray(MIB))}}, "it['a']['b'][1]"),
        (Holder(small=1, model=np.zeros(MIB)), "it.model"),
        (Holder(layers=[np.zeros(MIB)] * 2), "it.layers[0]"),
        ([np.zeros(MIB), np.zeros(MIB)], "it"),
        ([np.zeros(MIB), np.zeros(MIB // 2)], "it[0]"),
        (list(range(MIB)), "it"),
        ([np.zeros(MIB), *[np.zeros(MIB // 10)] * 2, np.zeros(MIB)], "it"),
        (threading.Thread, "it"),
        (json.JSONDecoder, "it"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_path_leads_to_what_stands_out(value, path):
    assert find_heaviest("it", value)[0] == path


def test_the_size_is_that_of_the_part():
    _, size = find_heaviest("it", {"a": np.zeros(MIB), "b": b"x" * 1000})
    assert 0 <= size - 8 * MIB < 1000


def test_the_path_leads_through_a_closure():
    table = np.zeros(MIB)

    def f():
        return table

    path, size = find_heaviest("f", f)
    assert path == "f.__closure__.table"
    assert size >= 8 * MIB


def test_the_path_leads_through_globals():
    @local
    def f():
        return SMALL, TABLE

    assert find_heaviest("f", f)[0] == "f.__globals__.TABLE"


def test_the_path_leads_through_a_class():
    class Server:
        @local
        def serve(self):
            return TABLE

    assert find_heaviest("Server", Server)[0] == "Server.serve.__globals__.TABLE"


def test_what_contains_itself_is_no_part_of_itself():
    loop = [b"x" * MIB, b"y" * MIB, b"z" * MIB]
    loop.insert(0, loop)
    assert find_heaviest("it", loop)[0] == "it"


def test_what_cannot_be_pickled_weighs_nothing():
    assert pickled_size([threading.Lock()]) == 0
    assert find_heaviest("it", threading.Lock()) == ("it", 0)


def test_an_object_that_reduces_only_sometimes_ends_the_path():
    class Fickle:
        calls = 0

        def __reduce_ex__(self, protocol):
            Fickle.calls += 1
            if Fickle.calls > 1:
                raise ZeroDivisionError
            return bytes, (b"x" * MIB,)

    assert find_heaviest("it", Fickle())[0] == "it"


def test_the_path_ends_somewhere():
    value: object = b"x" * MIB
    for _ in range(MAX_DEPTH * 2):
        value = [value]
    assert find_heaviest("it", value)[0] == "it" + "[0]" * MAX_DEPTH


def test_a_size_reads_as_one():
    assert format_size(MIB * 25 // 2) == "12.5 MiB"


# The advice


def test_a_large_function_is_told_with_what_makes_it_large():
    table = np.zeros(MIB)

    def f():
        return table

    with pytest.warns(AiogpuWarning) as caught:
        advise_on_function("f", f, 8 * MIB + 700)
    text = str(caught[0].message)
    assert text.startswith(
        "f is 8.0 MiB when pickled, of which 8.0 MiB are f.__closure__.table; every"
    )
    assert "await aiogpu.put(" in text
    assert caught[0].filename == __file__


def test_where_no_part_stands_out_none_is_named():
    parts = [np.zeros(MIB) for _ in range(3)]
    a, b, c = parts

    def f():
        return a, b, c

    with pytest.warns(AiogpuWarning, match=r"f is 24.0 MiB when pickled; every"):
        advise_on_function("f", f, 24 * MIB)
