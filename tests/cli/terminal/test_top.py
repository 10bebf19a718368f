"""`aiogpu top` in a real terminal: its screen, its keys, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aiogpu.cli.tables import plain
from aiogpu.cli.top import View, render_screen
from tests.cli.pictures import BUSY
from tests.cli.terminal.screens import PROMPT, Screen, screen

TOP = "$python -m tests.cli.view_program"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Screen]:
    with screen(tmp_path) as found:
        yield found


def begin(terminal: Screen, picture: str) -> None:
    """Have `top` show a picture."""
    terminal.send(f"{TOP} {picture} top --interval 0.1", "Enter")
    terminal.has("q quit")


def drawn(columns: int, lines: int, view: View) -> list[str]:
    return list(plain(render_screen(BUSY, view, columns, lines), columns))


def check_restored(terminal: Screen) -> None:
    """The shell has its screen, its cursor and its line editing back."""
    told = terminal.has(PROMPT)
    assert not any("q quit" in line for line in told)
    terminal.send("clear; stty -a", "Enter")
    told = terminal.until(lambda lines: any("echoke" in line for line in lines))
    assert terminal.tmux("display", "-p", "#{cursor_flag}#{alternate_on}") == "10\n"
    text = " ".join(told)
    assert " icanon" in text
    assert " echo " in text
    terminal.send("clear", "Enter")


def test_what_is_on_the_screen_its_keys_and_the_way_out(terminal: Screen) -> None:
    begin(terminal, "busy")
    wanted = drawn(80, 24, View())
    terminal.until(lambda lines: [line.rstrip() for line in lines] == wanted)
    terminal.send("G", "s")
    terminal.has("by name  11-32 of 32")
    terminal.send("p")
    terminal.has("PAUSED")
    terminal.send("p", "Up")
    terminal.has("by name  10-31 of 32")
    terminal.resize(60, 12)
    terminal.until(lambda lines: len(lines) == 12 and "10-19 of 32" in lines[-1])
    terminal.send("q")
    terminal.has(PROMPT)  # what is typed before is for nobody
    terminal.send("echo code=$?", "Enter")
    terminal.has("code=0")
    check_restored(terminal)


@pytest.mark.slow
def test_ctrl_z_gives_the_shell_its_terminal_until_fg(terminal: Screen) -> None:
    begin(terminal, "busy")
    terminal.send("C-z")
    terminal.has("Stopped")
    check_restored(terminal)
    terminal.send("fg", "Enter")
    terminal.has("q quit")
    terminal.send("C-z")
    terminal.has("Stopped")
    terminal.send("fg", "Enter")
    terminal.has("q quit")
    terminal.send("C-c")
    terminal.has(PROMPT)
    terminal.send("echo code=$?", "Enter")
    terminal.has("code=130")
    check_restored(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "HUP", "QUIT"])
def test_a_signal_leaves_the_terminal_as_it_was(terminal: Screen, name: str) -> None:
    terminal.send(f"(exec {TOP} busy top)", "Enter")
    terminal.has("q quit")
    pid = terminal.tmux("display", "-p", "#{pane_pid}").strip()
    child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    terminal.tmux("run-shell", f"kill -{name} {child}")
    code = {"TERM": 143, "HUP": 129, "QUIT": 131}[name]
    terminal.has(PROMPT)
    terminal.send("echo code=$?", "Enter")
    terminal.has(f"code={code}")
    check_restored(terminal)


def test_a_node_that_ends_is_told_on_a_terminal_that_is_whole(
    terminal: Screen,
) -> None:
    terminal.send(f"{TOP} dying top --interval 0.1", "Enter")
    terminal.has("Error: the node has ended.")
    terminal.send("echo code=$?", "Enter")
    terminal.has("code=1")
    check_restored(terminal)


@pytest.mark.slow
def test_where_nobody_looks_it_is_one_plain_picture(terminal: Screen) -> None:
    terminal.send(f"{TOP} busy top | cat", "Enter")
    terminal.has(str(BUSY).splitlines()[-1])
    terminal.send(f"clear; echo lines=$(TERM=dumb {TOP} busy top | wc -l)", "Enter")
    terminal.has(f"lines={len(str(BUSY).splitlines())}")
