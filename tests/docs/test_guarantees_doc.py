"""`docs/guarantees.md` names a test for each promise, and each of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROW = re.compile(r"^\| (?!fault \|)([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ROWS = ROW.findall(PAGE)


def test_it_has_rows():
    assert len(ROWS) == PAGE.count("\n| ") - PAGE.count("\n| fault |")
    assert len(ROWS) > 30


@pytest.mark.parametrize(
    ("fault", "promise", "proof"), ROWS, ids=[row[0] for row in ROWS]
)
def test_each_row_names_a_test_that_exists(fault, promise, proof):
    (named,) = NAMED.findall(proof)
    path, name = named
    assert promise.strip()
    functions = {
        node.name: node
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in functions
    marks = [ast.unparse(each) for each in functions[name].decorator_list]
    assert "pytest.mark.slow" not in marks, "none of it would run in CI"
