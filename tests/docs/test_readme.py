"""The README's programs print what the README says; its commands are as promised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str


BLOCKS = [Block(*match) for match in FENCE.findall(README)]
PROGRAMS = [
    (program.text, after.text)
    for program, after in pairwise(BLOCKS)
    if program.language == "python" and after.language == "text"
]


def environment() -> dict[str, str]:
    """This process's, without what would change a program's output."""
    left_out = ("CUDA_", "AIOGPU_")
    return {k: v for k, v in os.environ.items() if not k.startswith(left_out)}


def without_pids(text: str) -> str:
    return re.sub(r"\bpid=\d+", "pid=N", text)


@pytest.mark.parametrize(
    ("program", "output"), PROGRAMS, ids=["first", "errors", "actor", "values"]
)
def test_program_prints_what_is_said(program: str, output: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert without_pids(ran.stdout) == without_pids(output)


def test_every_program_that_prints_shows_its_output() -> None:
    printing = [b for b in BLOCKS if b.language == "python" and "print(" in b.text]
    assert [program for program, _ in PROGRAMS] == [block.text for block in printing]


def test_the_first_command_installs_and_runs_the_demo() -> None:
    first = next(block for block in BLOCKS if block.language == "bash")
    assert first.text == (
        "python3 -m venv .venv && .venv/bin/pip install -q '.[demo]' "
        "&& .venv/bin/aiogpu demo\n"
    )


def test_the_second_command_is_under_tests() -> None:
    section = README.split("\n## Tests\n")[1]
    assert FENCE.search(section)[2] == (
        "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo,test]' "
        "&& .venv/bin/python -m pytest -n 4\n"
    )


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
