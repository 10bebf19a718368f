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
"""Seconds that a test waits for a text."""
PROMPT: Final = "READY>"


class Screen:
    """One terminal.

    Attributes:
        name: name of the tmux server, which has only this terminal.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # The server inherits the environment of the client that starts it.
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
        """The current lines of the screen."""
        return self.tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def resize(self, columns: int, lines: int) -> None:
        self.tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def until(self, condition: Callable[[list[str]], object]) -> list[str]:
        """Wait until the condition holds for the lines; return them."""
        end = time.monotonic() + LIMIT
        while not condition(lines := self.lines()):
            if time.monotonic() > end:
                raise TimeoutError("\n".join(lines))
        return lines

    def has(self, text: str) -> list[str]:
        """Wait until the screen shows the text; return the lines."""
        return self.until(lambda lines: any(text in line for line in lines))


@contextmanager
def open_screen(directory: Path) -> Iterator[Screen]:
    """A terminal of 80 x 24 with a shell, where `$python` is this interpreter."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    screen = Screen(f"aiogpu-{directory.name}-{time.monotonic_ns()}")
    shell = f"env PS1='{PROMPT} ' bash --norc --noprofile"
    screen.tmux("new-session", "-d", "-x", "80", "-y", "24", shell)
    try:
        screen.has(PROMPT)
        yield screen
    finally:
        screen.tmux("kill-server")
