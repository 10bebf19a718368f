"""Where `aiogpu timeline` writes: into a file as a whole, else where it was told."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from threading import Thread

import pytest

from aiogpu.cli.logs import _write


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("one", "two"):
        _write(str(link), text)
        assert link.is_symlink()
        assert file.read_text() == f"{text}\n"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    listener = Thread(target=lambda: heard.append(pipe.read_text()))
    listener.start()
    _write(str(pipe), "text")
    listener.join()
    assert heard == ["text\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(OSError, match="No space left"):
        _write("/dev/full", "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_of_what_fails_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _write(f"{tmp_path}/none/file", "text")
    with pytest.raises(UnicodeEncodeError):
        _write(f"{tmp_path}/file", "\ud800")
    assert os.listdir(tmp_path) == []
