"""Programs run in an interpreter of their own, as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    """This environment with the tests importable and these variables."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **variables}


def start(source: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a program given by its text."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(source: str, *arguments: str, **variables: str) -> str:
    """Run a program to its end; gives its output, raises if it fails."""
    program = start(source, *arguments, **variables)
    try:
        out, err = program.communicate(timeout=120)
    except BaseException:
        program.kill()  # or it would go on beside the tests that follow
        raise
    assert program.returncode == 0, f"exit {program.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    assert "never retrieved" not in err, err
    return out
