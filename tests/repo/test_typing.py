"""mypy and pyright accept `good.py` and report exactly the marked lines of `bad.py`."""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.program import run_command

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("typing")
GOOD, BAD = CASES / "good.py", CASES / "bad.py"
OFFLINE = {
    # pyright's wheel holds pyright, and the nodejs wheel holds node: nothing is
    # downloaded, no newer version is looked up, and the machine's node is not used.
    "PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "1",
    "PYRIGHT_PYTHON_GLOBAL_NODE": "0",
    "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    "PYRIGHT_PYTHON_FORCE_VERSION": "",
    "PYRIGHT_PYTHON_PYLANCE_VERSION": "",
}


class Report(NamedTuple):
    """An error that a type checker reports."""

    file: str
    line: int
    text: str


def checked_by(*command: str) -> str:
    words = sys.executable, "-m", *command, str(GOOD), str(BAD)
    ran = run_command(*words, cwd=ROOT, env=os.environ | OFFLINE)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


def mypy() -> list[Report]:
    lines = checked_by("mypy", "--strict", "-O", "json").splitlines()
    return [
        Report(Path(each["file"]).name, each["line"], each["message"])
        for each in map(json.loads, lines)
        if each["severity"] == "error"
    ]


def pyright() -> list[Report]:
    report = json.loads(
        checked_by("pyright", "--outputjson", "--pythonpath", sys.executable)
    )
    return [
        Report(
            Path(each["file"]).name,
            each["range"]["start"]["line"] + 1,
            each["message"],
        )
        for each in report["generalDiagnostics"]
        if each["severity"] in ("error", "warning")
    ]


def marked(checker: str) -> set[int]:
    """The lines of `bad.py` that this type checker must report."""
    marks = ("# refused", f"# refused by {checker}")
    return {
        number
        for number, line in enumerate(BAD.read_text().splitlines(), start=1)
        if line.endswith(marks)
    }


@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_a_type_checker_accepts_good_use_and_reports_bad_use(checker):
    reports = checker()

    assert not [each for each in reports if each.file == GOOD.name]
    refused = {each.line for each in reports}
    assert refused == marked(checker.__name__), "\n".join(map(str, reports))
