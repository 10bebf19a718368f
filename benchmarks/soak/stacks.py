"""Dump the stacks of all threads to stderr when something hangs.

Programs and workers dump theirs at SIGUSR2. The handler is faulthandler's, in C, and so
works where no Python code runs any more.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Final

from benchmarks.processes import Process, belonging

DUMP: Final = signal.SIGUSR2
RUNTIME: Final = "AIOGPU_SOAK_RUNTIME"
"""The variable that holds the runtime directory of all of them."""
DUMPING: Final = 1.0
"""Seconds in which all of them have written."""


def dump_on_signal() -> None:
    """Have this process and those it forks dump their stacks at the signal."""
    faulthandler.register(DUMP, file=2, all_threads=True)


async def dump_all() -> list[Process]:
    """Signal all processes of this soak one after the other; return them."""
    runtime = os.environ.get(RUNTIME)
    everybody = belonging(runtime) if runtime else ()
    found = [process for process in everybody if _handles_signal(process.pid)]
    for process in found:
        print(f"stacks of {process}:", file=sys.stderr, flush=True)
        try:
            os.kill(process.pid, DUMP)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        await asyncio.sleep(DUMPING / len(found))
    return found


def _handles_signal(pid: int) -> bool:
    """Return whether the process catches the signal and does not die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (DUMP - 1) & 1)
