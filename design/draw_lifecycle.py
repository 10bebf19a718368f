"""Writes the tables of states in `design/architecture.md` from the core's tables.

    python design/draw_lifecycle.py          prints them
    python design/draw_lifecycle.py --write  puts them into the page

A test holds the page to what this writes, so the page cannot lag behind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from aiogpu.core.records import TASK_LEADS_TO, WORKER_LEADS_TO, TaskState, WorkerState

State = TypeVar("State", TaskState, WorkerState)

PAGE: Final = Path(__file__).with_name("architecture.md")


def draw(table: Mapping[State, tuple[State, ...]]) -> str:
    """A table as Markdown: each state, in the order of a life, with what may follow."""
    rows = "".join(
        f"| `{state.value}` | {', '.join(after.value for after in following)} |\n"
        for state, following in table.items()
    )
    return f"| state | may lead to |\n|---|---|\n{rows}"


TABLES: Final = {"task": draw(TASK_LEADS_TO), "worker": draw(WORKER_LEADS_TO)}


def framed(name: str) -> str:
    """A table as it stands in the page, with its mark."""
    return f"<!-- drawn: {name} -->\n\n{TABLES[name]}"


def redrawn(page: str) -> str:
    """The page with all its tables written anew."""
    marks = re.compile(r"<!-- drawn: (\w+) -->\n\n(?:\|.*\n)*")
    return marks.sub(lambda found: framed(found[1]), page)


def main() -> None:
    """Print the tables, or write them into the page."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n".join(map(framed, TABLES)))


if __name__ == "__main__":
    main()
