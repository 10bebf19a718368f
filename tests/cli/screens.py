"""A shell in a terminal of tmux, whose screen can be read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support.program import environment

LIMIT: Final = 30.0
"""Seconds until what must come has come."""
PROMPT: Final = "READY>"


class Screen:
    """One terminal.

    Attributes:
        name: of the tmux server, which has this terminal alone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # The server has what the client has that starts it.
        self._environ = environment(
            python=sys.executable, HISTFILE="", LC_ALL="C.UTF-8"
        )
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TMUX"):
            self._environ.pop(name, None)

    def tmux(self, *arguments: str) -> str:
        ran = subprocess.run(
            ["tmux", "-L", self.name, "-f", "/dev/null", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT,
            env=self._environ,
        )
        return ran.stdout

    def send(self, *keys: str) -> None:
        """Press keys, by tmux's names for them."""
        self.tmux("send-keys", *keys)

    def lines(self) -> list[str]:
        """What is on the screen now."""
        return self.tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def resize(self, columns: int, lines: int) -> None:
        self.tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def until(self, is_so: Callable[[list[str]], object]) -> list[str]:
        """The screen as soon as something is so of it."""
        end = time.monotonic() + LIMIT
        while not is_so(lines := self.lines()):
            if time.monotonic() > end:
                raise TimeoutError("\n".join(lines))
        return lines

    def has(self, text: str) -> list[str]:
        """The screen as soon as that text is on it."""
        return self.until(lambda lines: any(text in line for line in lines))


@contextmanager
def screen(place: Path, columns: int = 80, lines: int = 24) -> Iterator[Screen]:
    """A terminal with a shell in it, which has this interpreter as `python`."""
    if shutil.which("tmux") is None:
        pytest.skip("there is no tmux, whose screens are read")
    found = Screen(f"aiogpu-{place.name}-{time.monotonic_ns()}")
    shell = f"env PS1='{PROMPT} ' bash --norc --noprofile"
    size = ["-x", str(columns), "-y", str(lines)]
    found.tmux("new-session", "-d", *size, shell)
    try:
        found.has(PROMPT)
        yield found
    finally:
        found.tmux("kill-server")
