"""Which modules a function needs, found without running it."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiogpu.serialization.modules import (
    MOST,
    is_installed,
    needed_modules,
    will_be_installed,
)

OWN = """
import functools, json, lib_used
import lib_pack.part
from lib_class import Thing
from lib_data import TABLE

outer = 1

def plain(x):
    return x + outer

def uses_module(x):
    return lib_used.value

def uses_class(x):
    return Thing()

def imports_late(x):
    import lib_late, json.decoder
    from lib_pack import part

def has_inner(x):
    def inner():
        return lib_used.value
    return inner

def has_default(x, thing=Thing):
    return thing

def calls_other(x):
    return uses_module(x)

def makes():
    inside = Thing
    def closure():
        return inside
    return closure

closes_over = makes()
bound = functools.partial(uses_module, 1)

class Actor(Thing):
    def method(self):
        return lib_used.value

class Plain:
    @staticmethod
    def still():
        return lib_used.value
"""
FOUND = {
    "plain": (),
    "uses_module": ("lib_used",),
    "uses_class": ("lib_class",),
    "imports_late": ("lib_late", "lib_pack"),
    "has_inner": ("lib_used",),
    "has_default": ("lib_class",),
    "calls_other": ("lib_used",),
    "closes_over": ("lib_class",),
    "bound": ("lib_used",),
    "Actor": ("lib_class", "lib_used"),
    "Plain": ("lib_used",),
}
"""What each object needs if it is pickled by value, in `__main__`."""
LIBRARIES = {
    "lib_used": "value = 1",
    "lib_late": "",
    "lib_class": "class Thing: pass",
    "lib_data": "TABLE = {}",
    "lib_pack/__init__": "",
    "lib_pack/part": "",
}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installed packages and a directory of the program's own modules."""
    packages, own = tmp_path / "site-packages", tmp_path / "own"
    own.mkdir()
    for name, source in LIBRARIES.items():
        path = packages / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (own / "own_tasks.py").write_text(OWN)
    (own / "own_caller.py").write_text("from own_tasks import plain\n")
    for directory in (packages, own):
        monkeypatch.syspath_prepend(str(directory))
    before = set(sys.modules)
    yield packages
    for name in set(sys.modules) - before:
        if name.startswith(("lib_", "own_")):
            del sys.modules[name]


def as_main() -> dict[str, Any]:
    """The module's names, as if it were the program's file."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(OWN, "main.py", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", FOUND)
def test_function_of_the_program_needs_what_its_code_names(name: str) -> None:
    assert needed_modules(as_main()[name]) == FOUND[name]


@pytest.mark.parametrize(
    "find",
    [
        lambda: importlib.import_module("own_tasks").plain,
        lambda: importlib.import_module("own_caller").plain,
    ],
)
def test_function_of_a_module_needs_what_the_module_imports(
    find: Callable[[], object],
) -> None:
    """A worker imports the whole module."""
    assert set(needed_modules(find())) >= {"lib_used", "lib_pack", "lib_class"}


@pytest.mark.parametrize("value", [len, json.dumps, functools.partial(len), 3, None])
def test_standard_library_needs_nothing(value: object) -> None:
    assert needed_modules(value) == ()


def test_function_of_a_library_needs_its_module() -> None:
    assert needed_modules(importlib.import_module("lib_class").Thing) == ("lib_class",)


def test_search_is_bounded() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    lines = [f" import lib_pack.part{number}" for number in range(100)]
    importlib.import_module("lib_pack")
    exec("def f():\n" + "\n".join(lines), namespace)
    assert len(needed_modules(namespace["f"])) <= MOST


def test_module_is_known_as_installed_before_its_import() -> None:
    expected = {"lib_used": True, "lib_pack.part": True, "own_tasks": False}
    expected |= {"json": False, "msgpack": False, "no_such_module": False}
    assert {name: will_be_installed(name) for name in expected} == expected
    assert not [name for name in sys.modules if name.startswith(("lib_", "own_"))]
    importlib.import_module("lib_pack")
    assert will_be_installed("lib_pack.part")


def test_what_has_no_origin_is_not_installed() -> None:
    assert is_installed(sys)
    assert not is_installed(object())


class Held:
    """An object whose method is called."""

    def use(self) -> None:
        """Use nothing."""


def test_odd_functions_are_searched() -> None:
    def unassigned(*, table: Any = len) -> Any:
        import nowhere_to_be_found  # type: ignore[import-not-found]

        return later, table, nowhere_to_be_found

    found = needed_modules(unassigned, Held().use)
    assert "pytest" in found, "this module imports it"
    assert "nowhere_to_be_found" not in found
    later = 1
    many = "".join(f"    name_{number}\n" for number in range(300))
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(f"def long():\n{many}    import pytest\n", space)
    assert needed_modules(space["long"]) == ("pytest",)


def test_a_finder_that_fails_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def find_spec(self, name: str, *_: object) -> None:
            raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Failing()])
    assert not will_be_installed("nowhere_to_be_found")
