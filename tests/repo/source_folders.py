"""The folders of the project with Python files; a test looks at a whole folder.

A test for each file would cost more than the check itself.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def source_folders(*tops: str) -> list[Path]:
    """All folders below these that contain Python files."""
    return sorted({path.parent for top in tops for path in (ROOT / top).rglob("*.py")})


def relative(path: Path) -> str:
    """The path from the project's root."""
    return str(path.relative_to(ROOT))


def search(folder: Path, find: Callable[[str], Iterator[Any]]) -> dict[str, list[Any]]:
    """Apply `find` to the text of each file; leave out files without matches."""
    matches = {
        relative(path): list(find(path.read_text())) for path in folder.glob("*.py")
    }
    assert matches, "the folder has files"
    return {path: lines for path, lines in matches.items() if lines}
