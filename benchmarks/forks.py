"""The floor of isolation: a bare interpreter that forks, and reaps what it forked.

Run as a program it reads a count from each line, forks so often one after the other,
and answers with the nanoseconds of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns


class Forks:
    """The program below, at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def fork(self, count: int) -> list[int]:
        """Fork so often. Blocks the loop, which has nothing else to do."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        samples: list[int] = json.loads(self._process.stdout.readline())
        return samples


@contextmanager
def open_forks() -> Iterator[Forks]:
    """Start the program; it ends with the block."""
    with subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process)


def fork_and_reap() -> int:
    """One fork that ends at once; gives its nanoseconds."""
    start = perf_counter_ns()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return perf_counter_ns() - start


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps([fork_and_reap() for _ in range(int(line))]), flush=True)
