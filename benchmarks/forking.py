"""Forks and reaps, one after the other: the program behind `forks`.

It reads a count from each line, forks so often, and answers with the nanoseconds of
each. Imports next to nothing: what it forks is what it was made before.
"""

import os
import sys
from time import perf_counter_ns


def serve() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        print([fork_and_reap() for _ in range(int(line))], flush=True)


def fork_and_reap() -> int:
    """One fork that ends at once; gives its nanoseconds."""
    start = perf_counter_ns()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return perf_counter_ns() - start
