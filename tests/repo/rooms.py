"""The folders of the project, whose files one test looks at together.

A test for each file would cost more in being a test than in what it looks at.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def rooms(*tops: str) -> list[Path]:
    """All folders below these in which there is code."""
    return sorted({path.parent for top in tops for path in (ROOT / top).rglob("*.py")})


def shown(path: Path) -> str:
    """Where it is, from the root of the project."""
    return str(path.relative_to(ROOT))


def found_in(room: Path, look: Callable[[str], Iterator[Any]]) -> dict[str, list[Any]]:
    """What is found in the text of each file of a folder, but for nothing."""
    found = {shown(path): list(look(path.read_text())) for path in room.glob("*.py")}
    assert found, "a room has files"
    return {path: what for path, what in found.items() if what}
