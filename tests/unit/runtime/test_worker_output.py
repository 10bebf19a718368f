"""What workers print: its lines, labels, recipients and log."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.core.model.ids import ClientId, TaskId, WorkerId
from aiogpu.runtime import output as output
from aiogpu.runtime.output import (
    CHUNK,
    FILE,
    Entry,
    LinePipe,
    Output,
    Pages,
    Routes,
    TaskLog,
    batches,
)
from aiogpu.wire.messages import Printed
from tests.unit.runtime.fakes import FakeConsole, FakePeer, FakeSource


class Lines:
    """Collects lines and lets the test wait for them."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._news = asyncio.Event()

    def show(self, line: bytes) -> None:
        self.seen.append(line)
        self._news.set()

    async def until(self, is_reached: Callable[[list[bytes]], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_reached(self.seen):
                self._news.clear()
                await self._news.wait()


def open_pipe(lines: Lines) -> tuple[LinePipe, int]:
    reading, writing = os.pipe()
    return LinePipe(asyncio.get_running_loop(), reading, lines.show), writing


async def test_lines_may_be_cut_anywhere() -> None:
    lines = Lines()
    pipe, writing = open_pipe(lines)
    for piece in (b"on", b"e\ntw", b"o\n\nthree"):
        os.write(writing, piece)
        pipe.drain()
    assert lines.seen == [b"one", b"two", b""]
    assert pipe.partial == b"three"
    pipe.end_line()
    pipe.end_line()
    assert lines.seen[3:] == [b"three"]
    os.close(writing)
    pipe.close()


async def test_a_line_without_end_is_cut() -> None:
    lines = Lines()
    pipe, writing = open_pipe(lines)
    os.write(writing, b"x" * CHUNK)
    pipe.drain()
    assert [len(line) for line in lines.seen] == [CHUNK]
    os.write(writing, b"y" * 10 + b"\n")
    pipe.drain()
    assert lines.seen[1:] == [b"y" * 10]
    os.close(writing)
    pipe.close()


async def test_draining_ends_even_if_lines_keep_coming() -> None:
    reading, writing = os.pipe()
    seen: list[bytes] = []

    def show(line: bytes) -> None:
        # As fast a writer as can be: each line that is read brings another.
        seen.append(line)
        os.write(writing, b"more\n")

    pipe = LinePipe(asyncio.get_running_loop(), reading, show)
    os.write(writing, b"first\n")
    pipe.drain()
    assert seen == [b"first"]
    os.close(writing)
    pipe.close()


async def test_resuming_a_closed_pipe_touches_no_other_descriptor() -> None:
    """The console may let a source go on that has gone meanwhile."""
    lines = Lines()
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
    assert lines.seen == []
    os.close(other)
    os.close(other_writing)


def make_output(place: Path) -> tuple[Output, FakeConsole, tuple[str, str]]:
    console = FakeConsole()
    paths = (str(place / "0.1"), str(place / "0.2"))
    output = Output(asyncio.get_running_loop(), console, paths)  # type: ignore[arg-type]
    return output, console, paths


def writer(path: str) -> int:
    """As a keeper opens it."""
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


async def test_both_pipes_are_shown_under_the_label(tmp_path: Path) -> None:
    output, console, paths = make_output(tmp_path)
    out, err = map(writer, paths)
    output.label = "worker-1 pid=2"
    os.write(out, b"to stdout\nunfinished")
    os.write(err, b"caf\xe9\n")
    output.catch_up()
    assert sorted(console.lines) == [
        (1, "(worker-1 pid=2) to stdout"),
        (1, "(worker-1 pid=2) unfinished"),
        (2, "(worker-1 pid=2) caf\\xe9"),
    ]
    assert output.number == 3
    output.catch_up()
    assert len(console.lines) == 3
    for descriptor in (out, err):
        os.close(descriptor)
    output.close()
    assert os.listdir(tmp_path) == []


async def test_a_pipe_without_a_writer_is_not_at_its_end(tmp_path: Path) -> None:
    output, console, paths = make_output(tmp_path)
    for word in (b"one", b"two"):
        out = writer(paths[0])
        os.write(out, word)
        os.close(out)
        output.catch_up()
    assert console.texts == ["() one", "() two"]
    output.close()


async def test_progress_ends_with_its_process(tmp_path: Path) -> None:
    """Of each stream, whatever came between by the other one or by the pipes."""
    output, console, paths = make_output(tmp_path)
    output.name(3, 4)
    output.show(1, "a", b"out 1\r", task=5)
    output.show(2, "a", b"err 1\r", task=5)
    output.show(2, "a", b"err 2\r", task=5)
    out = writer(paths[0])
    os.write(out, b"raw\n")
    output.catch_up()
    console.lines.clear()
    output.end_progress()
    output.end_progress()
    assert console.lines == [(1, "(a) out 1"), (2, "(a) err 2")]
    os.close(out)
    output.close()


async def test_the_last_lines_have_progress_once(tmp_path: Path) -> None:
    output, _, _ = make_output(tmp_path)
    for line in (b"before", b"1\r", b"2\r", b"\r", b"3\r", b"3", b"behind"):
        output.show(2, "a", line, task=5)
    assert [text for _, text in output.last] == ["before", "3", "behind"]
    output.close()


async def test_the_worker_waits_with_its_pipes(tmp_path: Path) -> None:
    output, console, paths = make_output(tmp_path)
    peer = FakePeer()
    output.listen_to(peer)  # type: ignore[arg-type]
    out = writer(paths[0])
    output.pause()
    os.write(out, b"x\n")
    for _ in range(3):
        await asyncio.sleep(0)
    assert (console.texts, peer.calls) == ([], ["pause"])
    output.resume()
    async with asyncio.timeout(60):
        while not console.texts:
            await asyncio.sleep(0)
    assert (console.texts, peer.calls) == (["() x"], ["pause", "resume"])
    os.close(out)
    output.close()


async def test_the_next_worker_of_a_paused_slot_waits_too(tmp_path: Path) -> None:
    output, _, _ = make_output(tmp_path)
    output.pause()
    peer = FakePeer()
    output.listen_to(peer)  # type: ignore[arg-type]
    assert peer.calls == ["pause"]
    output.resume()
    assert peer.calls == ["pause", "resume"]
    output.close()


async def test_a_slot_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
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
    peer: FakePeer | None = field(default_factory=FakePeer)
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
    """A node whose task 7 is of one program, 8 of another, and 9 its own."""

    def __init__(self) -> None:
        of = {7: ONE, 8: TWO, 9: 0}
        self.tasks = {
            TaskId(task): SimpleNamespace(id=task, client=ClientId(client))
            for task, client in of.items()
        }
        self.workers = {
            WorkerId(1): SimpleNamespace(task=self.tasks[TaskId(7)]),
            WorkerId(2): SimpleNamespace(task=None),
        }
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
        peer = self.readers[client].peer
        assert peer is not None
        return [line.text for line in peer.sent if isinstance(line, Printed)]


@pytest.fixture
def routed() -> RoutedNode:
    return RoutedNode()


def test_a_line_goes_to_the_program_of_its_task(routed: RoutedNode) -> None:
    assert routed.take("a", task=7)
    assert routed.take("b", task=8)
    assert routed.seen(ONE) == ["(embed pid=4) a"]
    assert routed.seen(TWO) == ["(embed pid=4) b"]
    assert routed.log.lines == [
        (ONE, 7, 1, "embed pid=4", "a"),
        (TWO, 8, 1, "embed pid=4", "b"),
    ]


def test_raw_output_belongs_to_the_task_that_runs(routed: RoutedNode) -> None:
    assert routed.take("raw", worker=1)
    assert routed.seen(ONE) == ["(embed pid=4) raw"]
    assert not routed.take("of none", worker=2)
    assert not routed.take("of nobody", worker=3)
    assert not routed.take("of the node", task=9)
    assert not routed.take("of one that has ended", task=99)
    assert len(routed.log.lines) == 1


def test_a_slow_reader_slows_its_own_tasks(routed: RoutedNode) -> None:
    routed.readers[ONE].is_slow = True
    routed.take("b", task=8)
    assert routed.source.calls == []
    routed.take("a", task=7)
    routed.take("a", task=7)
    assert routed.source.calls == ["pause", "pause"]
    routed.routes.resume(TWO)
    assert routed.source.calls == ["pause", "pause"]
    routed.routes.resume(ONE)
    routed.routes.resume(ONE)
    assert routed.source.calls == ["pause", "pause", "resume"]


def test_a_line_of_the_log() -> None:
    line = str(Entry(1000.0425, 67108864, 12, 2, "embed pid=4", "a\tb"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:40\.042 client=67108864 task=12 err "
        r"\(embed pid=4\) a\tb",
        line,
    )


def test_lines_are_written_in_order_and_only_for_the_user(tmp_path: Path) -> None:
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


def test_a_full_disk_loses_lines_and_is_reported_once(
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
    monkeypatch.setattr(output, "WAITING", 1000)
    log = TaskLog(str(tmp_path))
    log.write(1, 2, 1, "embed", "x" * 10_000)
    assert log.lost == 1
    log.write(1, 2, 1, "embed", "a")
    log.close()
    told, line = (tmp_path / FILE).read_text().splitlines()
    assert told == "! 1 lines are missing here: no room for them"
    assert line.endswith("(embed) a")


def test_all_that_is_there_comes_at_once_and_none_ends_it():
    queue: SimpleQueue[int | None] = SimpleQueue()
    taken = batches(queue)
    for number in (1, 2, 3):
        queue.put(number)
    assert next(taken) == [1, 2, 3]
    queue.put(4)
    queue.put(None)
    assert list(taken) == [[4]]
