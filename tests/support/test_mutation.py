"""The mutation tool, run on a program of two functions of which one is tested."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import mutation
from tests.support.mutants import draw, mutants_of

FILE = "aiogpu/program.py"
SOURCE = """\
def larger(one, two):
    return one if one > two else two


def untested(number):
    return not number


def told(name):
    print(f"{1 + 1}")  # f-strings are left as they are
    raise ValueError("no" + name)
"""
TESTS = """\
import subprocess, sys

def test_larger_in_another_process():
    code = "from aiogpu.program import larger; print(larger(1, 2))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd="/") == b"2\\n"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {FILE: SOURCE, "aiogpu/__init__.py": "", "tests/test_program.py": TESTS}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


@pytest.mark.skipif(sys.version_info < (3, 13), reason="the map needs Python 3.13")
def test_what_is_tested_kills_its_mutant_and_what_is_not_survives(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = [
        vars(mutant) | {"verdict": "killed", "killer": ""}
        for mutant in mutants_of(root, FILE)
        if mutant.kind in {"return None", "not"}
    ]
    assert [each["change"] for each in earlier] == [
        "one if one > two else two -> None",
        "not -> (nothing)",
        "not number -> None",
    ]
    del earlier[2]
    (root / "earlier").write_text("".join(json.dumps(each) + "\n" for each in earlier))
    (root / FILE).write_text("# the lines have moved\n" + SOURCE)

    options = f"--map {root}/map --from {root}/earlier --out {root}/out".split()
    mutation.main(options, root)

    killed, survived = mutation.read(root / "out").values()
    assert killed["verdict"] == "killed: failed"
    assert killed["killer"] == "tests/test_program.py::test_larger_in_another_process"
    assert killed["outside"]
    assert survived["verdict"] == "survived: no test executes it"
    assert capsys.readouterr().out.count("CHANGED") == 1
    assert (root / FILE).read_text().endswith(SOURCE)


def test_mutants_are_drawn_by_the_seed_and_are_programs(root: Path) -> None:
    first, same, other = (
        list(draw(root, [FILE], 5, seed, set())) for seed in (1, 1, 2)
    )
    assert first == same != other
    for mutant in first:
        changed = mutant.apply(SOURCE.encode())
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert "raise" not in mutant.text
        assert 'f"' not in mutant.text or mutant.kind == "remove statement"
