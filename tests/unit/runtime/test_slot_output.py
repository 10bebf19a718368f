"""The lines of one slot: two pipes, a connection, the last ones kept."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from aiogpu.runtime.output import KEPT, Output
from tests.unit.runtime.paper import PaperConsole, PaperPeer


def make(place: Path) -> tuple[Output, PaperConsole, tuple[str, str]]:
    console = PaperConsole()
    paths = (str(place / "0.1"), str(place / "0.2"))
    output = Output(asyncio.get_running_loop(), console, paths)  # type: ignore[arg-type]
    return output, console, paths


def writer(path: str) -> int:
    """As a keeper opens it."""
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK)


async def test_both_pipes_are_shown_under_the_label(tmp_path: Path) -> None:
    output, console, paths = make(tmp_path)
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
    output, console, paths = make(tmp_path)
    for word in (b"one", b"two"):
        out = writer(paths[0])
        os.write(out, word)
        os.close(out)
        output.catch_up()
    assert console.texts == ["() one", "() two"]
    output.close()


async def test_names_go_when_the_keeper_has_them(tmp_path: Path) -> None:
    output, console, paths = make(tmp_path)
    assert {os.stat(path).st_mode & 0o777 for path in paths} == {0o600}
    out = writer(paths[0])
    output.unlink()
    output.unlink()
    assert os.listdir(tmp_path) == []
    os.write(out, b"still heard\n")
    output.catch_up()
    assert console.texts == ["() still heard"]
    os.close(out)
    output.close()


async def test_the_last_lines_are_kept(tmp_path: Path) -> None:
    output, _, _ = make(tmp_path)
    for number in range(KEPT + 5):
        output.show(1, "label", str(number).encode())
    assert list(output.last) == [(0, str(number)) for number in range(5, KEPT + 5)]
    output.close()


async def test_progress_ends_with_its_process(tmp_path: Path) -> None:
    """Of each stream, whatever came between by the other one or by the pipes."""
    output, console, paths = make(tmp_path)
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
    output, _, _ = make(tmp_path)
    for line in (b"before", b"1\r", b"2\r", b"\r", b"3\r", b"3", b"behind"):
        output.show(2, "a", line, task=5)
    assert [text for _, text in output.last] == ["before", "3", "behind"]
    output.close()


async def test_the_worker_waits_with_its_pipes(tmp_path: Path) -> None:
    output, console, paths = make(tmp_path)
    peer = PaperPeer()
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
    output, _, _ = make(tmp_path)
    output.pause()
    peer = PaperPeer()
    output.listen_to(peer)  # type: ignore[arg-type]
    assert peer.calls == ["pause"]
    output.resume()
    assert peer.calls == ["pause", "resume"]
    output.close()


async def test_a_console_that_resumes_late_does_no_harm(tmp_path: Path) -> None:
    output, _, _ = make(tmp_path)
    output.pause()
    output.close()
    output.resume()


async def test_a_slot_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    (tmp_path / "0.2").touch()
    with pytest.raises(FileExistsError):
        make(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
        with pytest.raises(OSError, match="Too many open files"):
            make(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir(tmp_path) == []
