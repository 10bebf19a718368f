"""The log of what tasks print: bounded, private, and no danger to anybody."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from aiogpu.runtime import output as task_log
from aiogpu.runtime.output import FILE, Entry, Pages, TaskLog


def test_a_line_of_the_log() -> None:
    line = str(Entry(1000.0425, 67108864, 12, 2, "embed pid=4", "a\tb"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:40\.042 client=67108864 task=12 err "
        r"\(embed pid=4\) a\tb",
        line,
    )


def test_lines_are_written_in_order_and_for_nobody_else(tmp_path: Path) -> None:
    log = TaskLog(str(tmp_path))
    for number in range(100):
        log.write(1, number, 1, "embed pid=4", f"line {number} \udcff")
    log.close()
    path = tmp_path / FILE
    lines = path.read_text().splitlines()
    assert [line.split(") ")[1] for line in lines] == [
        f"line {number} \\udcff" for number in range(100)
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_made_before_the_first_line(tmp_path: Path) -> None:
    log = TaskLog(str(tmp_path))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_files_are_turned_and_the_oldest_goes(tmp_path: Path) -> None:
    pages = Pages(str(tmp_path / "a"), 100, 2)
    for number in range(40):
        pages.write([f"line {number:04}"])
    pages.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["a", "a.1", "a.2"]
    assert all(file.stat().st_size <= 100 for file in files)
    kept = "".join(file.read_text() for file in reversed(files)).split()
    assert kept[-1] == "0039"
    assert kept[1::2] == [f"{number:04}" for number in range(40)][-len(kept) // 2 :]


def test_it_goes_on_where_another_has_ended(tmp_path: Path) -> None:
    for number in range(4):
        pages = Pages(str(tmp_path / "a"), 30, 1)
        pages.write([f"line {number:04}"])
        pages.close()
    assert (tmp_path / "a.1").read_text() == "line 0000\nline 0001\nline 0002\n"
    assert (tmp_path / "a").read_text() == "line 0003\n"


def test_a_line_longer_than_a_file_is_written_all_the_same(tmp_path: Path) -> None:
    pages = Pages(str(tmp_path / "a"), 10, 1)
    pages.write(["x" * 100, "y"])
    pages.close()
    assert (tmp_path / "a.1").read_text() == "x" * 100 + "\n"
    assert (tmp_path / "a").read_text() == "y\n"


def test_a_full_disk_costs_lines_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = Pages(str(tmp_path / "a"), 1000, 1)
    write = os.write

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    pages.write(["before"])
    monkeypatch.setattr(os, "write", full)
    pages.write(["lost", "lost"])
    pages.write(["lost"])
    monkeypatch.setattr(os, "write", write)
    pages.write(["after"])
    pages.close()
    assert (tmp_path / "a").read_text().splitlines() == [
        "before",
        "! 3 lines are missing here: no room for them",
        "after",
    ]
    assert caplog.text.count("No space left on device") == 1


def test_a_directory_that_is_gone_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = TaskLog(str(tmp_path / "no"))
    log.write(1, 2, 1, "embed", "a")
    log.close()
    assert "lines of tasks are missing" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / FILE).symlink_to(other)
    log = TaskLog(str(tmp_path))
    log.write(1, 2, 1, "embed", "a")
    log.close()
    assert other.read_text() == "mine"


def test_what_the_disk_cannot_take_is_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_log, "WAITING", 1000)
    log = TaskLog(str(tmp_path))
    log.write(1, 2, 1, "embed", "x" * 10_000)
    assert log.lost == 1
    log.write(1, 2, 1, "embed", "a")
    log.close()
    told, line = (tmp_path / FILE).read_text().splitlines()
    assert told == "! 1 lines are missing here: no room for them"
    assert line.endswith("(embed) a")
