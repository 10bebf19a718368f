"""Draws a fan-out: who ran on which device when, and the picture so far.

A door to rich. In a terminal the drawing is live; anywhere else each task
is one line of text, and the chart follows at the end. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import TracebackType
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .timeline import Span, device_label, lanes

Gpu = int | str

COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
SHADES: Final = tuple(
    f"rgb({min(255, 20 * n)},{min(255, 9 * n + n * n // 3)},{40 + 10 * n})"
    for n in range(16)
)
PREVIEW: Final = (48, 24)
"""Columns and rows of pixels; two rows go into one line of text."""


def timeline(
    spans: Sequence[Span], gpus: Mapping[Gpu, str], width: int, *, is_ascii: bool
) -> Text:
    """One row per device and place on it; a bar begins with its task's number."""
    idle, fill = (".", "=") if is_ascii else ("·", "█")
    margin = max(map(len, gpus.values()), default=0) + 2
    columns = max(10, width - margin - 1)
    begin = min((span.begin for span in spans), default=0.0)
    end = max((span.end for span in spans), default=0.0)
    scale = columns / max(end - begin, 1e-3)
    text = Text(no_wrap=True)
    for gpu, label in gpus.items():
        for row, lane in enumerate(lanes(spans, gpu) or [[]]):
            text.append(("" if row else label).ljust(margin), "bold")
            at = 0
            for span in lane:
                first = max(at, int((span.begin - begin) * scale))
                last = max(first + 1, int((span.end - begin) * scale))
                text.append(idle * (first - at), "dim")
                text.append_text(_bar(span, min(last, columns) - first, fill))
                at = last
            text.append(idle * (columns - at) + "\n", "dim")
    seconds = f"{end - begin:.2f} s"
    text.append(" " * margin + "0 s" + seconds.rjust(columns - 3), "dim")
    return text


def _bar(span: Span, width: int, fill: str) -> Text:
    """A bar with its task's number, if that has room."""
    number = str(span.task)
    label = number if len(number) <= width else ""
    color = COLORS[span.task % len(COLORS)]
    return Text.assemble((label, f"bold {color}"), (fill * (width - len(label)), color))


def thumbnail(levels: Sequence[Sequence[int]]) -> Text:
    """Two rows of pixels a line: the upper half of each character, and the lower."""
    text = Text(no_wrap=True)
    for upper, lower in zip(levels[::2], levels[1::2], strict=True):
        # Runs of one colour are joined: a frame is a tenth of its size then.
        for (above, below), run in groupby(zip(upper, lower, strict=True)):
            style = f"{SHADES[above]} on {SHADES[below]}"
            text.append("▀" * len(list(run)), style)
        text.append("\n")
    return text


class Screen:
    """Where a fan-out is shown. Enter it before the first task.

    Attributes:
        pixels: columns and rows of the picture that `add` wants; None for none.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._is_ascii = self._console.options.ascii_only
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        has_pixels = (
            self._console.color_system in ("256", "truecolor") and not self._is_ascii
        )
        self.pixels = PREVIEW if self._is_live and has_pixels else None
        self._live = Live(console=self._console, auto_refresh=False)
        self._gpus: dict[Gpu, str] = {}
        self._begin = 0.0

    def __enter__(self) -> Screen:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def print(self, line: str) -> None:
        """Print a line, in a terminal above the drawing."""
        self._console.print(line, markup=False)

    def begin(self, gpus: Sequence[Gpu], now: float) -> None:
        """Say which devices there are, in order, and that the clock runs."""
        self._begin = now
        self._gpus = {gpu: device_label(gpu) for gpu in gpus}

    def add(
        self,
        finished: Sequence[Span],
        running: Sequence[Span],
        levels: Sequence[Sequence[int]],
    ) -> None:
        """Show that the last of `finished` has ended."""
        if not self._is_live:
            self.print(self._line(finished[-1]))
            return
        picture = [thumbnail(levels)] if levels else []
        chart = self._timeline([*finished, *running])
        self._live.update(Group(*picture, chart), refresh=True)

    def finish(self, finished: Sequence[Span]) -> None:
        """Draw the chart, where it has not been drawn all along."""
        if not self._is_live:
            self._console.print(self._timeline(finished))

    def _timeline(self, spans: Sequence[Span]) -> Text:
        width = self._console.width
        return timeline(spans, self._gpus, width, is_ascii=self._is_ascii)

    def _line(self, span: Span) -> str:
        begin = self._begin
        gpus = ", ".join(self._gpus[gpu] for gpu in span.gpus)
        return (
            f"task {span.task:3}  {gpus}  pid {span.pid}  "
            f"from {span.begin - begin:6.3f} s to {span.end - begin:6.3f} s"
        )
