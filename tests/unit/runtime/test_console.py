"""The terminal of a program: order, back-pressure, failures and progress bars."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable
from typing import TextIO, cast

import pytest

from aiogpu.engines.remote import Terminal
from aiogpu.runtime.output import FULL, Console
from aiogpu.wire.messages import ChildDone, Message, Printed
from tests.support.until import until
from tests.unit.runtime.fakes import FakeSource, SlowTerminal

DONE = ChildDone(1, b"")


def slow_terminal(monkeypatch: pytest.MonkeyPatch) -> SlowTerminal:
    """Takes stdout's place; not a fixture, since pytest sets it between phases."""
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def console_of_this_loop(is_shown: bool = True) -> Console:
    return Console(asyncio.get_running_loop(), is_shown)


async def end(console: Console) -> None:
    """Drain and close, and wait for the thread."""
    await console.drain(20)
    console.close()
    if console._thread is not None:
        console._thread.join(20)


async def test_lines_go_to_their_streams(capsys: pytest.CaptureFixture[str]) -> None:
    console, source = console_of_this_loop(), FakeSource()
    numbers = [console.write(stream, f"line {stream}", source) for stream in (1, 2, 1)]
    assert numbers == [1, 2, 3]
    await end(console)
    assert console.written == 3
    assert capsys.readouterr() == ("line 1\nline 1\n", "line 2\n")


async def test_actions_wait_for_their_line_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = slow_terminal(monkeypatch)
    console, source = console_of_this_loop(), FakeSource()
    acted: list[str] = []

    def note(word: str) -> Callable[[], None]:
        return lambda: acted.append(word)

    first = console.write(1, "one", source)
    second = console.write(1, "two", source)
    console.after(second, note("second"))
    console.after(first, note("first"))
    console.after(second, note("second again"))
    console.after(0, note("at once"))
    assert acted == ["at once"]
    terminal.is_free.set()
    await end(console)
    assert acted == ["at once", "first", "second", "second again"]


async def test_a_source_that_prints_too_fast_is_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = slow_terminal(monkeypatch)
    console, fast, slow = console_of_this_loop(), FakeSource(), FakeSource()
    console.write(1, "x", slow)
    console.write(1, "y" * FULL, fast)
    console.write(1, "y", fast)
    assert (fast.calls, slow.calls) == (["pause"], [])
    console.write(1, "x", slow)
    assert slow.calls == ["pause"]
    terminal.is_free.set()
    await console.drain(20)
    assert (fast.calls, slow.calls) == (["pause", "resume"], ["pause", "resume"])
    console.write(1, "y" * (FULL + 1), fast)
    assert fast.calls == ["pause", "resume", "pause"]
    await end(console)


async def test_draining_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_terminal(monkeypatch)
    console = console_of_this_loop()
    console.write(1, "x", FakeSource())
    await console.drain(0.01)
    assert console.written == 0
    terminal.is_free.set()
    await end(console)
    assert terminal.getvalue() == "x\n"


class RaisingTerminal(io.StringIO):
    """Fails every write in its own way."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("closed"), RuntimeError("a notebook's own")]
)
async def test_a_terminal_that_fails_delays_no_answer(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", RaisingTerminal(error))
    console = console_of_this_loop()
    acted = asyncio.Event()
    for _ in range(2):
        acted.clear()
        console.after(console.write(1, "x", FakeSource()), acted.set)
        async with asyncio.timeout(60):
            await acted.wait()
    await end(console)


async def test_what_the_terminal_cannot_show_is_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    console = console_of_this_loop()
    console.write(1, "plain", FakeSource())
    console.write(1, "ünï", FakeSource())
    await end(console)
    assert raw.getvalue() == b"plain\n\\xfcn\\xef\n"


def test_the_loop_may_close_first(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Stands for a notebook's stream, which is known by the module of its class."""


Notebook.__module__ = "ipykernel.iostream"


async def shown(
    lines: list[tuple[int, int, str]],
    out: TextIO,
    err: TextIO,
    patch: pytest.MonkeyPatch,
) -> None:
    """Write lines one after the other: to which stream, of which worker."""
    patch.setattr(sys, "stdout", out)
    patch.setattr(sys, "stderr", err)
    console, source = console_of_this_loop(), FakeSource()
    for stream, worker, line in lines:
        console.write(stream, line, source, worker)
        await console.drain(20)
    await end(console)


async def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, errors = Notebook(), Notebook()
    lines = [
        (1, 7, "10%\r"),
        (1, 7, "20%\r"),
        (1, 7, "done"),
        (1, 7, "30%\r"),
        (1, 7, "\r"),
        (1, 7, "40%\r"),
        (2, 7, "an error"),
        (1, 7, "end"),
    ]
    await shown(lines, notebook, errors, monkeypatch)
    assert notebook.getvalue() == (
        "10%\r   \r20%\r   \rdone\n30%\r   \r40%\r   \rend\n"
    )
    assert errors.getvalue() == "an error\n40%\r   \r"


async def test_progress_of_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that moved last is shown, below the lines of others and of nobody."""
    notebook = Notebook()
    lines = [
        (1, 7, "a1\r"),
        (1, 8, "b1\r"),
        (1, 9, "line"),
        (1, 0, "of nobody"),
        (1, 8, "b done"),
        (1, 7, "\r"),
        (1, 9, "line"),
    ]
    await shown(lines, notebook, notebook, monkeypatch)
    blank = "  \r"
    assert notebook.getvalue() == (
        f"a1\r{blank}b1\r{blank}line\nb1\r{blank}of nobody\nb1\r"
        f"{blank}b done\na1\r{blank}line\n"
    )


async def test_progress_beside_lines_that_go_through_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `tee` they come later, and would be written over the progress."""
    pipe, notebook = io.StringIO(), Notebook()
    lines = [(2, 7, "1\r"), (1, 8, "line"), (1, 8, "line"), (2, 7, "2\r")]
    await shown(lines, pipe, notebook, monkeypatch)
    assert pipe.getvalue() == "line\nline\n"
    assert notebook.getvalue() == "1\r \r2\r"


class BareStream:
    """As programs put in place of `sys.stdout`: it can be written to, no more."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Has nothing to do."""


async def test_a_stream_that_can_only_be_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare, notebook = BareStream(), Notebook()
    lines = [(1, 7, "line"), (1, 7, "1\r"), (2, 7, "1\r"), (1, 8, "line")]
    await shown(lines, cast("TextIO", bare), notebook, monkeypatch)
    assert bare.text == "line\nline\n"
    assert notebook.getvalue() == "1\r \r"


@pytest.mark.either_loop
async def test_answers_wait_for_the_lines_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, taken = SlowTerminal(), list[Message]()
    terminal = Terminal(asyncio.get_running_loop(), FakeSource(), taken.append)
    assert not terminal.keeps(DONE), "nothing was printed before it"
    monkeypatch.setattr(sys, "stdout", screen)
    assert terminal.keeps(Printed(1, "(embed pid=4) hello"))
    assert terminal.keeps(DONE)
    assert taken == []
    screen.is_free.set()
    await until(lambda: taken)
    assert screen.getvalue() == "(embed pid=4) hello\n"
    assert not terminal.keeps(DONE), "the line is out"
    await terminal.close()


@pytest.mark.either_loop
async def test_when_the_node_has_gone_nothing_is_held_back(
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
