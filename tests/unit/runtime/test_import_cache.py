"""What a program's functions import, remembered between its runs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aiogpu.runtime.zygote import import_cache
from aiogpu.runtime.zygote.import_cache import LARGEST, UNUSED, ImportCache
from aiogpu.runtime.zygote.learning import VARIABLE, cache_file

COSTS = {"lib": 2_000_000, "lib.late": 300_000}
LATE = {"__main__.train": {"lib.late"}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's directory, and an installed package."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "cache" / "aiogpu"


def recalled() -> ImportCache:
    return ImportCache(cache_file())


def save(*needed: str) -> None:
    recalled().save(COSTS, LATE, needed or COSTS)


def test_next_run_knows_what_was_saved(place: Path) -> None:
    assert (recalled().costs, recalled().late) == ({}, {})
    save()
    assert (recalled().costs, recalled().late) == (COSTS, LATE)
    (file,) = place.iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_each_program_has_a_file_of_its_own(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save()
    monkeypatch.setattr("__main__.__file__", "/another/program.py", raising=False)
    assert recalled().costs == {}
    save()
    assert len(list(place.iterdir())) == 2


def test_changed_module_is_forgotten(tmp_path: Path) -> None:
    save()
    os.utime(tmp_path / "lib" / "__init__.py", (1, 1))
    assert (recalled().costs, recalled().late) == ({}, {})


def test_unused_module_is_forgotten_after_some_runs() -> None:
    save()
    for _ in range(UNUSED):
        assert set(recalled().costs) == set(COSTS)
        save("lib")
    assert set(recalled().costs) == {"lib"}
    assert recalled().late == {}


def test_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_file()
    monkeypatch.setenv(VARIABLE, "off")
    assert not cache_file()


SPOILT: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "other JSON": lambda path: path.write_text('{"modules": [1], "functions": 2}'),
    "wrong fields": lambda path: path.write_text(
        path.read_text().replace("2000000", '"x"')
    ),
    "too large": lambda path: path.write_text(" " * LARGEST + path.read_text()),
    "another program's": lambda path: path.write_text(
        path.read_text().replace(sys.executable, "/another/python")
    ),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path}.x")),
}


@pytest.mark.parametrize("way", SPOILT)
def test_spoilt_file_is_no_error(way: str, place: Path) -> None:
    save()
    (file,) = place.iterdir()
    SPOILT[way](file)
    assert recalled().costs == {}
    save()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_not_read(place: Path) -> None:
    save()
    (file,) = place.iterdir()
    os.chown(file, 12345, 12345)
    assert recalled().costs == {}
    os.chown(place, 12345, 12345)
    save()
    assert file.stat().st_uid == 12345, "not replaced either"


def test_no_place_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    save()
    assert recalled().costs == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert not cache_file()


def test_prompt_in_a_removed_directory_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("__main__.__file__", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cache_file()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert not cache_file()


def test_number_of_files_is_bounded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_cache, "FILES", 3)
    for number in range(5):
        monkeypatch.setattr("__main__.__file__", f"/{number}.py", raising=False)
        save()
        assert recalled().costs == COSTS
    assert len(list(place.iterdir())) == 3
