"""Draws the state diagrams of `docs/architecture.md` from the core's tables.

    python docs/draw_lifecycle.py          prints them
    python docs/draw_lifecycle.py --write  puts them into the page

A test holds the page to what this draws, so the pictures cannot lag behind.
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
    """A table as a mermaid diagram: the first state begins, a dead end ends."""
    lines = ["stateDiagram-v2", "    direction LR"]
    lines.append(f"    [*] --> {next(iter(table)).value}")
    for state, following in table.items():
        lines += [f"    {state.value} --> {after.value}" for after in following]
        if not following:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)


DIAGRAMS: Final = {"task": draw(TASK_LEADS_TO), "worker": draw(WORKER_LEADS_TO)}


def framed(name: str) -> str:
    """A machine's diagram as it stands in the page, with its marks."""
    return f"<!-- drawn: {name} -->\n```mermaid\n{DIAGRAMS[name]}\n```\n"


def redrawn(page: str) -> str:
    """The page with all its diagrams drawn anew."""
    marks = re.compile(
        r"<!-- drawn: (\w+) -->\n```mermaid\n.*?^```\n", re.MULTILINE | re.DOTALL
    )
    return marks.sub(lambda found: framed(found[1]), page)


def main() -> None:
    """Print the diagrams, or write them into the page."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n".join(map(framed, DIAGRAMS)))


if __name__ == "__main__":
    main()
