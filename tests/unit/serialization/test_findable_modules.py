"""Which modules another interpreter finds by their names, and what else is by value."""

from __future__ import annotations

import importlib
import io
import multiprocessing.managers
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aiogpu.serialization import managers, pickler
from aiogpu.serialization.pickler import dump


def made(name: str, source: str | None = None, **facts: Any) -> ModuleType:
    """Make a module that no import has made."""
    module = ModuleType(name)
    vars(module).update(facts)
    if source is not None:
        exec(source, vars(module))
    return module


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the import path, with a module and a namespace package."""
    (tmp_path / "real_one.py").touch()
    (tmp_path / "spread_out").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "made_pack", made("made_pack", __path__=[]))
    return tmp_path


FOUND: dict[str, tuple[Callable[[], ModuleType], bool]] = {
    "imported": (lambda: importlib.import_module("real_one"), True),
    "namespace": (lambda: importlib.import_module("spread_out"), True),
    "built in": (lambda: sys, True),
    "of a package": (lambda: made("made_pack.part"), True),
    "of no package": (lambda: made("no_pack.part"), False),
    "of C": (lambda: made("made_up"), True),
    "run": (lambda: made("made_up", "x = 1"), False),
    "stands for a file": (lambda: made("real_one"), False),
    "another file": (lambda: made("real_one", __file__="/elsewhere/other.py"), False),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("way", FOUND)
def test_a_module_is_findable_if_an_import_gives_it(way: str) -> None:
    make, is_found = FOUND[way]
    module = make()
    assert pickler._is_findable(module.__name__, module) is is_found


def test_a_function_of_a_lost_module_is_sent_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = made("lost_one", "def give():\n    return 7\n")
    monkeypatch.setitem(sys.modules, "lost_one", lost)
    stream, buffers = dump(lost.give)
    monkeypatch.delitem(sys.modules, "lost_one")
    assert pickle.loads(stream, buffers=buffers)() == 7


def test_a_function_without_a_module_is_reduced() -> None:
    def give() -> int:
        return 7

    give.__module__ = None  # type: ignore[assignment]
    reduced = pickler._Pickler(io.BytesIO()).reducer_override(give)
    assert reduced is not NotImplemented


class Proxy(multiprocessing.managers.BaseProxy):
    """A proxy without its manager."""

    def __init__(self, reduced: Any) -> None:
        self.reduced = reduced
        self._authkey = multiprocessing.process.AuthenticationString(b"key")

    def __reduce__(self) -> Any:
        return self.reduced


def test_a_proxy_carries_its_managers_key() -> None:
    reduce = pickler._Pickler.dispatch_table[Proxy]
    assert reduce(Proxy("name")) == "name"
    assert reduce(Proxy((list, ()))) == (list, ())
    arguments = ("kind", "token", "pickle", {"exposed": ()})
    full = reduce(Proxy((multiprocessing.managers.RebuildProxy, arguments)))  # type: ignore[attr-defined]
    assert full == (managers.rebuild, (b"key", *arguments))
