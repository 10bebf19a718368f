"""`aiogpu top`: the drawing, the keys, and a real terminal before and after."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from rich.cells import cell_len

from aiogpu.cli.views.tables import plain
from aiogpu.cli.views.top import (
    LEVELS,
    ORDERS,
    BusyHistory,
    KeyDecoder,
    View,
    render_screen,
    sorted_tasks,
)
from aiogpu.observe.status import Holder
from tests.cli.status_examples import BUSY, IDLE, LONG
from tests.cli.tmux_screen import PROMPT, Screen


def test_top_draws_a_screen() -> None:
    assert drawn(View(), 90, 34) == [
        "aiogpu  CPU 4/8, GPU 0.25/3; 3 workers; 3 running, 3 waiting",
        "GPU 0  █████████░░░ 0.75 held  ██░░░░ 10 GiB/40 GiB  87 % busy  63 °C 286 W",
        "       0.5 Model 'serve'  0.25 train  not ours: Xorg 13",
        "GPU 1  ████████████    1 held  ░░░░░░ 0/40 GiB   0 % busy",
        "       1 whole",
        "GPU 2  set aside: XID 79 (the GPU has fallen off the bus)",
        "",
        "waiting: 3",
        "WAIT  ASK FOR           FIRST  SINCE  WHY",
        "   3  {CPU: 1, GPU: 1}  train   75 s  waits for GPU 1 (free "
        "by device: 0: 0.25, 1: 0, 2: …",
        "kept for train: device GPU 1 and 1 CPU",
        "",
        "running and leased: 3",
        "TASK  NAME           STATE    PID  PROGRAM        HOLDS     "
        "             FOR  MEMORY",
        "   1  Model 'serve'  running  101                 {GPU: 0.5}            60 s",
        "   7  train          running  102  train.py 4711  {CPU: 1, G"
        "PU: 0.25}   12 s   7 GiB",
        "   8  whole          leased   103                 {CPU: 1, GPU: 1}     3.0 s",
        "",
        "programs: 3",
        "PROGRAM             PID  RUN  WAIT  HOLDS              WEIGHT  MAY HAVE",
        "the node's own p…          2     0  {CPU: 1, GPU: 1.…",
        "train.py           4711    1     3  {CPU: 1, GPU: 0.…       "
        "2  100 tasks, 50 % …",
        "notebook           4712    0     0                          "
        "                      has left",
        "",
        "actors: 2",
        "ACTOR  NAME   CLASS  STATE    PID  HELD BY  CALLS  PROGRAM",
        "    1  serve  Model  alive    101        2      3",
        "    9         Cache  pending             1         train.py 4711",
        "",
        "failed recently",
        "  AGO  TASK  NAME   PROGRAM        ERROR             SAYS",
        "2.0 s     6  load                  OutOfMemoryError  no room left",
        " 75 s     5  train  train.py 4711  ValueError        no such key",
        "q quit  p pause  s sort  j/k scroll  c cancel  x kill  by number",
    ]


def test_a_wide_screen_shows_long_bars_and_names() -> None:
    assert drawn(View(), 140, 24)[1] == (
        "GPU 0  ██████████████████░░░░░░ 0.75 held  ███░░░░░░░░░ 10 GiB/40 GiB  "
        "██████████░░  87 % busy  63 °C 286 W  NVIDIA A100-SXM4-40GB"
    )


def test_scrolling_stays_within_the_list() -> None:
    view = View()
    lines = list(plain(render_screen(LONG, view, 80, 12), 80))
    assert lines[-1].endswith("1-10 of 129")
    for key, offset in (
        *(("k", 0), ("j", 1), ("down", 2), ("up", 1), (" ", 11), ("page down", 21)),
        *(("b", 11), ("page up", 1), ("G", 119), ("j", 119), ("home", 0), ("end", 119)),
        *(("z", 119), ("g", 0)),
    ):
        view.press(key)
        assert view.offset == offset, key
    view.press("G")
    assert list(plain(render_screen(LONG, view, 80, 12), 80))[-2].endswith(
        "no such key"
    )
    render_screen(BUSY, view, 80, 50)
    assert view.offset == 0


def test_tasks_are_sorted() -> None:
    tasks = [task for task in BUSY.tasks if task.pid]
    named = [replace(task, name="cba"[n]) for n, task in enumerate(tasks)]
    holders: dict[tuple[int, str | None], Holder] = {
        (101, "c"): Holder(0.5, 1, 101, "c", 5.0, used=3),
        (103, "a"): Holder(0.5, 3, 103, "a", 9.0, used=7),
    }
    for order, ids in (
        ("number", [1, 7, 8]),
        ("name", [8, 7, 1]),
        ("memory", [8, 1, 7]),
        ("time", [8, 1, 7]),
    ):
        assert [task.id for task in sorted_tasks(named, holders, order)] == ids, order


@pytest.mark.parametrize(
    ("pieces", "keys"),
    [
        ([b"jq"], ["j", "q"]),
        ([b"\x1b[A\x1b[6~x"], ["up", "page down", "x"]),
        ([b"\x1b", b"[", b"B"], ["down"]),
        ([b"\x1bOA\x1bO", b"F"], ["up", "end"]),
        ([b"\x1bq"], ["q"]),
        ([b"\x1b[1;5Cj"], ["j"]),
        ([b"\x1b[" + b"1" * 16 + b"j"], ["1", "1", "j"]),
        (["ä".encode() + b"k"], ["k"]),
    ],
    ids=repr,
)
def test_terminal_input_is_parsed_into_keys(
    pieces: list[bytes], keys: list[str]
) -> None:
    decoder = KeyDecoder()
    assert [key for piece in pieces for key in decoder.keys(piece)] == keys


def drawn(view: View, width: int = 80, height: int = 24, note: str = "") -> list[str]:
    return list(plain(render_screen(BUSY, view, width, height, note), width))


def test_top_fits_any_screen() -> None:
    for width, height in product([1, 8, 20, 40, 59, 60, 110, 200], [1, 3, 10, 80]):
        lines = drawn(View(is_paused=True), width, height, "no answer for 3 s")
        assert len(lines) == max(height, 3)
        assert all(cell_len(line) <= width for line in lines)
    lines = list(plain(render_screen(IDLE, View(), 60, 5), 60))
    assert lines[:3] == [
        "aiogpu  CPU 4/4, GPU 0/0; 0 workers; no tasks",
        "",
        "No task runs or waits.",
    ]


def test_keys_pause_quit_and_sort() -> None:
    view = View()
    view.press("p")
    assert view.is_paused
    assert drawn(view)[0].endswith(" PAUSED")
    view.press("p")
    assert not view.is_paused
    assert drawn(view, note="no answer for 4.0 s")[0].endswith(" no answer for 4.0 s")
    seen = [view.order, *(view.press("s") or view.order for _ in ORDERS)]
    assert seen == [*ORDERS, ORDERS[0]]
    view.press("q")
    assert view.has_ended


def test_c_and_x_ask_for_a_number_and_a_confirmation() -> None:
    for keys, line, is_confirmed in (
        ("c", "cancel task number: _", False),
        ("c12\x7f", "cancel task number: 1_", False),
        ("c\n", "q quit", False),
        ("c1q", "q quit", False),
        ("x1\r", "kill Model 'serve' (actor 1)?", False),
        ("c7\n", "cancel train (task 7)?", False),
        ("c7\ny", "cancel train (task 7)?", True),
        ("c7\nn", "q quit", False),
        ("c99\n", "cancel task 99?", False),
        ("c" + "1" * 99, f"cancel task number: {'1' * 18}_", False),
    ):
        view = View()
        for key in keys:
            view.press(key)
        assert drawn(view, 100)[-1].startswith(line), keys
        confirmed = view.prompt is not None and view.prompt.is_confirmed
        assert (confirmed, view.has_ended) == (is_confirmed, False), keys


def test_the_last_minute_of_a_device_is_drawn() -> None:
    history, gpu = BusyHistory(), BUSY.devices[0]

    def note(now: float, busy: int) -> None:
        device = replace(gpu, utilisation=busy)
        history.note(replace(BUSY, devices=(device,)), now)

    assert history.line(gpu, 6, 100.0) == " " * 6
    for now, busy in ((39.0, 100), (41.0, 0), (75.0, 100), (79.0, 0), (99.5, 99)):
        note(now, busy)
    assert history.line(gpu, 6, 100.0) == "▁  ▅ █"
    printed = render_screen(BUSY, View(), 140, 24, "", lambda *_: "▁  ▅ █")
    assert list(plain(printed, 140))[1].endswith("40GB  ▁  ▅ █")


# In a terminal.

TOP = "$python -m tests.cli.status_examples"


def start_top(terminal: Screen, name: str) -> None:
    """Start `top` on a fake node."""
    terminal.send(f"{TOP} {name} top --interval 0.1", "Enter")
    terminal.has("q quit")


def check_restored(terminal: Screen) -> None:
    """Check that the shell has its screen, its cursor and its line editing back."""
    output = terminal.has(PROMPT)
    assert not any("q quit" in line for line in output)
    terminal.send("clear; stty -a", "Enter")
    output = terminal.until(lambda lines: any("echoke" in line for line in lines))
    assert terminal.tmux("display", "-p", "#{cursor_flag}#{alternate_on}") == "10\n"
    text = " ".join(output)
    assert " icanon" in text
    assert " echo " in text
    terminal.send("clear", "Enter")


def test_top_in_a_terminal_obeys_keys_and_restores_the_screen(terminal: Screen) -> None:
    start_top(terminal, "busy")
    history = f" {LEVELS}"  # at the end of a line

    def plainly(lines: list[str]) -> list[str]:
        return [line.rstrip(history) for line in lines]

    wanted = plainly(drawn(View()))
    terminal.until(lambda lines: plainly(lines) == wanted)
    terminal.has(LEVELS[0])
    terminal.send("c", "7", "Enter")
    terminal.has("cancel train (task 7)?")
    terminal.send("y")
    terminal.has("cancelled train (task 7)")
    terminal.send("x", "8", "Enter", "y")
    terminal.has("whole is held by a program")
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
def test_ctrl_z_returns_the_terminal_to_the_shell_until_fg(terminal: Screen) -> None:
    start_top(terminal, "busy")
    terminal.send("C-z")
    terminal.has("Stopped")
    check_restored(terminal)
    terminal.send("fg", "Enter")
    terminal.has("q quit")
    terminal.send("C-c")
    terminal.has(PROMPT)
    terminal.send("echo code=$?", "Enter")
    terminal.has("code=130")
    check_restored(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "HUP", "QUIT"])
def test_a_signal_restores_the_terminal(terminal: Screen, name: str) -> None:
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


def test_the_end_of_the_node_is_printed_after_the_terminal_is_restored(
    terminal: Screen,
) -> None:
    terminal.send(f"{TOP} dying top --interval 0.1", "Enter")
    terminal.has("Error: the node has ended.")
    terminal.send("echo code=$?", "Enter")
    terminal.has("code=1")
    check_restored(terminal)


@pytest.mark.slow
def test_top_in_a_pipe_prints_one_plain_screen(terminal: Screen) -> None:
    terminal.send(f"{TOP} busy top | cat", "Enter")
    terminal.has(str(BUSY).splitlines()[-1])
    terminal.send(f"clear; echo lines=$(TERM=dumb {TOP} busy top | wc -l)", "Enter")
    terminal.has(f"lines={len(str(BUSY).splitlines())}")
