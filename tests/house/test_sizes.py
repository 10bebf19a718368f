"""Files and functions stay as short as they are good to read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "aiogpu").rglob("*.py"))
LONGEST_FILE = 350
LONGEST_FUNCTION = 50
LONGEST_FLOOR = 80
"""The benchmarks' floor is what all else is measured by: seen at one glance."""


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def too_long(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{path.name}:{node.lineno} {node.name}: {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_are_short(path):
    assert lines(path) <= LONGEST_FILE
    assert not list(too_long(path))


def test_the_floor_of_the_benchmarks_is_short():
    assert lines(ROOT / "benchmarks" / "floor.py") <= LONGEST_FLOOR
