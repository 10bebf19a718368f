"""Runs a program and ends all that it has started: `... warden COMMAND ...`.

What a program leaves behind becomes a child of the nearest process that has asked for
orphans, see PR_SET_CHILD_SUBREAPER in prctl(2); so nothing that it has started can get
away from here. All of it is ended when the program ends, or the standard input, which
it also does when the one who holds it dies.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from time import monotonic, sleep
from typing import Final

from benchmarks.census import descendants

PR_SET_CHILD_SUBREAPER: Final = 36
PATIENCE: Final = 20.0
"""Seconds after which those are left who do not even die of SIGKILL."""


def main(command: list[str]) -> None:
    """Run it until it ends, or the standard input does."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ears, mouth = os.pipe()
    os.set_blocking(mouth, False)
    os.set_blocking(ears, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    descriptors = [int(word) for word in command if word.isdigit()]
    with open(os.devnull, "rb") as nothing:
        program = subprocess.Popen(command, stdin=nothing, pass_fds=descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    while True:
        ready, _, _ = select.select([sys.stdin, ears], [], [])
        if ears in ready:
            os.read(ears, 4096)
            if program.pid in _reap():
                break  # what it has left may hold its connection open
        if sys.stdin in ready and not os.read(0, 4096):
            break
    end()


def end() -> None:
    """Kill what is below this process until there is nothing."""
    until = monotonic() + PATIENCE
    while (below := descendants()) and monotonic() < until:
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(0.01)
        _reap()


def _reap() -> set[int]:
    """Those that have ended."""
    ended = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


if __name__ == "__main__":
    main(sys.argv[1:])
