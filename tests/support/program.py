"""Programs in interpreters of their own, as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with these variables; the tests are importable."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **variables}


def start(source: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a program, given as source text."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(source: str, *arguments: str, **variables: str) -> str:
    """Run a program to its end; return its output, which may have no traceback."""
    program = start(source, *arguments, **variables)
    try:
        out, err = program.communicate(timeout=120)
    except BaseException:
        program.kill()  # or the program would run beside the next tests
        raise
    assert program.returncode == 0, f"exit {program.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    assert "never retrieved" not in err, err
    return out
