"""Tables and lines of a terminal, drawn by rich.

rich has no notion of a column that can be left out, so `fitted` decides how wide the
columns are: what has no room is shortened, then left out, least important first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from aiogpu.core.model.text import printable

T = TypeVar("T")
GAP: Final = 2
"""Blanks between two columns."""


class Column(NamedTuple, Generic[T]):
    """One column of a table.

    Attributes:
        name: what stands above it.
        cell: gives the cell of an entry: text, or text with a style.
        is_number: whether its cells are aligned at their right ends.
        least: to how few characters its cells may be cut; 0 if they are shown whole.
        rank: the higher it is, the sooner the column is left out; 0 is for never.
    """

    name: str
    cell: Callable[[T], str | Text]
    is_number: bool = False
    least: int = 0
    rank: int = 0


class Table:
    """A row for each entry.

    Attributes:
        columns: its columns.
        rows: their cells.
    """

    def __init__(self, entries: Iterable[T], *columns: Column[T]) -> None:
        self.columns = columns
        self.rows = [[text(one.cell(entry)) for one in columns] for entry in entries]


def text(told: str | Text, style: str = "") -> Text:
    """A text that can do nothing to a terminal."""
    return Text(printable(told), style) if isinstance(told, str) else told


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


def grid(table: Table, width: int | None = None) -> Iterator[Text]:
    """The names of the columns, then the rows, one line each.

    Args:
        table: what is shown.
        width: how many characters a line has room for; None for as many as needed.
    """
    return (draw() for draw in drawers(table, width))


def drawers(table: Table, width: int | None = None) -> Iterator[Callable[[], Text]]:
    """The same where not all lines are wanted: each is drawn when it is called."""
    names = [Text(column.name, "bold") for column in table.columns]
    columns = zip(names, *table.rows, strict=True)
    # A column in which nothing stands is left out.
    widths = [
        max(one.cell_len for one in (name, *cells)) if any(cells) else 0
        for name, *cells in columns
    ]
    if width is not None:
        widths = fitted(table.columns, widths, width)
    for row in (names, *table.rows):
        yield partial(_line, row, table.columns, widths, width)


def _line(
    row: Sequence[Text],
    columns: Sequence[Column[Any]],
    widths: Sequence[int],
    width: int | None,
) -> Text:
    cells = []
    for cell, column, room in zip(row, columns, widths, strict=True):
        if room:
            shown = cut(cell.copy(), room)
            shown.align("right" if column.is_number else "left", room)
            cells.append(shown)
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line if width is None else cut(line, width)


def fitted(
    columns: Sequence[Column[Any]], natural: Sequence[int], width: int
) -> list[int]:
    """How wide each column is where all share `width`; 0 for one that is left out.

    Where even the least is too much, the sum is above `width`.
    """
    widths = [min(has, width) for has in natural]
    least = [
        min(one.least or has, has) for one, has in zip(columns, widths, strict=True)
    ]
    for at in sorted(range(len(columns)), key=lambda at: -columns[at].rank):
        if _all(least) <= width or not columns[at].rank:
            break
        widths[at] = least[at] = 0
    for _ in range(_all(widths) - width):
        giving = [at for at, has in enumerate(widths) if has > least[at]]
        if giving:
            widths[max(giving, key=widths.__getitem__)] -= 1  # the widest gives first
    return widths


def _all(widths: Sequence[int]) -> int:
    used = [width for width in widths if width]
    return sum(used) + GAP * max(0, len(used) - 1)


def cut(line: Text, width: int) -> Text:
    """The line itself, shortened if there is less room for it."""
    line.truncate(width, overflow="ellipsis" if width > 0 else "crop")
    return line


def plain(lines: Iterable[Text]) -> Iterator[str]:
    """The lines without their styles."""
    return (line.plain.rstrip() for line in lines)


def is_terminal() -> bool:
    """Return whether a person looks at what is printed."""
    return sys.stdout.isatty()


def live(*, is_whole_screen: bool = False) -> Live:
    """A picture that is drawn anew in the same place, by its `update`."""
    return Live(
        console=Console(highlight=False),
        auto_refresh=False,
        screen=is_whole_screen,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def print_lines(draw: Callable[[int | None], Iterable[Text]]) -> None:
    """Print lines: as wide as a terminal is, or whole where nobody looks."""
    if is_terminal():
        console = Console(highlight=False)
        console.print(Group(*draw(console.width)), soft_wrap=True)
    else:
        click.echo("\n".join(plain(draw(None))))


def print_table(table: Table) -> None:
    """Print a table and nothing else."""
    print_lines(partial(grid, table))
