"""The floor of isolation: a process that forks, and reaps what it forked.

It is made what the system's workers are forked from, since a fork costs the more the
more memory it shares; or it is left a bare interpreter.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

REST: Final = 0.05
"""Seconds before a block, in which what the block before has set off is done."""


class Forks:
    """The program `forking`, at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def fork(self, count: int) -> list[int]:
        """Fork so often. Blocks the loop, so nobody else has work meanwhile."""
        await asyncio.sleep(REST)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        samples: list[int] = json.loads(self._process.stdout.readline())
        return samples

    async def fork_in_a_row(self, count: int) -> list[int]:
        """The same; gives what each adds to the whole."""
        return [sum(await self.fork(count)) // count]


@contextmanager
def open_forks(image: str = "") -> Iterator[Forks]:
    """Start the program; it ends with the block.

    Args:
        image: source that makes the interpreter what is to be forked.
    """
    source = f"{image}\nfrom benchmarks.forking import serve\nserve()\n"
    with subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process)
