"""Programs in interpreters of their own, as a user would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHANGES_OUTPUT = (
    *("CUDA_", "AIOGPU_", "NO_COLOR", "FORCE_COLOR"),
    *("COLUMNS", "LINES", "PYTHONIOENCODING"),
)
"""Prefixes of variables that change what programs print."""


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


def output_of(
    program: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> str:
    """Run a script of the documentation; return its output, with process ids as N.

    The default of `variables` is `clean_environment()`. The program must end without
    an error and write nothing to stderr.
    """
    command = sys.executable, str(program), *arguments
    ran = run_command(*command, env=variables or clean_environment())
    assert (ran.returncode, ran.stderr) == (0, "")
    return without_pids(ran.stdout)


def run_command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and capture its output as text."""
    options = {"timeout": 120, "check": False, **options}
    return subprocess.run(words, capture_output=True, text=True, **options)


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without variables that change output, with these."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(CHANGES_OUTPUT)}
    return {**kept, **variables}


def without_pids(text: str) -> str:
    """The text with process ids as N."""
    return re.sub(r"\bpid([= ])\d+", r"pid\1N", text)
