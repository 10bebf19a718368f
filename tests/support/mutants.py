"""Small changes of a source file that tests should notice.

A mutant is known by the text of its line, so that it is found again after lines moved.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tests.repo.code_metrics import code_lines

KEY: Final = ("file", "text", "nth", "column", "change")
PAIRS: Final = (
    *(("<", "<="), (">", ">="), ("==", "!="), ("in", "not in")),
    *(("is", "is not"), ("and", "or"), ("+", "-")),
)
SWAPS: Final = dict(PAIRS) | {two: one for one, two in PAIRS}
OPERATOR: Final = re.compile(r"not\s+in|is\s+not|[<>=!]=|[<>+-]|\b(in|is|and|or)\b")
PROTOCOL: Final = re.compile(r"(typing\.)?Protocol\b")
LOGGING: Final = re.compile(r"_?log(ger|ging)?\.")


@dataclass(frozen=True)
class Mutant:
    """One change."""

    file: str
    line: int
    text: str  # of the line, stripped
    nth: int  # how many lines above read the same
    column: int  # of the change, in `text`
    kind: str
    change: str
    start: int
    end: int
    new: str

    @property
    def key(self) -> tuple[object, ...]:
        """What stays when lines move within the file."""
        return tuple(getattr(self, name) for name in KEY)

    def apply(self, source: bytes) -> bytes:
        """Return the source with this change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class Finder:
    """Collects all mutants of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file = file
        self._source = source
        lines = source.splitlines(keepends=True)
        self._starts = [sum(map(len, lines[:line])) for line in range(len(lines))]
        self._lines = [line.decode().strip() for line in lines]
        self.found: dict[tuple[object, ...], Mutant] = {}
        self._visit(ast.parse(source), may_return_none=True)

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        line = self._source.count(b"\n", 0, start)
        text = self._lines[line]
        before = self._source[self._starts[line] : start].decode().lstrip()
        old = " ".join(self._source[start:end].decode().split())
        change = f"{old[:70]} -> {new.strip() or '(nothing)'}"
        nth = self._lines[:line].count(text)
        place = self._file, line + 1, text, nth, len(before)
        mutant = Mutant(*place, kind, change, start, end, new)
        self.found.setdefault(mutant.key, mutant)

    def _visit(self, node: ast.AST, may_return_none: bool) -> None:
        """Add the mutants of a node and of what it holds."""
        held: Sequence[ast.AST | None] = list(ast.iter_child_nodes(node))
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                return  # messages; and positions in an f-string are not exact
            case ast.Call() if LOGGING.match(ast.unparse(node.func)):
                return
            case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
                held = node.orelse
            case ast.ClassDef():
                if any(PROTOCOL.match(ast.unparse(base)) for base in node.bases):
                    return
                held = node.body  # without bases and decorators
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name == "__repr__":
                    return
                held = [*node.args.defaults, *node.args.kw_defaults, *node.body]
                returns = node.returns
                may_return_none = not (
                    isinstance(returns, ast.Constant) and returns.value is None
                )
            case ast.AnnAssign():
                held = [node.value]  # without the annotation
            case ast.Subscript() if ast.unparse(node.value) == "Literal":
                return
        self._change_expression(node)
        self._change_statement(node, may_return_none)
        for each in held:
            if each is not None:
                self._visit(each, may_return_none)

    def _change_statement(self, node: ast.AST, may_return_none: bool) -> None:
        match node:
            case ast.Expr(ast.Call(call) | ast.Await(ast.Call(call))):
                if not LOGGING.match(ast.unparse(call)):
                    self._add("remove statement", *self._span(node), "pass")
            case ast.ExceptHandler(body=[first, *_]) | ast.Try(finalbody=[first, *_]):
                if isinstance(first, ast.Assign | ast.AugAssign | ast.Raise):
                    self._add("remove statement", *self._span(first), "pass")
            case ast.Return(ast.expr() as value) if may_return_none:
                if not isinstance(value, ast.Constant):
                    self._add("return None", *self._span(value), "None")
            case ast.Break():
                self._add("loop", *self._span(node), "continue")
            case ast.Continue():
                self._add("loop", *self._span(node), "break")

    def _change_expression(self, node: ast.AST) -> None:
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for left, right in pairwise(operands):
                    self._swap("comparison", left, right)
                self._change_strings(operands)
            case ast.BoolOp(_, values):
                for left, right in pairwise(values):
                    self._swap("boolean", left, right)
            case ast.BinOp(left, ast.Add() | ast.Sub(), right):
                self._swap("arithmetic", left, right)
            case ast.AugAssign(left, ast.Add() | ast.Sub(), right):
                self._swap("arithmetic", left, right)
            case ast.UnaryOp(ast.Not()):
                start = self._span(node)[0]
                self._add("not", start, start + len("not"), "")
            case ast.Subscript():
                self._change_strings([node.slice])
            case ast.Dict():
                self._change_strings(node.keys)
            case ast.Constant(bool(value)):
                self._add("constant", *self._span(node), str(not value))
            case ast.Constant(int(value) | float(value)):
                self._add("constant", *self._span(node), str(value + 1))
            case ast.Call(function, arguments):
                if ast.unparse(function) not in {"isinstance", "cast"}:
                    for one, two in pairwise(arguments):
                        self._swap_arguments(one, two)

    def _swap_arguments(self, one: ast.expr, two: ast.expr) -> None:
        if isinstance(one, ast.Name) and isinstance(two, ast.Name):
            (start, middle), (right, end) = self._span(one), self._span(two)
            gap = self._source[middle:right].decode()
            self._add("swap arguments", start, end, two.id + gap + one.id)

    def _swap(self, kind: str, left: ast.expr, right: ast.expr) -> None:
        """Replace the operator that stands between two operands."""
        texts = ast.List | ast.Tuple | ast.JoinedStr
        if kind == "arithmetic" and (
            isinstance(left, texts) or isinstance(right, texts)
        ):
            return
        start, end = self._span(left)[1], self._span(right)[0]
        if match := OPERATOR.search(self._source[start:end].decode()):
            new = SWAPS[" ".join(match.group().split())]
            self._add(kind, start + match.start(), start + match.end(), new)

    def _change_strings(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                end = self._span(node)[1]
                self._add("constant", end - 1, end - 1, "_")


def package_of(file: str) -> str:
    """Return the folder below the source or below the tests that a file is in."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else "(top level)"


@cache
def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return all mutants of one file, in the order of its text."""
    found = Finder(file, (root / file).read_bytes()).found.values()
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def is_valid(root: Path, mutant: Mutant) -> bool:
    """Tell whether the mutant is a program, and another one."""
    source = (root / mutant.file).read_bytes()
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def draw(
    root: Path, files: Sequence[str], count: int, seed: int, seen: set[object]
) -> Iterator[Mutant]:
    """Draw a file by its code lines, one of its kinds of mutants, and one of these."""
    generator = random.Random(seed)
    weights = {name: code_lines((root / name).read_text()) for name in files}
    while count and any(weights.values()):
        [file] = generator.choices(list(weights), list(weights.values()))
        left = [mutant for mutant in mutants_of(root, file) if mutant.key not in seen]
        if not left:
            del weights[file]
            continue
        kind = generator.choice(sorted({mutant.kind for mutant in left}))
        drawn = generator.choice([mutant for mutant in left if mutant.kind == kind])
        seen.add(drawn.key)
        if is_valid(root, drawn):
            count -= 1
            yield drawn
