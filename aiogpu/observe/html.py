"""Tables in HTML, for notebooks.

Colours are those of the page, so that light and dark themes can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_CELL: Final = 'style="text-align:left;vertical-align:top"'


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts; "" without rows. `head` may be empty."""
    lines = ["".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in r) for r in rows]
    if not lines:
        return ""
    names = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if names else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    caption = f"<b>{escape(title)}</b>" if title else ""
    return f"<div>{caption}<table>{top}<tbody>{body}</tbody></table></div>"


def facts(title: str, entries: Iterable[tuple[str, str]]) -> str:
    """Return a table of named facts; those without a text are left out."""
    return table(title, (), [entry for entry in entries if entry[1]])
