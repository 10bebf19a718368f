"""What a function captures, to tell whether it would be pickled differently now."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aiogpu.serialization.captured import MOST_ITEMS, captured


def made(source: str, **names: Any) -> Any:
    """The function `f` of a source text, as if it were of the program's file."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace["f"]


FIXED: dict[str, Callable[[], Any]] = {
    "numbers and texts": lambda: made("def f(a=1, *, b='x'): return n", n=2),
    "a module": lambda: made("def f(): return json.dumps", json=json),
    "a builtin": lambda: made("def f(): return sqrt", sqrt=math.sqrt),
    "an imported class": lambda: made("def f(): return kind", kind=json.JSONDecoder),
    "a tuple": lambda: made("def f(): return pair", pair=(1, ("a", frozenset({2})))),
    "a helper": lambda: made("def g(): return 1\ndef f(): return g()"),
    "itself": lambda: made("def f(): return f"),
    "an inner function": lambda: made("def f():\n def g(): return n\n return g", n=1),
    "an outer variable": lambda: made(
        "def o(x):\n def f(): return x\n return f\nf=o(3)"
    ),
    "an imported function": lambda: json.dumps,
}


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_objects_leave_a_function_the_same(kind: str) -> None:
    function = FIXED[kind]()
    now = captured(function)
    assert now.are_fixed
    assert captured(function).is_same(now)
    assert now.find_change(captured(function)) is None


class Local:
    """A class with a method that is bound to an object."""

    def method(self) -> None: ...


MUTABLE: dict[str, Any] = {
    "a list": [1],
    "a large tuple": tuple(range(MOST_ITEMS + 1)),
    "a tuple with a list": (1, [2]),
    "a method of an object": [].append,
    "a module that was replaced": type(sys)("json"),
    "an object": Local(),
}


@pytest.mark.parametrize("kind", MUTABLE)
def test_objects_that_change_in_place_prove_nothing(kind: str) -> None:
    function = made("def f(): return value", value=MUTABLE[kind])
    assert not captured(function).are_fixed
    assert not captured(function).is_same(captured(function))


def test_cell_without_content_is_known() -> None:
    source = "def o():\n def f(): return x\n return f\n x = 1\nf = o()"
    function = made(source)
    assert captured(function).find_change(captured(function)) is None
    assert "f.__closure__.x" in captured(function).parts


CHANGES: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "global": (lambda f: f.__globals__.update(n=5), "f.__globals__.n"),
    "equal": (lambda f: f.__globals__.update(n=int("1000")), None),
    "kind": (lambda f: f.__globals__.update(n=True), "f.__globals__.n"),
    "gone": (lambda f: f.__globals__.pop("n"), "f.__globals__.n"),
    "new": (lambda f: f.__globals__.update(m=1), "f.__globals__.m"),
    "default": (lambda f: setattr(f, "__defaults__", (2,)), "f.__defaults__[0]"),
    "attribute": (lambda f: setattr(f, "mark", 1), "f.mark"),
    "object": (lambda f: f.__globals__.update(kind=Local), "f.__globals__.kind"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_named(change: str) -> None:
    function = made("def f(a=1): return n, m, kind", n=1000, kind=json.JSONEncoder)
    before = captured(function)
    alter, path = CHANGES[change]
    alter(function)
    assert before.find_change(captured(function)) == path
