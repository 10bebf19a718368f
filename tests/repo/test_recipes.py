"""`CONTRIBUTING.md` can be followed: its recipes and first tests work in a copy.

A block `recipe=NAME file=PATH` is a new file, or a diff of one; a block `bash
recipe=NAME` has the commands that prove the recipe. A block `test=PATH` is a test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aiogpu.api.options import TaskOptions
from tests.contract.test_every_option import KINDS
from tests.repo.source_folders import ROOT
from tests.support.program import clean_environment

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(
    r"^```(\w+) (recipe|test)=(\S+)(?: file=(\S+))?\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
BLOCKS = BLOCK.findall(PAGE)
RECIPES = ("command", "message", "option", "vendor")
FIRST_TESTS = {path: text for _, key, path, _, text in BLOCKS if key == "test"}
COPIED = ("aiogpu", "benchmarks", "design", "docs", "examples", "tests")
LIMIT = 170


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository."""
    copy = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


def apply(diff: str, path: Path) -> None:
    """Apply a diff without line numbers: its old lines occur once in the file."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if not line.startswith("+"))
    new = "".join(line[1:] for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has not once:\n{old}"
    path.write_text(text.replace(old, new))


def run(command: str, tree: Path) -> None:
    environ = clean_environment(PYTHONPATH=str(tree))
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-ec", command],
        cwd=tree,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works(name: str, tree: Path) -> None:
    steps = [block for block in BLOCKS if block[1:3] == ("recipe", name)]
    commands = [text for kind, *_, text in steps if kind == "bash"]
    assert commands
    for kind, _, _, file, text in steps:
        if kind == "python":
            (tree / file).write_text(text)
        elif kind == "diff":
            apply(text, tree / file)
    run("".join(commands), tree)


@pytest.mark.parametrize("path", FIRST_TESTS)
def test_a_first_test_passes(path: str, tree: Path) -> None:
    (tree / path).write_text(FIRST_TESTS[path])
    run(f"python -m pytest {path}", tree)


def test_each_folder_of_a_first_test_has_one() -> None:
    folders = {path.split("/")[1] for path in FIRST_TESTS}
    assert folders == {"contract", "core", "unit", "cli"}


def test_each_option_is_at_the_places_of_its_recipe() -> None:
    table = PAGE.partition("### Add an option\n")[2].partition("### ")[0]
    places = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert [place for place in places if not (ROOT / place).exists()] == []
    texts = {place: (ROOT / place).read_text() for place in places}
    options = set(TaskOptions.taken_by("task"))
    assert options <= {*KINDS["task"], "name"}
    assert [place for place, text in texts.items() if "stop_grace" not in text] == []


def test_the_stages_of_the_check_are_those_of_the_page_and_of_the_workflows() -> None:
    script = (ROOT / ".ci/run").read_text()
    stages = re.findall(r"^    \[(\w+)\]=", script, re.MULTILINE)
    assert re.findall(r"^order=\((.*)\)$", script, re.MULTILINE) == [" ".join(stages)]
    assert re.findall(r"^        (\w+)\) environment", script, re.MULTILINE) == stages
    for stage in stages:
        assert re.search(rf"`(?:\.ci/run )?{stage}`", PAGE), stage
    workflow = (ROOT / ".github/workflows/check.yml").read_text()
    called = re.findall(r"\.ci/run ([\w ]+)$", workflow, re.MULTILINE)
    assert {name for line in called for name in line.split()} <= set(stages)


def names(requirements: list[object]) -> set[str]:
    return {str(each) for each in requirements if isinstance(each, str)}


def test_groups_and_extras_name_the_same_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups, extras = project["dependency-groups"], project["project"]
    extras = extras["optional-dependencies"]
    parts = [names(groups[name]) for name in ("unit", "contract", "lint")]
    assert set.union(*parts) == set(extras["test"])
    assert set(groups["docs"]) == set(extras["docs"])
    apart = {"fastapi", "joblib", "ipython", "pyright"}
    assert not apart & {re.split(r"[\[>]", each)[0] for each in parts[0]}
