"""`docs/actors.md` shows programs that run, and what they print."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "actors.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [*FENCE.findall(PAGE), ("", "")]
PROGRAMS = [
    (program, output if kind == "text" else None)
    for (first, program), (kind, output) in pairwise(BLOCKS)
    if first == "python run"
]


def test_the_page_has_programs():
    assert len(PROGRAMS) >= 2


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_program_prints_what_stands_below_it(program, output, tmp_path):
    assert output is not None, "a text block with its output must follow"
    path = tmp_path / "program.py"
    path.write_text(program)
    ran = subprocess.run(
        [sys.executable, path],
        env={k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "AIO"))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.sub(r"\bpid([= ])\d+", r"pid\1N", ran.stdout) == output
