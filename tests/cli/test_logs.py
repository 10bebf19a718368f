"""`aiogpu logs` and `timeline`: reading logs during rotation, and writing files."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from aiogpu.cli.views.logs import _write, logs
from aiogpu.daemon import journal
from aiogpu.daemon.journal import Journal, RotatingLog, StreamToLog, TerminalLog
from aiogpu.observe.log_reader import LogReader
from aiogpu.runtime.output import FILE, LogLine, Pages, TaskLog
from tests.support.program import environment

CLIENT = 1 << 26


def lines(count: int, start: int = 0) -> list[str]:
    return [
        str(
            LogLine(
                1000.0 + n, CLIENT + n % 2, n % 3 + 1, 1, f"work pid={n}", f"word {n}"
            )
        )
        for n in range(start, start + count)
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The logs of a node at `tmp_path/node.sock`."""
    directory = tmp_path / "logs"
    directory.mkdir()
    pages = Pages(str(directory / FILE), 500, 50)
    pages.write(lines(30))
    pages.close()
    (directory / "node.log").write_text("ready\nended\n")
    return tmp_path


def shown(place: Path, *arguments: str) -> list[str]:
    ran = CliRunner().invoke(logs, ["--address", f"{place}/node.sock", *arguments])
    assert ran.exit_code == 0, ran.output
    return ran.stdout.splitlines()


def test_logs_select_lines(place: Path) -> None:
    every = lines(30)
    of_task = [line for n, line in enumerate(every) if n % 3 == 1]
    of_client = [line for n, line in enumerate(every) if n % 2 == 1]
    client = ("--client", str(CLIENT + 1))
    both = [line for line in of_task if line in of_client]
    for arguments, wanted in (
        ((), every),
        (("-n", "3"), every[-3:]),
        (("--lines", "0"), []),
        (("--task", "2"), of_task),
        (client, of_client),
        (("--task", "2", *client, "-n", "1"), both[-1:]),
        (("--task", "99"), []),
        (("work",), every),
        (("work", "--task", "2"), of_task),
        (("wor",), []),
        (("--node",), ["ready", "ended"]),
    ):
        assert shown(place, *arguments) == wanted, arguments
    # A line that looks like a line of another task.
    sly = str(LogLine(1.0, CLIENT, 1, 1, "sly", "1 2 client=5 task=7 out (x) y"))
    pages = Pages(str(place / "logs" / FILE), 1 << 20, 1)
    pages.write([sly])
    pages.close()
    ran = CliRunner().invoke(logs, ["--address", f"{place}/node.sock", "--task", "7"])
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "There is no line of task 7 in" in ran.stderr
    # Another directory, and a node without output.
    (place / "logs").rename(place / "elsewhere")
    assert shown(place, "--log-dir", f"{place}/elsewhere", "-n", "1") == [sly]
    (place / "logs").mkdir()
    assert shown(place) == []


def test_logs_select_lines_by_name(place: Path) -> None:
    labels = ("train pid=7", "Model.train pid=8", "Model pid=8", "my task", "trainer")
    written = [
        str(LogLine(1.0, CLIENT, 1, 1, label, "(train pid=1) x")) for label in labels
    ]
    pages = Pages(str(place / "logs" / FILE), 1 << 20, 1)
    pages.write(written)
    pages.close()
    for name, numbers in (
        *(("train", [0]), ("Model", [1, 2]), ("Model.train", [1]), ("my task", [3])),
        *(("trainer", [4]), ("mod", [])),
    ):
        assert shown(place, name) == [written[number] for number in numbers], name


def test_a_task_number_belongs_to_the_last_node(place: Path) -> None:
    """Each node numbers its tasks from 1."""
    log = TaskLog(str(place / "logs"))
    log.write(CLIENT, 2, 1, "work pid=1", "of the next node")
    log.close()
    (line,) = shown(place, "--task", "2")
    assert line.endswith("(work pid=1) of the next node")
    assert shown(place, "--task", "1") == []
    assert len(shown(place)) == 32


def test_logs_of_an_unknown_program(place: Path) -> None:
    address = ["--address", f"{place}/node.sock"]
    ran = CliRunner().invoke(logs, [*address, "--client", "4711"])
    assert ran.exit_code == 1
    assert "there is no line of program 4711 in" in ran.output
    assert f"There are lines of {CLIENT}, {CLIENT + 1}; `aiogpu list" in ran.output
    (place / "logs" / FILE).write_text("")
    for old in place.glob(f"logs/{FILE}.*"):
        old.unlink()
    ran = CliRunner().invoke(logs, [*address, "--client", "4711"])
    assert ran.exit_code == 1
    assert "There are no lines" in ran.output


def test_bad_options_of_logs_are_errors() -> None:
    for arguments, code, text in (
        (["--address", "/no/such/node.sock"], 1, "no logs in /no/such/logs"),
        (["--node", "--task", "3"], 2, "no lines of tasks"),
        (["--task", "0"], 2, "Invalid value for '--task'"),
        (["--lines", "few"], 2, "Invalid value for '--lines'"),
    ):
        ran = CliRunner().invoke(logs, arguments)
        assert ran.exit_code == code
        assert text in ran.output


