"""Size and shape of `aiogpu/`: files, code lines and import cycles by package.

Run it by `python -m tests.repo.code_metrics`. Code lines leave out blank lines,
comments and docstrings. A cycle is a set of modules that import each other, whether at
the top, inside functions or under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


def code_lines(source: str) -> int:
    """Count the lines that hold code, as opposed to comments and docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            documented.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def imports(package: str = "aiogpu") -> dict[str, set[str]]:
    """Return the modules that each module imports, anywhere in its code."""
    graph = grimp.build_graph(
        package, exclude_type_checking_imports=False, cache_dir=None
    )
    # `aiogpu/__init__.py` loads public names late, which is no cycle.
    modules = graph.modules - {package}
    return {
        module: graph.find_modules_directly_imported_by(module) & modules
        for module in modules
    }


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, largest first (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for imported in sorted(edges[module]):
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in path:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            start = path.index(module)
            component = path[start:]
            del path[start:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return sorted(found, key=len, reverse=True)


@dataclass
class PackageSize:
    """The size of one package below `aiogpu/`."""

    modules: int = 0
    code_lines: int = 0
    in_cycles: int = 0


def package_of(module: str) -> str:
    """Return the package below `aiogpu` that a module belongs to."""
    return module.split(".")[1] if module.count(".") > 1 else "(top level)"


def sizes(found: list[list[str]]) -> dict[str, PackageSize]:
    """Return the size of each package, given all import cycles."""
    table: dict[str, PackageSize] = {}
    for path in sorted((ROOT / "aiogpu").rglob("*.py")):
        parts = path.relative_to(ROOT / "aiogpu").parts
        size = table.setdefault(parts[0] if parts[1:] else "(top level)", PackageSize())
        size.modules += 1
        size.code_lines += code_lines(path.read_text())
    cyclic = Counter(package_of(module) for cycle in found for module in cycle)
    for package, count in cyclic.items():
        table[package].in_cycles = count
    return table


def largest_folder() -> tuple[str, int]:
    """Return the folder with the most modules, not counting `__init__.py`."""
    folders = Counter(
        str(path.parent.relative_to(ROOT))
        for path in (ROOT / "aiogpu").rglob("*.py")
        if path.name != "__init__.py"
    )
    return folders.most_common(1)[0]


def report() -> Iterator[str]:
    """Yield the lines of the table."""
    found = cycles(imports())
    table = sizes(found)
    yield f"{'package':14}{'files':>7}{'code lines':>12}{'modules in cycles':>19}"
    for package, size in table.items():
        yield f"{package:14}{size.modules:7}{size.code_lines:12}{size.in_cycles:19}"
    yield (
        f"{'all':14}{sum(size.modules for size in table.values()):7}"
        f"{sum(size.code_lines for size in table.values()):12}"
        f"{sum(size.in_cycles for size in table.values()):19}"
    )
    folder, modules = largest_folder()
    largest = len(found[0]) if found else 0
    yield f"largest folder: {folder}, {modules} modules"
    yield f"import cycles: {len(found)}, the largest of {largest} modules"


if __name__ == "__main__":
    print("\n".join(report()))
