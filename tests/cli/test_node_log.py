"""The node's log: bounded, private, and never a reason to stop."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.daemon import journal
from aiogpu.daemon.journal import Journal, RotatingLog, StreamToLog, TerminalLog

log = logging.getLogger("aiogpu.test")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is afterwards as it was."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    assert (root.handlers, root.level) == (before, level)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("aiogpu.test", logging.INFO, "", 0, text, None, None)


def test_what_is_logged_is_in_the_file_and_on_a_terminal(
    tmp_path: Path, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert root
    file, terminal = tmp_path / "node.log", io.StringIO()
    begun = Journal.begin(str(tmp_path), terminal)
    assert not file.exists(), "the log is opened late"
    log.info("ready at %s", "there")
    begun.close()
    log.info("afterwards")
    assert terminal.getvalue() == file.read_text()
    pages = RotatingLog(str(file))
    pages.handle(record("a lone \ud800"))
    pages.close()
    first, second = file.read_text().splitlines()
    assert first.endswith(" INFO aiogpu.test: ready at there")
    assert second.endswith(" INFO aiogpu.test: a lone \\ud800")
    assert file.stat().st_mode & 0o777 == 0o600
    screen = TerminalLog(terminal)
    terminal.close()
    screen.handle(record("to nobody"))
    assert capsys.readouterr() == ("", "")


def test_files_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    pages = RotatingLog(f"{tmp_path}/node.log", size=200, kept=2)
    for number in range(50):
        pages.handle(record(f"line {number:02} {'x' * 20}"))
    pages.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["node.log", "node.log.1", "node.log.2"]
    assert all(file.stat().st_size <= 200 for file in files)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert "line 49" in files[0].read_text()


def test_a_full_disk_costs_lines_that_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.log"
    pages = RotatingLog("/dev/full")
    for number in range(3):
        pages.handle(record(f"lost {number}"))
    assert pages.lost == 3
    pages.baseFilename = str(path)
    pages.handle(record("there is room again"))
    pages.close()
    missing, again = path.read_text().splitlines()
    assert missing.endswith("! 3 lines are missing here: they could not be written")
    assert again.endswith("there is room again")
    # A directory that was removed, and a symbolic link, which is not followed.
    pages = RotatingLog(f"{tmp_path}/logs/node.log")
    pages.handle(record("lost"))
    assert pages.lost == 1
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node.log").symlink_to(tmp_path / "precious")
    pages.handle(record("lost as well"))
    assert pages.lost == 2
    assert not (tmp_path / "precious").exists()
    (tmp_path / "logs" / "node.log").unlink()
    pages.handle(record("written"))
    pages.close()
    assert "2 lines are missing" in (tmp_path / "logs" / "node.log").read_text()
    assert capsys.readouterr() == ("", "")


class Stuck(logging.Handler):
    """A disk that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.has = threading.Event()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.has.set()
        self.go.wait()
        self.seen.append(record.getMessage())


def test_nobody_waits_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "WAITING", 10)
    monkeypatch.setattr(journal, "PATIENCE", 0.0)
    disk = Stuck()
    stuck = Journal(disk)
    stuck.handle(record("first"))
    assert disk.has.wait(20)
    for number in range(100):
        stuck.handle(record(f"{number}"))
    assert stuck.lost == 90, "ten wait"
    stuck.close()
    disk.go.set()


def test_lines_that_found_no_room_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "WAITING", 1)
    disk = Stuck()
    pages = RotatingLog(f"{tmp_path}/node.log")
    both = Journal(disk, pages)
    both.handle(record("first"))
    assert disk.has.wait(20)
    for number in range(5):
        both.handle(record(f"{number}"))
    disk.go.set()
    both.close()
    lines = (tmp_path / "node.log").read_text().splitlines()
    assert [line.partition(": ")[2][:8] for line in lines] == [
        "first",
        "! 4 line",
        "0",
    ]


def test_a_line_that_cannot_be_formatted_is_lost() -> None:
    disk = Stuck()
    disk.go.set()
    begun = Journal(disk)
    bad = record("%d")
    bad.args = ("text",)
    begun.handle(bad)
    begun.handle(record("next"))
    begun.close()
    assert disk.seen == ["next"]


def test_what_is_printed_is_logged_by_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = StreamToLog("stdout")
    print("one\ntwo", end=" ", file=stream)
    print("words", file=stream)
    assert stream.writable()
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        ("aiogpu.daemon.stdout", "one"),
        ("aiogpu.daemon.stdout", "two words"),
    ]
