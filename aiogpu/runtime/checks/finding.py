"""What one look at this machine has shown, and what follows from it for a user.

What may hang or end a process is tried in a child of its own (`trial`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How good a finding is."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One mechanism, tried.

    Attributes:
        name: the mechanism, in two or three words.
        level: whether it works, works in part, or is not there.
        found: what was seen, in one line.
        means: what that means for a user, one sentence; empty if all is well.
        advice: what to do about it, one sentence; empty if nothing.
        is_essential: no node starts without it.
    """

    name: str
    level: Level
    found: str
    means: str = ""
    advice: str = ""
    is_essential: bool = False

    @property
    def is_fatal(self) -> bool:
        """True if aiogpu cannot work on this machine because of it."""
        return self.is_essential and self.level is Level.MISSING


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to try.

    Attributes:
        name: what it is about, for the case that it gives no finding.
        run: tries it; may raise, which is a finding too.
        limit: seconds after which it counts as one that hangs.
        is_essential: no node starts where it fails as a whole.
    """

    name: str
    run: Callable[[], Iterable[Finding]]
    limit: float = 10.0
    is_essential: bool = False


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks one after the other, each in a thread that may be given up."""
    for check in checks:
        yield from _bounded(check)


def _bounded(check: Check) -> Sequence[Finding]:
    found: list[Finding] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(check.run())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            failure.append(error)

    thread = threading.Thread(target=run, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(check.limit)
    if thread.is_alive():
        return [_failed(check, f"no answer within {check.limit:g} s", "It hangs.")]
    if failure:
        error = failure[0]
        told = f"{type(error).__name__}: {error}"
        return [*found, _failed(check, told, "It cannot be tried.")]
    return found


def _failed(check: Check, found: str, means: str) -> Finding:
    level = Level.MISSING if check.is_essential else Level.WARN
    advice = "Please report it, with this line." if check.is_essential else ""
    return Finding(check.name, level, found, means, advice, check.is_essential)


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
