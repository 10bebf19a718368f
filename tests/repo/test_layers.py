"""No modules import each other, and the import contracts hold.

Each contract reports every import that it forbids. Imports inside functions and under
`TYPE_CHECKING` count as cycles: a reader follows them too.
"""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.repo.code_metrics import code_lines, cycles, imports
from tests.support.program import clean_environment, run_command

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).with_name("lint-imports")), "--no-cache"
    environ = clean_environment(COLUMNS="400", NO_COLOR="1")
    return run_command(*command, cwd=root, env=environ)


def forbidden_imports(contract: dict) -> Iterator[tuple[str, str]]:
    """Every import that a contract forbids."""
    if contract["type"] == "forbidden":
        yield from product(contract["source_modules"], contract["forbidden_modules"])
        return
    layers = [layer.split(" | ") for layer in contract["layers"]]
    for level, layer in enumerate(layers):
        for importer in layer:
            above = [package for upper in layers[:level] for package in upper]
            beside = [package for package in layer if package != importer]
            yield from product([importer], above + beside)


def source_of(module: str, root: Path) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_all_contracts_are_kept():
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert all(f"{name} KEPT" in linted.stdout for name in CONTRACTS), linted.stdout


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_contract_reports_every_import_that_it_forbids(name, tmp_path):
    shutil.copytree(
        ROOT / "aiogpu",
        tmp_path / "aiogpu",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    forbidden = list(forbidden_imports(CONTRACTS[name]))
    assert forbidden
    for importer, imported in forbidden:
        with source_of(importer, tmp_path).open("a") as source:
            source.write(f"\nimport {imported}\n")

    linted = lint(tmp_path)

    assert linted.returncode == 1, linted.stdout + linted.stderr
    assert f"{name} BROKEN" in linted.stdout
    report = linted.stdout.partition("Broken contracts")[2]
    unreported = [
        f"{importer} -> {imported}"
        for importer, imported in forbidden
        if f"{importer} -> {imported} (" not in report
    ]
    assert not unreported, report


def test_every_package_belongs_to_a_layer():
    contract = next(each for each in CONTRACTS.values() if each["type"] == "layers")
    layered = {
        package for layer in contract["layers"] for package in layer.split(" | ")
    }
    packages = {
        f"aiogpu.{path.stem}"
        for path in (ROOT / "aiogpu").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert packages - {"aiogpu.__init__", "aiogpu.__main__"} == layered


def test_the_package_has_no_import_cycles() -> None:
    assert cycles(imports()) == []


def test_import_cycles_are_found() -> None:
    edges = {
        "a": {"b"},
        "b": {"c", "d"},
        "c": {"a"},
        "d": {"e"},
        "e": {"d"},
        "f": {"a", "f"},
    }
    assert cycles(edges) == [["a", "b", "c"], ["d", "e"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_code_lines_leave_out_comments_and_docstrings() -> None:
    source = (
        '"""Of\nthe module."""\n\n# why\n'
        'def f():\n    """Do."""\n    return (\n        1\n    )'
    )
    assert code_lines(source) == 4
