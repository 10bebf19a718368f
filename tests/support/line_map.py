"""Which test executes which lines of `aiogpu/`, in any of the processes it starts.

Workers end by `_exit` and by signals, so they cannot write a report. Instead all
processes of a run share a page of memory, a byte for each line, which `line_recorder`
marks. As a pytest plugin this module clears the page before each test, and stores it
after the test. Needs Python 3.13: `sys.monitoring`, and `mmap` without a descriptor.
"""

from __future__ import annotations

import ast
import marshal
import mmap
import pickle
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Final
from zlib import crc32

import pytest

from tests.support.mutants import Mutant

LOADER: Final = """
with open({recorder!r}) as _recorder:
    exec(compile(_recorder.read(), "recorder", "exec"), {{"PLACE": {place!r}}})
del _recorder
"""
RECORDS: Final = "lines.records"
"""The file of a run's records, in its copy."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Line = tuple[str, int]


@dataclass(frozen=True)
class Record:
    """What one test executed."""

    test: str  # its node id
    seconds: float
    has_passed: bool
    page: bytes  # a byte for each line of each file, compressed


def prepare(place: Path) -> None:
    """Have all processes that import the copy of `aiogpu` in `place` mark lines."""
    if sys.version_info < (3, 13):
        raise SystemExit("a line map needs Python 3.13; this is " + sys.version)
    starts, size = _starts(place)
    index = {str(place / name): start for name, start in starts.items()}
    (place / "lines.index").write_bytes(marshal.dumps(index))
    (place / "lines.page").write_bytes(bytes(size))
    recorder = Path(__file__).with_name("line_recorder.py")
    with (place / "aiogpu/__init__.py").open("a") as source:
        source.write(LOADER.format(recorder=str(recorder), place=str(place)))


@cache
def _starts(place: Path) -> tuple[dict[str, int], int]:
    """Return where each file's lines begin in a page, and the page's size."""
    starts, size = {}, 0
    for path in sorted((place / "aiogpu").rglob("*.py")):
        starts[str(path.relative_to(place))] = size
        size += path.read_bytes().count(b"\n") + 20  # with room for `LOADER`
    return starts, size


class Plugin:
    """Stores a record of each test."""

    def __init__(self, place: Path) -> None:
        with (place / "lines.page").open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self._records: IO[bytes] = (place / RECORDS).open("ab")
        self._has_passed = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._page[:] = bytes(len(self._page))
        sys.monitoring.restart_events()
        self._has_passed, began = True, time.monotonic()
        result = yield
        page = zlib.compress(self._page[:], 1)
        seconds = time.monotonic() - began
        record = Record(item.nodeid, seconds, self._has_passed, page)
        pickle.dump(record, self._records)
        self._records.flush()
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        number, parts = map(int, config.getoption("--line-map-part").split("/"))
        items[:] = [
            item for item in items if crc32(item.nodeid.encode()) % parts == number
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_passed &= report.passed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--line-map-part", default="0/1", help="run 1/2, say, of the tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(config.rootpath))


class LineMap:
    """The records of all tests, asked for those that may notice a mutant."""

    def __init__(self, root: Path, records: list[Record]) -> None:
        self._root = root
        self._records = [
            each for each in records if each.has_passed and is_there(root, each.test)
        ]
        self._starts, self._size = _starts(root)

    @classmethod
    def read(cls, root: Path, file: BufferedReader) -> LineMap:
        """Read the records of plugins for this very tree."""
        records = []
        while file.peek(1):
            records.append(pickle.load(file))
        return cls(root, records)

    def tests_of(self, mutant: Mutant) -> list[Record]:
        """Return the tests that execute a mutant, the most promising first.

        These execute most of the mutant's file in the least time. Of each test one case
        comes first, then the second case of each, and so on.
        """
        lines = [
            [self._starts[file] + line for file, line in lines]
            for lines in lines_of(self._root, mutant)
        ]
        start = self._starts[mutant.file]
        size = (self._root / mutant.file).read_bytes().count(b"\n")
        found: dict[int, list[tuple[float, Record]]] = defaultdict(list)
        for record in self._records:
            page = zlib.decompress(record.page)
            for rank, group in enumerate(lines):
                if any(page[line] for line in group):
                    share = page.count(1, start, start + size)
                    found[rank].append((share / (0.3 + record.seconds), record))
                    break
        ranked = sorted(found[min(found, default=0)], key=lambda each: -each[0])
        rounds: dict[str, int] = defaultdict(int)
        ordered = []
        for _, record in ranked:
            name = record.test.partition("[")[0]
            ordered.append((rounds[name], record))
            rounds[name] += 1
        return [record for _, record in sorted(ordered, key=lambda each: each[0])]


def is_there(root: Path, test: str) -> bool:
    """Tell whether a test has not been deleted since its record was made."""
    file, *_, name = test.partition("[")[0].split("::")
    return (root / file).exists() and name in _source(root / file)


@cache
def _source(path: Path) -> str:
    return path.read_text()


def lines_of(root: Path, mutant: Mutant) -> Iterator[list[Line]]:
    """Yield the lines whose execution shows a mutant, the most exact first.

    What stands in a function is shown by its line, or by another of its statement. What
    is executed on import, once for all tests, is shown by the functions that use the
    name it binds, or by all functions of its file.
    """
    tree = ast.parse((root / mutant.file).read_bytes())
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    functions = [node for node in around if isinstance(node, Function)]
    if functions and mutant.line >= functions[-1].body[0].lineno:
        yield [(mutant.file, mutant.line)]
        statement = around[-1]
        last = statement.end_lineno or 0
        if isinstance(body := getattr(statement, "body", None), list):
            last = body[0].lineno - 1
        yield [(mutant.file, line) for line in range(statement.lineno, last + 1)]
    elif functions:
        yield _body(mutant.file, functions[-1])
    else:
        names = {
            node.id
            for node in ast.walk(around[-1] if around else tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        yield [place for name in names for place in _uses(root).get(name, ())]
        yield [
            place
            for node in ast.walk(tree)
            if isinstance(node, Function)
            for place in _body(mutant.file, node)
        ]


def _body(file: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Line]:
    last = function.end_lineno or 0
    return [(file, line) for line in range(function.body[0].lineno, last + 1)]


@cache
def _uses(root: Path) -> dict[str, list[Line]]:
    """Return where functions use each name."""
    uses: dict[str, list[Line]] = defaultdict(list)
    for path in (root / "aiogpu").rglob("*.py"):
        file = str(path.relative_to(root))
        for function in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(function, Function):
                for node in ast.walk(function):
                    if isinstance(node, ast.Name | ast.Attribute):
                        name = node.id if isinstance(node, ast.Name) else node.attr
                        uses[name].append((file, node.lineno))
    return uses
