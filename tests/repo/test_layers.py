"""The walls between the rooms stand, and each is seen to fall when it is breached."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "COLUMNS": "400", "NO_COLOR": "1"},
        text=True,
        capture_output=True,
        check=False,
    )


def rooms(layer: str) -> list[str]:
    return layer.split(" | ")


def breaches(contract: dict) -> Iterator[tuple[str, str]]:
    """Every import, from room to room or out of the house, that is forbidden."""
    if contract["type"] == "forbidden":
        yield from product(contract["source_modules"], contract["forbidden_modules"])
        return
    layers = [rooms(layer) for layer in contract["layers"]]
    for floor, layer in enumerate(layers):
        for importer in layer:
            above = [room for upper in layers[:floor] for room in upper]
            beside = [room for room in layer if room != importer]
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
    forbidden = list(breaches(CONTRACTS[name]))
    assert forbidden
    for importer, imported in forbidden:
        with source_of(importer, tmp_path).open("a") as source:
            source.write(f"\nimport {imported}\n")

    linted = lint(tmp_path)

    assert linted.returncode == 1, linted.stdout + linted.stderr
    assert f"{name} BROKEN" in linted.stdout
    report = linted.stdout.partition("Broken contracts")[2]
    unseen = [
        f"{importer} -> {imported}"
        for importer, imported in forbidden
        if f"{importer} -> {imported} (" not in report
    ]
    assert not unseen, report


def test_every_room_stands_on_a_floor():
    floors = next(each for each in CONTRACTS.values() if each["type"] == "layers")
    standing = {room for layer in floors["layers"] for room in rooms(layer)}
    built = {
        f"aiogpu.{path.stem}"
        for path in (ROOT / "aiogpu").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert built - {"aiogpu.__init__", "aiogpu.__main__"} == standing
