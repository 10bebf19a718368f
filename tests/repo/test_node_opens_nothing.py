"""A node unpickles nothing: it does not have the programs' modules."""

from __future__ import annotations

import ast
from pathlib import Path

import aiogpu.runtime

OPENERS = {
    "aiogpu.serialization.serializer": {
        "load",
        "load_arguments",
        "load_function",
        "load_result",
        "load_retried",
    },
    "aiogpu.serialization.exceptions": {"unpack_failure"},
    "aiogpu.serialization.pickler": {"load", "loads"},
}
"""Functions that unpickle, by module."""
ALLOWED = {
    ("requests.py", "unpack_failure"),  # for a refusal that the node itself has packed
}


def test_only_these_files_import_an_unpickler() -> None:
    importers = set()
    for path in Path(aiogpu.runtime.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                importers |= {
                    (path.name, name) for name in names & {"pickle", "marshal"}
                }
            elif isinstance(node, ast.ImportFrom):
                openers = OPENERS.get(node.module or "", set())
                names = {alias.name for alias in node.names} & openers
                importers |= {(path.name, name) for name in names}
    assert importers == ALLOWED
