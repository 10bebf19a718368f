"""A throw-away interpreter in which something is tried, ended after a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class TrialError(Exception):
    """The trial did not come to its end; the text says why."""


def try_out(
    source: str,
    *arguments: str,
    limit: float,
    environ: Mapping[str, str] | None = None,
    executable: str = sys.executable,
) -> Any:
    """Run a program that prints one line of JSON last, and give that.

    It has a session of its own, all of which is killed when time is up.

    Args:
        source: the program's text.
        arguments: its `sys.argv[1:]`.
        limit: seconds.
        environ: its environment, this process's if None.
        executable: the interpreter.

    Raises:
        TrialError: it cannot be started, fails, hangs, or says something else.
    """
    environ = dict(os.environ if environ is None else environ)
    # What this program can import, the trial can as well.
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        child = subprocess.Popen(
            [executable, "-c", source, *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except (OSError, ValueError) as error:
        raise TrialError(f"{executable or 'no interpreter'}: {error}") from error
    with child:
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise TrialError(f"no answer within {limit:g} s") from None
    lines = out.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (err.strip().splitlines() or ["it says nothing"])[-1]
        raise TrialError(f"{_ended(child.returncode)}: {last}") from None


def _ended(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
