"""Files and functions stay as short as they are good to read."""

import ast
from collections.abc import Iterator

import pytest

from tests.house.rooms import ROOT, found_in, rooms, shown

LONGEST_FILE = 350
LONGEST_FUNCTION = 50
LONGEST_FLOOR = 80
"""The benchmarks' floor is what all else is measured by: seen at one glance."""


def lines(source: str) -> int:
    return len(source.splitlines())


def too_long(source: str) -> Iterator[str]:
    if lines(source) > LONGEST_FILE:
        yield f"{lines(source)} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.lineno} {node.name}: {length} lines"


@pytest.mark.parametrize("room", rooms("aiogpu"), ids=shown)
def test_files_and_their_functions_are_short(room):
    assert found_in(room, too_long) == {}


def test_the_floor_of_the_benchmarks_is_short():
    assert lines((ROOT / "benchmarks" / "floor.py").read_text()) <= LONGEST_FLOOR
