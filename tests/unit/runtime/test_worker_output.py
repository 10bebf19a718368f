"""Output of workers: lines, recipients, the log, and the terminal of a program."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast

import pytest

from aiogpu.core.model.ids import ClientId, TaskId, WorkerId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.records import TaskRecord
from aiogpu.engines.remote import Terminal
from aiogpu.runtime import output as output
from aiogpu.runtime.output import (
    FILE,
    Console,
    LinePipe,
    Output,
    Pages,
    Routes,
    TaskLog,
)
from aiogpu.wire.messages import ChildDone, Message, Printed
from tests.unit.runtime.fakes import FakeConsole, FakePeer, FakeSource, SlowTerminal

pytestmark = pytest.mark.either_loop


def open_pipe(lines: list[bytes]) -> tuple[LinePipe, int]:
    reading, writing = os.pipe()
    return LinePipe(asyncio.get_running_loop(), reading, lines.append), writing


async def test_pipe_joins_lines_that_arrive_in_pieces() -> None:
    lines: list[bytes] = []
    pipe, writing = open_pipe(lines)
    for piece in (b"on", b"e\ntw", b"o\n\nthree"):
        os.write(writing, piece)
        pipe.drain()
    assert lines == [b"one", b"two", b""]
    assert pipe.partial == b"three"
    pipe.end_line()
    pipe.end_line()
    assert lines[3:] == [b"three"]
    os.close(writing)
    pipe.close()


async def test_resume_of_a_closed_pipe_touches_no_other_descriptor() -> None:
    """The console may resume a source that was closed in the meantime."""
    lines: list[bytes] = []
    pipe, writing = open_pipe(lines)
    number = pipe.fileno()
    pipe.pause()
    os.close(writing)
    pipe.close()
    other, other_writing = os.pipe()
    assert number in {other, other_writing}
    pipe.resume()
    os.write(other_writing, b"not ours\n")
    for _ in range(3):
        await asyncio.sleep(0)
    assert lines == []
    os.close(other)
    os.close(other_writing)


def make_output(place: Path) -> tuple[Output, FakeConsole, tuple[str, str]]:
    console = FakeConsole()
    paths = (str(place / "0.1"), str(place / "0.2"))
    output = Output(asyncio.get_running_loop(), console, paths)  # type: ignore[arg-type]
    return output, console, paths


async def test_progress_line_ends_with_its_process(tmp_path: Path) -> None:
    """Each stream keeps its progress line, whatever other output comes in between."""
    output, console, paths = make_output(tmp_path)
    output.name(3, 4)
    output.show(1, "a", b"out 1\r", task=5)
    output.show(2, "a", b"err 1\r", task=5)
    output.show(2, "a", b"err 2\r", task=5)
    out = os.open(paths[0], os.O_WRONLY | os.O_NONBLOCK)  # as a keeper opens it
    os.write(out, b"raw\n")
    output.catch_up()
    console.lines.clear()
    output.end_progress()
    output.end_progress()
    assert console.lines == [(1, "(a) out 1"), (2, "(a) err 2")]
    os.close(out)
    output.close()


async def test_next_worker_of_a_paused_slot_is_paused(tmp_path: Path) -> None:
    output, _, _ = make_output(tmp_path)
    output.pause()
    peer = FakePeer()
    output.listen_to(peer)  # type: ignore[arg-type]
    assert peer.calls == ["pause"]
    output.resume()
    assert peer.calls == ["pause", "resume"]
    output.close()


async def test_output_that_fails_to_open_leaves_no_resources(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    (tmp_path / "0.2").touch()
    with pytest.raises(FileExistsError):
        make_output(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
        with pytest.raises(OSError, match="Too many open files"):
            make_output(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir(tmp_path) == []


ONE, TWO = 1 << 26, (1 << 26) + 1


@dataclass
class FakeReader:
    peer: FakePeer = field(default_factory=FakePeer)
    shows: bool = True
    is_slow: bool = False


class FakeLog:
    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []
        self.is_closed = False

    def write(self, *line: object) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.is_closed = True


class RoutedNode:
    """A node that runs task 7 for program ONE and task 8 for program TWO."""

    def __init__(self) -> None:
        spec = TaskSpec("embed", Shape(Request()))
        self.tasks = {
            TaskId(task): TaskRecord(TaskId(task), spec, client=ClientId(client))
            for task, client in ((7, ONE), (8, TWO))
        }
        self.workers = {WorkerId(1): SimpleNamespace(task=self.tasks[TaskId(7)])}
        self.readers = {ONE: FakeReader(), TWO: FakeReader()}
        node: Any = self
        readers: Any = self.readers
        self.routes = Routes(node, readers)
        self.log: Any = FakeLog()
        self.routes.log = self.log
        self.source = FakeSource()

    def take(self, text: str, worker: int = 1, task: int = 0) -> bool:
        return self.routes.take(1, "embed pid=4", text, self.source, worker, task)

    def seen(self, client: int) -> list[str]:
        sent = self.readers[client].peer.sent
        return [line.text for line in sent if isinstance(line, Printed)]


@pytest.fixture
def routed() -> RoutedNode:
    return RoutedNode()


def test_line_goes_to_the_program_of_its_task(routed: RoutedNode) -> None:
    assert routed.take("a", task=7)
    assert routed.take("b", task=8)
    assert routed.seen(ONE) == ["(embed pid=4) a"]
    assert routed.seen(TWO) == ["(embed pid=4) b"]
    assert routed.log.lines == [
        (ONE, 7, 1, "embed pid=4", "a"),
        (TWO, 8, 1, "embed pid=4", "b"),
    ]


def test_full_log_file_is_rotated_and_the_oldest_is_deleted(tmp_path: Path) -> None:
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


def test_full_disk_loses_lines_and_is_reported_once(
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


def test_log_does_not_follow_symbolic_links(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / FILE).symlink_to(other)
    log = TaskLog(str(tmp_path))
    log.write(1, 2, 1, "embed", "a")
    log.close()
    assert other.read_text() == "mine"


def test_lines_beyond_the_buffer_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WAITING", 1000)
    log = TaskLog(str(tmp_path))
    log.write(1, 2, 1, "embed", "x" * 10_000)
    assert log.lost == 1
    log.write(1, 2, 1, "embed", "a")
    log.close()
    notice, _, line = (tmp_path / FILE).read_text().splitlines()
    assert notice == "! 1 lines are missing here: no room for them"
    assert line.endswith("(embed) a")


def slow_terminal(monkeypatch: pytest.MonkeyPatch) -> SlowTerminal:
    """Replace stdout; no fixture, because pytest sets stdout between phases."""
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


async def end(console: Console) -> None:
    """Drain the console, close it, and wait for its thread."""
    await console.drain(20)
    console.close()
    if console._thread is not None:
        console._thread.join(20)


async def test_actions_follow_lines_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_terminal(monkeypatch)
    console, source = Console(asyncio.get_running_loop(), True), FakeSource()
    actions: list[str] = []
    first = console.write(1, "one", source)
    second = console.write(1, "two", source)
    console.after(second, lambda: actions.append("second"))
    console.after(first, lambda: actions.append("first"))
    console.after(second, lambda: actions.append("second again"))
    console.after(0, lambda: actions.append("at once"))
    assert actions == ["at once"]
    terminal.is_free.set()
    await end(console)
    assert actions == ["at once", "first", "second", "second again"]


async def test_characters_that_the_terminal_cannot_encode_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    console = Console(asyncio.get_running_loop(), True)
    console.write(1, "plain", FakeSource())
    console.write(1, "ünï", FakeSource())
    await end(console)
    assert raw.getvalue() == b"plain\n\\xfcn\\xef\n"


def test_console_writes_after_the_loop_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_terminal(monkeypatch)
    loop = asyncio.new_event_loop()
    console = Console(loop, True)
    console.write(1, "late", FakeSource())
    loop.close()
    terminal.is_free.set()
    console.close()
    assert console._thread is not None
    console._thread.join(20)
    assert not console._thread.is_alive()
    assert terminal.getvalue() == "late\n"


class Notebook(io.StringIO):
    """A notebook's stream, which is recognized by the module of its class."""


