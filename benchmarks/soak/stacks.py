"""Where everybody stands when something hangs: the stacks of all threads, on stderr.

Programs and workers say theirs at SIGUSR2. It is faulthandler's, in C, and so is heard
where no line of Python runs any more.
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

ASK: Final = signal.SIGUSR2
PLACE: Final = "AIOGPU_SOAK_RUNTIME"
"""The variable that holds the runtime directory of all of them."""
TELLING: Final = 1.0
"""Seconds in which what all of them write has come to the programs' stderr."""


def tell_when_asked() -> None:
    """Have this process and those it forks say where they stand when they are asked."""
    faulthandler.register(ASK, file=2, all_threads=True)


async def asked() -> list[Process]:
    """Ask all processes of this soak one after the other; gives who was asked.

    Who holds something up may be anybody's; outside a soak there is nobody.
    """
    place = os.environ.get(PLACE)
    everybody = belonging(place) if place else ()
    found = [process for process in everybody if _tells(process.pid)]
    for process in found:
        print(f"stacks of {process}:", file=sys.stderr, flush=True)
        try:
            os.kill(process.pid, ASK)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        await asyncio.sleep(TELLING / len(found))
    return found


def _tells(pid: int) -> bool:
    """Whether it hears the signal and does not die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (ASK - 1) & 1)
