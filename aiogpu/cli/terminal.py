"""What a terminal shows: rows under columns, and a picture that is drawn anew.

What has no room is shortened, then left out, whichever a reader misses least. A cell is
text and a style; nothing here knows what it says. One of the doors to rich, for how
wide characters are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar, cast

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from aiogpu.core.model.text import printable

T = TypeVar("T")
GAP: Final = 2
"""Blanks between two columns."""
Cell = str | tuple[str, str]
"""Text, or text and a style of rich's."""
Line = list[tuple[str, str]]
"""Pieces of text, each with a style of rich's, "" for none."""


class Column(NamedTuple):
    """How the cells of one column are written.

    Attributes:
        name: what stands above them.
        is_number: whether they are aligned at their right ends.
        least: to how few columns they may be cut; 0 if they are shown whole.
        rank: the higher it is, the sooner the column is left out; 0 is for never.
    """

    name: str
    is_number: bool = False
    least: int = 0
    rank: int = 0


class Table(NamedTuple):
    """Columns, and as many cells in each row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def text_of(cell: Cell) -> str:
    """A cell's text, such that it can do nothing to a terminal."""
    return printable(cell if isinstance(cell, str) else cell[0])


def printable_all(told: T, done: dict[int, Any] | None = None) -> T:
    """A picture of a node, or of a part of it, of which all texts are `printable`.

    A name of two lines would else make two of a line that is made of it. What was one
    object stays one.
    """
    done = {} if done is None else done
    if isinstance(told, str):
        return cast("T", printable(told))
    if id(told) in done:
        return cast("T", done[id(told)])
    found: Any = told
    if isinstance(told, Mapping):
        items = told.items()
        found = {printable_all(name): printable_all(it, done) for name, it in items}
    elif isinstance(told, tuple | list):
        parts = [printable_all(one, done) for one in told]
        found = getattr(told, "_make", type(told))(parts)
    elif is_dataclass(told) and not isinstance(told, type):
        values = {it.name: getattr(told, it.name) for it in fields(told)}
        values = {name: printable_all(it, done) for name, it in values.items()}
        found = replace(told, **values)
    done[id(told)] = found
    return cast("T", found)


def grid(table: Table, width: int | None = None, indent: int = 0) -> Iterator[Line]:
    """The names of the columns, then the rows, one line each.

    Args:
        table: what is shown.
        width: how many columns there are; None for as many as are needed.
        indent: blanks before each line.
    """
    return (draw() for draw in drawers(table, width, indent))


def drawers(
    table: Table, width: int | None = None, indent: int = 0
) -> Iterator[Callable[[], Line]]:
    """The same for one who may not want all lines: each is drawn when it is called."""
    natural = [
        max(wide(column.name), *map(wide, cells)) if any(cells) else 0
        for column, cells in _columns_of(table)
    ]
    widths = natural
    if width is not None:
        widths = fitted(table.columns, natural, width - indent)
    margin = " " * indent
    names = [(column.name, "bold") for column in table.columns]
    for cells in (names, *table.rows):
        yield partial(_line, cells, table.columns, widths, margin)


def _columns_of(table: Table) -> Iterator[tuple[Column, list[str]]]:
    for at, column in enumerate(table.columns):
        yield column, [text_of(row[at]) for row in table.rows]


def wide(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def _line(
    cells: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], margin: str
) -> Line:
    line: Line = [(margin, "")]
    gap = ""
    for cell, column, width in zip(cells, columns, widths, strict=True):
        if not width:
            continue
        style = "" if isinstance(cell, str) else cell[1]
        text = cut(text_of(cell), width)
        blanks = " " * (width - wide(text))
        if column.is_number:
            line += [(gap + blanks, ""), (text, style)]
            gap = " " * GAP
        else:
            line += [(gap, ""), (text, style)]
            gap = blanks + " " * GAP
    return [piece for piece in line if piece[0]]


def fitted(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """How wide each column is where all share `width`; 0 for one that is left out."""
    widths = [min(has, max(width, 0)) for has in natural]
    least = [
        min(one.least, has) if one.least else has
        for one, has in zip(columns, widths, strict=True)
    ]
    by_rank = sorted(range(len(columns)), key=lambda at: -columns[at].rank)
    for at in by_rank:
        if _all(least) <= width or not columns[at].rank:
            break
        widths[at] = least[at] = 0
    for _ in range(_all(widths) - width):
        giving = [at for at, has in enumerate(widths) if has > least[at]]
        if not giving:
            break
        widths[max(giving, key=widths.__getitem__)] -= 1  # the widest gives first
    return _cut_off(widths, width)


def _cut_off(widths: list[int], width: int) -> list[int]:
    """Where even the least is too much: what is left of it, from the left."""
    left = width
    for at, has in enumerate(widths):
        if has:
            widths[at] = max(0, min(has, left))
            left -= has + GAP
    return widths


def _all(widths: Sequence[int]) -> int:
    used = [width for width in widths if width]
    return sum(used) + GAP * max(0, len(used) - 1)


def cut(text: str, width: int) -> str:
    """The text, shortened to so many columns if it has more."""
    if wide(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 1 else "…"[:width]


def plain(lines: Iterator[Line]) -> Iterator[str]:
    """The lines without their styles."""
    return ("".join(text for text, _ in line).rstrip() for line in lines)


def within(line: Line, width: int) -> Line:
    """As much of a line as there is room for."""
    kept: Line = []
    for text, style in line:
        kept.append((cut(text, width) if width > 0 else "", style))
        width -= wide(text)
    return [piece for piece in kept if piece[0]]


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
