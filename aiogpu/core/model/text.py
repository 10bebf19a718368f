"""Formats numbers and lists for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from aiogpu.core.model.units import format_amount

SHOWN: Final = 8
"""Entries of a list that are shown; the others are counted."""


def span(seconds: float) -> str:
    """Format a duration with a useful precision: "0.4 s", "12 s", "3 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 119.5 else f"{minutes / 60:.0f} h"


def printable(text: str) -> str:
    """Replace control characters by "?": names from programs may contain any text."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)
"""Characters that command a terminal, or change the order of what it shows; all but the
tab and the end of line."""


def escaped(text: str) -> str:
    """Return a text as a terminal may show it: control characters become escapes.

    Bytes that are no characters, as decoded with "surrogateescape", become escapes too.
    """
    return CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def listing(entries: Iterable[str], count: int, separator: str = ", ") -> str:
    """Join the first few of `count` entries, and the number of further ones."""
    shown = list(islice(entries, SHOWN))
    if count > len(shown):
        shown.append(f"and {count - len(shown)} more")
    return separator.join(shown)


def in_words(parts: Sequence[str]) -> str:
    """Join as in a sentence: "a", "a and b", "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def terms(numbers: Iterable[tuple[str, float]]) -> str:
    """Format amounts by name like a request: "{CPU: 1, GPU: 0.5}"."""
    items = (f"{name}: {format_amount(name, value)}" for name, value in numbers)
    return "{" + ", ".join(items) + "}"


def aligned(rows: Iterable[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield rows as lines with aligned columns; all rows have the same length."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield (indent + "  ".join(cells)).rstrip()


def count_hidden(count: int) -> Iterator[str]:
    """Yield a line that counts the entries that are not shown, if there are any."""
    if count > 0:
        yield f"  and {count} more"
