"""The driver's terminal: order, pauses, and terminals of all kinds."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Callable

import pytest

from aiogpu.runtime.console import FULL, Console


class PaperSource:
    """Says whether it is paused."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class SlowTerminal(io.StringIO):
    """Blocks every write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()

    def write(self, text: str) -> int:
        self.is_free.wait(20)
        return super().write(text)


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
    console, source = console_of_this_loop(), PaperSource()
    numbers = [console.write(stream, f"line {stream}", source) for stream in (1, 2, 1)]
    assert numbers == [1, 2, 3]
    await end(console)
    assert console.written == 3
    assert capsys.readouterr() == ("line 1\nline 1\n", "line 2\n")


async def test_hidden_output_is_out_at_once() -> None:
    console = console_of_this_loop(is_shown=False)
    acted: list[int] = []
    number = console.write(1, "x", PaperSource())
    console.after(number, lambda: acted.append(1))
    assert acted == [1]
    await end(console)
    assert console._thread is None


async def test_actions_wait_for_their_line_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = slow_terminal(monkeypatch)
    console, source = console_of_this_loop(), PaperSource()
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


async def test_holding_nothing_lets_all_go(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_terminal(monkeypatch)
    console = console_of_this_loop()
    acted: list[int] = []
    for value in (1, 2):
        number = console.write(1, "x", PaperSource())
        console.after(number, lambda value=value: acted.append(value))  # type: ignore[misc]
    assert acted == []
    console.hold_nothing()
    assert acted == [1, 2]
    console.after(number, lambda: acted.append(3))
    assert acted == [1, 2, 3]
    terminal.is_free.set()
    await end(console)


async def test_whoever_prints_too_fast_is_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = slow_terminal(monkeypatch)
    console, fast, slow = console_of_this_loop(), PaperSource(), PaperSource()
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
    console.write(1, "x", PaperSource())
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
async def test_a_terminal_that_fails_holds_nobody_up(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", RaisingTerminal(error))
    console = console_of_this_loop()
    acted = asyncio.Event()
    for _ in range(2):
        acted.clear()
        console.after(console.write(1, "x", PaperSource()), acted.set)
        async with asyncio.timeout(60):
            await acted.wait()
    await end(console)


async def test_no_terminal_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    console = console_of_this_loop()
    console.write(1, "x", PaperSource())
    await end(console)
    assert console.written == 1


async def test_what_the_terminal_cannot_show_is_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    console = console_of_this_loop()
    console.write(1, "plain", PaperSource())
    console.write(1, "ünï", PaperSource())
    await end(console)
    assert raw.getvalue() == b"plain\n\\xfcn\\xef\n"


def test_the_loop_may_close_first(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = slow_terminal(monkeypatch)
    loop = asyncio.new_event_loop()
    console = Console(loop, True)
    console.write(1, "late", PaperSource())
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


async def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, errors = Notebook(), Notebook()
    monkeypatch.setattr(sys, "stdout", notebook)
    monkeypatch.setattr(sys, "stderr", errors)
    console, source = console_of_this_loop(), PaperSource()
    for stream, line in (
        (1, "10%\r"),
        (1, "20%\r"),
        (1, "done"),
        (1, "30%\r"),
        (1, "\r"),
        (1, "40%\r"),
        (2, "an error"),
    ):
        console.write(stream, line, source)
        await console.drain(20)
    await end(console)
    assert notebook.getvalue() == ("10%\r   \r20%\r   \rdone\n30%\r   \r40%\r   \r")
    assert errors.getvalue() == "an error\n"
