"""Reading a log while it is written and turned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aiogpu.cli.logs import LogReader
from aiogpu.runtime.output import Pages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


def test_nothing_is_there(path: Path) -> None:
    reader = LogReader(str(path))
    assert list(reader.read()) == []
    path.write_text("late\n")
    assert list(reader.read()) == ["late"]
    reader.close()


def test_old_files_come_first(path: Path) -> None:
    for name, text in (("a.2", "1\n2\n"), ("a.1", "3\n"), ("a", "4\n5\n")):
        path.with_name(name).write_text(text)
    reader = LogReader(str(path))
    assert list(reader.read()) == ["1", "2", "3", "4", "5"]
    assert list(reader.read()) == []
    reader.close()


def test_a_line_is_shown_when_it_is_whole(path: Path) -> None:
    reader = LogReader(str(path))
    with path.open("w") as file:
        file.write("one\ntw")
        file.flush()
        assert list(reader.read()) == ["one"]
        file.write("o\n")
        file.flush()
        assert list(reader.read()) == ["two"]
    reader.close()


def test_a_cut_line_is_shown_when_nothing_can_follow(path: Path) -> None:
    path.write_text("whole\ncut")
    reader = LogReader(str(path))
    assert list(reader.read()) == ["whole"]
    path.rename(path.with_name("a.1"))
    path.write_text("next\n")
    assert list(reader.read()) == ["cut", "next"]
    reader.close()


def test_a_file_that_was_removed_is_followed_by_the_next(path: Path) -> None:
    path.write_text("one\n")
    reader = LogReader(str(path))
    assert list(reader.read()) == ["one"]
    path.unlink()
    assert list(reader.read()) == []
    path.write_text("two\n")
    assert list(reader.read()) == ["two"]
    reader.close()


def test_bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(b"caf\xe9\n")
    reader = LogReader(str(path))
    assert list(reader.read()) == ["caf\\xe9"]
    reader.close()


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_lost_or_shown_twice(path: Path, seed: int) -> None:
    """As long as no file goes before it was read."""
    chance = random.Random(seed)
    pages, reader = Pages(str(path), 100, 50), LogReader(str(path))
    seen: list[str] = []
    written = 0
    for _ in range(60):
        if chance.random() < 0.6:
            count = chance.randrange(8)
            pages.write([f"line {written + n}" for n in range(count)])
            written += count
        else:
            seen += reader.read()
    seen += reader.read()
    assert seen == [f"line {number}" for number in range(written)]
    pages.close()
    reader.close()


def test_where_files_went_unread_the_rest_is_shown(path: Path) -> None:
    pages, reader = Pages(str(path), 20, 1), LogReader(str(path))
    pages.write(["first"])
    assert list(reader.read()) == ["first"]
    pages.write([f"line {number:02}" for number in range(20)])
    seen = list(reader.read())
    assert seen[0] == "line 00", "it was in the file that is read"
    assert seen[1:] == [f"line {number:02}" for number in range(20)][1 - len(seen) :]
    assert seen[-1] == "line 19"
    pages.close()
    reader.close()
