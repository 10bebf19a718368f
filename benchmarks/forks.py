"""The floor of isolation: a process that forks children and reaps them.

The process has the memory of aiogpu's zygote, since a fork costs more the more memory
is shared; or it is a bare interpreter.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PAUSE: Final = 0.05
"""Seconds before a block, in which the machine finishes the work of the last one."""
IMAGE: Final = Path(__file__).with_name("zygote_image.py")
LOOP: Final = """
import os, sys
from time import perf_counter_ns

def fork_and_reap():
    start = perf_counter_ns()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return perf_counter_ns() - start

for line in sys.stdin:
    print([fork_and_reap() for _ in range(int(line))], flush=True)
"""
"""Imports next to nothing, so that the fork copies the image alone."""


def zygote_image(preload: Sequence[str] | None = None) -> str:
    """Return source that gives an interpreter the memory of aiogpu's zygote.

    Args:
        preload: modules that the user names; None for the default, which learns.
    """
    source = IMAGE.read_text(encoding="utf-8")
    return f"{source}\nbecome({list(preload or ())}, {preload is None})"


class ForkServer:
    """The program that forks."""

    def __init__(self, source: str) -> None:
        words, pipe = [sys.executable, "-c", source], subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)

    async def fork(self, count: int) -> list[int]:
        """Fork `count` times in a row; return the nanoseconds of each fork.

        Blocks the loop, so nothing else works meanwhile.
        """
        await asyncio.sleep(PAUSE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        samples: list[int] = json.loads(self.process.stdout.readline())
        return samples

    async def fork_mean(self, count: int) -> list[int]:
        """Fork `count` times in a row; return the mean as a block of one sample."""
        return [sum(await self.fork(count)) // count]


@contextmanager
def open_forks(image: str = "") -> Iterator[ForkServer]:
    """Start the program; it ends with the block.

    Args:
        image: source that runs first and gives the interpreter its memory.
    """
    server = ForkServer(f"{image}\n{LOOP}")
    with server.process:
        yield server
