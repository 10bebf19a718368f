"""Formats figures and lists for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from aiogpu.core.model.units import written

SHOWN: Final = 8
"""Entries of a list that are written out; the rest is counted."""


def span(seconds: float) -> str:
    """A length of time, as exact as it is of use: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 119.5 else f"{minutes / 60:.0f} h"


def printable(text: str) -> str:
    """Without what a terminal would obey: names are whatever a program gives."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else "?" for one in text)


def listing(entries: Iterable[str], count: int, separator: str = ", ") -> str:
    """The first few of `count` entries, and how many more there are."""
    shown = list(islice(entries, SHOWN))
    if count > len(shown):
        shown.append(f"and {count - len(shown)} more")
    return separator.join(shown)


def in_words(parts: Sequence[str]) -> str:
    """Joined as in a sentence: "a", "a and b", "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def terms(numbers: Iterable[tuple[str, float]]) -> str:
    """Amounts by name, as a request is written: "{CPU: 1, GPU: 0.5}"."""
    told = (f"{name}: {written(name, value)}" for name, value in numbers)
    return "{" + ", ".join(told) + "}"


def aligned(rows: Iterable[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Rows of as many cells each, one below the other."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield (indent + "  ".join(cells)).rstrip()


def rest(count: int) -> Iterator[str]:
    """A line for the entries that are not shown, if there are any."""
    if count > 0:
        yield f"  and {count} more"
