"""Each example prints what the text beside it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVERS = {"08_serve"}
"""They print nothing of their own, and have a test of their own."""
PROGRAMS = sorted(
    path for path in EXAMPLES.glob("[0-9]*.py") if path.stem not in SERVERS
)


def plain_environment() -> dict[str, str]:
    """This process's environment without what would change an example's output."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUDA_", "AIOGPU_"))
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_prints_what_is_expected(program: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(program)],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    expected = EXAMPLES / "expected" / f"{program.stem[:2]}.txt"
    assert re.sub(r"\bpid([= ])\d+", r"pid\1N", ran.stdout) == expected.read_text()


def test_every_example_is_here() -> None:
    texts = {path.stem for path in (EXAMPLES / "expected").iterdir()}
    assert {path.stem[:2] for path in PROGRAMS} == texts
    assert len(PROGRAMS) == len(texts)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_is_short_and_says_what_it_shows(program: Path) -> None:
    source = program.read_text()
    assert source.startswith('"""')
    assert 'if __name__ == "__main__":\n    aiogpu.run(main())\n' in source
    assert source.count("\n") <= 60
