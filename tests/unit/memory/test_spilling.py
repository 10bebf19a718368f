"""Where values go that have no room in memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from aiogpu.memory.segment import NAMED_BY, USUAL, spill_directory


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMED_BY:
        monkeypatch.delenv(name, raising=False)


def test_it_is_what_tempfile_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert spill_directory() == tempfile.gettempdir()


@pytest.mark.parametrize("name", NAMED_BY)
def test_variables_name_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert spill_directory() == str(tmp_path)
    assert os.listdir(tmp_path) == [], "it is not tried with a file"


def test_what_is_no_directory_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TEMP", str(tmp_path))
    assert spill_directory() == str(tmp_path)


def test_at_last_it_is_where_the_process_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, _: place not in USUAL)
    assert spill_directory() == str(tmp_path)
