"""The chart as text."""

from __future__ import annotations

import io

from rich.console import Console

from aiogpu.cli.demo import Display, Span, thumbnail, timeline

SPANS = [
    Span(1, (0,), 11, 0.0, 5.0),
    Span(2, (0,), 12, 0.0, 2.5),
    Span(3, (0,), 13, 2.5, 2.6),
    Span(14, (1,), 14, 5.0, 10.0),
]
GPUS = {0: "GPU 0", 1: "GPU 1", 2: "GPU 2"}


def test_bars_lie_in_time() -> None:
    drawn = timeline(SPANS, GPUS, 28, is_ascii=True)
    assert drawn.plain.splitlines() == [
        "GPU 0  1=========..........",
        "       2====3..............",
        "GPU 1  ..........14========",
        "GPU 2  ....................",
        "       0 s          10.00 s",
    ]


def test_nothing_has_run_yet() -> None:
    drawn = timeline([], {0: "GPU 0"}, 28, is_ascii=True)
    assert drawn.plain.splitlines()[0] == "GPU 0  " + 20 * "."


def test_bars_too_narrow_for_numbers_stay_in_their_row() -> None:
    spans = [Span(100 + n, (0,), n, float(n), n + 1.0) for n in range(60)]
    row = timeline(spans, {0: "GPU 0"}, 28, is_ascii=True).plain.splitlines()[0]
    assert row == "GPU 0  " + 20 * "="


def test_two_rows_of_pixels_make_a_line() -> None:
    assert thumbnail([[0, 1, 1], [0, 1, 1]]).plain == "▀▀▀\n"


def test_outside_a_terminal_each_end_is_a_line() -> None:
    file = io.StringIO()
    screen = Display(Console(file=file, width=40, soft_wrap=True, highlight=False))
    assert screen.pixels is None
    with screen:
        screen.begin([0, 1], 10.0)
        screen.add([Span(5, (0, 1), 77, 10.5, 11.25)], [], [])
    assert file.getvalue() == (
        "task   5  GPU 0, GPU 1  pid 77  from  0.500 s to  1.250 s\n"
    )