def start_logs(place: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "aiogpu", "logs", *arguments]
    return subprocess.Popen(
        [*command, "--address", f"{place}/node.sock"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_follow_survives_rotation_and_ends_by_ctrl_c(place: Path) -> None:
    with start_logs(place, "--follow", "-n", "1") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == lines(30)[-1] + "\n"
        pages = Pages(str(place / "logs" / FILE), 500, 50)
        pages.write(lines(40, 30))
        pages.close()
        seen = [program.stdout.readline().rstrip("\n") for _ in range(40)]
        assert seen == lines(40, 30)
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=60)
    assert (program.returncode, out) == (130, "")


def test_a_closed_pipe_ends_logs_without_an_error(place: Path) -> None:
    with start_logs(place, "--follow") as program:
        assert program.stdout is not None
        os.read(program.stdout.fileno(), 1)
        program.stdout.close()
        assert program.stderr is not None
        assert program.stderr.read() == ""
        assert program.wait(60) == 141


# Reading a log while it is written and rotated.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


@pytest.fixture
def reader(path: Path) -> Iterator[LogReader]:
    reader = LogReader(str(path))
    yield reader
    reader.close()


def test_a_reader_follows_files_that_appear_rotate_and_vanish(
    path: Path, reader: LogReader
) -> None:
    assert list(reader.read()) == [], "nothing is there"
    with path.open("w") as file:
        file.write("one\ntw")
        file.flush()
        assert list(reader.read()) == ["one"]
        file.write("o\n")
        file.flush()
        assert list(reader.read()) == ["two"], "a line is shown when it is whole"
        file.write("cut")
    assert list(reader.read()) == []
    path.rename(path.with_name("a.1"))
    path.write_text("next\n")
    assert list(reader.read()) == ["cut", "next"], "nothing can follow"
    path.with_name("a.1").unlink()
    path.unlink()
    assert list(reader.read()) == []
    path.write_bytes(b"caf\xe9\n")
    assert list(reader.read()) == ["caf\udce9"], "bytes that are no text"


def test_a_reader_begins_with_the_oldest_file(path: Path, reader: LogReader) -> None:
    for name, text in (("a.2", "1\n2\n"), ("a.1", "3\n"), ("a", "4\n5\n")):
        path.with_name(name).write_text(text)
    assert list(reader.read()) == ["1", "2", "3", "4", "5"]
    assert list(reader.read()) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_reader_gives_each_line_once(path: Path, seed: int) -> None:
    """This holds as long as no file is removed before it was read."""
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


def test_a_reader_continues_after_lost_files(path: Path) -> None:
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


# The output of `aiogpu timeline`: an atomic file, or a device or pipe.


def test_timeline_writes_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("one", "two"):
        _write(str(link), text)
        assert link.is_symlink()
        assert file.read_text() == f"{text}\n"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_timeline_writes_to_a_device_without_replacing_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    listener = Thread(target=lambda: received.append(pipe.read_text()))
    listener.start()
    _write(str(pipe), "text")
    listener.join()
    assert received == ["text\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(OSError, match="No space left"):
        _write("/dev/full", "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_failed_timeline_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _write(f"{tmp_path}/none/file", "text")
    with pytest.raises(UnicodeEncodeError):
        _write(f"{tmp_path}/file", "\ud800")
    assert os.listdir(tmp_path) == []


# The node's log: bounded, private, and never blocking.


log = logging.getLogger("aiogpu.test")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, restored afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    assert (root.handlers, root.level) == (before, level)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("aiogpu.test", logging.INFO, "", 0, text, None, None)


def test_records_go_to_the_file_and_the_terminal(
    tmp_path: Path, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert root
    file, terminal = tmp_path / "node.log", io.StringIO()
    node_log = Journal.begin(str(tmp_path), terminal)
    assert not file.exists(), "the log is opened late"
    log.info("ready at %s", "there")
    node_log.close()
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


def test_log_files_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    pages = RotatingLog(f"{tmp_path}/node.log", size=200, kept=2)
    for number in range(50):
        pages.handle(record(f"line {number:02} {'x' * 20}"))
    pages.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["node.log", "node.log.1", "node.log.2"]
    assert all(file.stat().st_size <= 200 for file in files)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert "line 49" in files[0].read_text()


def test_a_full_disk_loses_lines_and_counts_them(
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
    # A removed directory, and a symbolic link, which is not followed.
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


class HangingHandler(logging.Handler):
    """A handler that blocks like a full disk until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.has = threading.Event()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.has.set()
        self.go.wait()
        self.seen.append(record.getMessage())


def test_logging_does_not_wait_for_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "WAITING", 10)
    monkeypatch.setattr(journal, "PATIENCE", 0.0)
    disk = HangingHandler()
    stuck = Journal(disk)
    stuck.handle(record("first"))
    assert disk.has.wait(20)
    for number in range(100):
        stuck.handle(record(f"{number}"))
    assert stuck.lost == 90, "ten wait"
    stuck.close()
    disk.go.set()


def test_the_log_reports_lines_that_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "WAITING", 1)
    disk = HangingHandler()
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


def test_a_record_that_cannot_be_formatted_is_dropped() -> None:
    disk = HangingHandler()
    disk.go.set()
    node_log = Journal(disk)
    bad = record("%d")
    bad.args = ("text",)
    node_log.handle(bad)
    node_log.handle(record("next"))
    node_log.close()
    assert disk.seen == ["next"]


def test_printed_text_is_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = StreamToLog("stdout")
    print("one\ntwo", end=" ", file=stream)
    print("words", file=stream)
    assert stream.writable()
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        ("aiogpu.daemon.stdout", "one"),
        ("aiogpu.daemon.stdout", "two words"),
    ]
