"""Files of imported modules that are edited afterwards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from aiogpu.worker.zygote.preload import Files

HOUR = 3600 * 10**9


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that is loaded, written an hour ago."""
    path = tmp_path / "edited_module.py"
    path.touch()
    age(path, 1)
    module = ModuleType("edited_module")
    module.__spec__ = ModuleSpec("edited_module", None, origin=str(path))
    monkeypatch.setitem(sys.modules, "edited_module", module)
    return path


def age(path: Path, hours: float) -> None:
    written = time.time_ns() - int(hours * HOUR)
    os.utime(path, ns=(written, written))


def test_an_edit_is_seen_once(source: Path) -> None:
    files = Files(time.time_ns())
    assert files.edited() == []
    age(source, 0.5)
    assert files.edited() == ["edited_module"]
    assert files.edited() == []
    age(source, 2)
    assert files.edited() == ["edited_module"], "an older file is another one too"


def test_a_file_that_goes_has_not_changed(source: Path) -> None:
    files = Files(time.time_ns())
    source.unlink()
    assert files.edited() == []
    source.touch()
    assert files.edited() == ["edited_module"]


def test_what_was_written_during_the_import_is_doubtful(source: Path) -> None:
    began = time.time_ns() - 2 * HOUR
    assert "edited_module" in Files(began).edited()


def test_a_file_from_the_future_is_believed(source: Path) -> None:
    """Another machine's clock may be ahead; that must not go on for ever."""
    age(source, -1)
    assert "edited_module" not in Files(time.time_ns() - 2 * HOUR).edited()


def test_our_own_modules_do_not_count(source: Path) -> None:
    module = sys.modules["edited_module"]
    sys.modules["aiogpu.edited_module"] = module
    del sys.modules["edited_module"]
    try:
        files = Files(time.time_ns())
    finally:
        sys.modules["edited_module"] = sys.modules.pop("aiogpu.edited_module")
    age(source, 0.5)
    assert files.edited() == []


def test_modules_without_a_file_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "odd_a", ModuleType("odd_a"))
    monkeypatch.setitem(sys.modules, "odd_b", None)  # type: ignore[arg-type]
    assert Files(time.time_ns()).edited() == []
