"""Draws lines of text: with colours on a terminal, as they are anywhere else.

One of the doors to rich.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from types import TracebackType

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from aiogpu.cli.grid import Line, Table, grid, plain


def is_terminal() -> bool:
    """Return whether a person looks at what is printed."""
    return sys.stdout.isatty()


@cache
def _style(told: str) -> Style:
    return Style.parse(told)


class Lines:
    """Lines as rich draws them; each fits already."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __rich_console__(
        self, _console: Console, _options: ConsoleOptions
    ) -> RenderResult:
        for number, line in enumerate(self._lines):
            if number:
                yield Segment.line()
            for text, style in line:
                yield Segment(text, _style(style) if style else None)


class Picture:
    """What is drawn to the terminal, once or again and again in the same place.

    Attributes:
        is_live: whether each drawing takes the place of the last.
    """

    def __init__(self, *, is_live: bool, is_whole_screen: bool = False) -> None:
        self.is_live = is_live
        self._console = Console(highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            screen=is_whole_screen,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    @property
    def width(self) -> int:
        """Columns of the terminal, as it is now."""
        return self._console.size.width

    @property
    def height(self) -> int:
        """Lines of the terminal, as it is now."""
        return self._console.size.height

    def __enter__(self) -> Picture:
        if self.is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def draw(self, lines: Iterable[Line]) -> None:
        """Show these lines."""
        if self.is_live:
            self._live.update(Lines(list(lines)), refresh=True)
        else:
            # The prompt of a shell is to begin on a line of its own.
            self._console.print(Lines([*lines, []]), soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table: as wide as a terminal is, or whole where nobody looks."""
    if is_terminal():
        picture = Picture(is_live=False)
        picture.draw(grid(table, picture.width))
    else:
        click.echo("\n".join(plain(grid(table))))
