"""Lines from a pipe: where they are cut, and what becomes of the last one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from aiogpu.runtime.output import CHUNK, LinePipe


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


async def test_the_loop_brings_them() -> None:
    lines = Lines()
    pipe, writing = open_pipe(lines)
    assert os.get_blocking(pipe.fileno()) is False
    os.write(writing, b"a\nb\n")
    await lines.until(lambda seen: seen == [b"a", b"b"])
    os.write(writing, b"rest")
    os.close(writing)
    await lines.until(lambda seen: seen[2:] == [b"rest"])
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


async def test_a_paused_pipe_waits() -> None:
    lines = Lines()
    pipe, writing = open_pipe(lines)
    pipe.pause()
    os.write(writing, b"a\n")
    for _ in range(3):
        await asyncio.sleep(0)
    assert lines.seen == []
    pipe.resume()
    await lines.until(lambda seen: seen == [b"a"])
    os.close(writing)
    pipe.close()


async def test_draining_ends_although_somebody_writes_on() -> None:
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


async def test_resuming_after_the_close_touches_no_others_descriptor() -> None:
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