Notebook.__module__ = "ipykernel.iostream"


async def shown(
    lines: list[tuple[int, int, str]],
    out: TextIO,
    err: TextIO,
    patch: pytest.MonkeyPatch,
) -> None:
    """Write lines, each a stream, a worker and a text, one after the other."""
    patch.setattr(sys, "stdout", out)
    patch.setattr(sys, "stderr", err)
    console, source = Console(asyncio.get_running_loop(), True), FakeSource()
    for stream, worker, line in lines:
        console.write(stream, line, source, worker)
        await console.drain(20)
    await end(console)


async def test_notebook_progress_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, errors = Notebook(), Notebook()
    progress = ["10%\r", "20%\r", "done", "30%\r", "\r", "40%\r"]
    lines = [*((1, 7, text) for text in progress), (2, 7, "an error"), (1, 7, "end")]
    await shown(lines, notebook, errors, monkeypatch)
    assert notebook.getvalue() == (
        "10%\r   \r20%\r   \rdone\n30%\r   \r40%\r   \rend\n"
    )
    assert errors.getvalue() == "an error\n40%\r   \r"


class BareStream:
    """A replacement of `sys.stdout` that has `write` and `flush` only."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""


async def test_stream_with_write_only_gets_lines_without_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare, notebook = BareStream(), Notebook()
    lines = [(1, 7, "line"), (1, 7, "1\r"), (2, 7, "1\r"), (1, 8, "line")]
    await shown(lines, cast("TextIO", bare), notebook, monkeypatch)
    assert bare.text == "line\nline\n"
    assert notebook.getvalue() == "1\r \r"


DONE = ChildDone(1, b"")


async def test_terminal_releases_messages_when_the_node_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, taken = SlowTerminal(), list[Message]()
    terminal = Terminal(asyncio.get_running_loop(), FakeSource(), taken.append)
    monkeypatch.setattr(sys, "stdout", screen)
    terminal.keeps(Printed(1, "a"))
    terminal.keeps(DONE)
    terminal.hold_nothing()
    assert taken == [DONE]
    screen.is_free.set()
    await terminal.close()
    assert screen.getvalue() == "a\n"
