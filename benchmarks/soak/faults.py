"""Kills and pauses of a node's processes, drawn by a seed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from typing import Final

from benchmarks.soak.box import Box

EVERY: Final = 0.4
"""Seconds between two faults, on average."""
ZYGOTE_EVERY: Final = 4.0
"""Seconds between two deaths of a zygote: three in ten seconds are its limit."""
PAUSE: Final = 0.3
"""Seconds for which a process stands still."""
KINDS: Final = {
    ("kill", "workers"): 6,
    ("kill", "keepers"): 2,
    ("kill", "zygotes"): 1,
    ("pause", "workers"): 1,
    ("pause", "keepers"): 1,
    ("pause", "zygotes"): 1,
}


class Faults:
    """See above.

    Attributes:
        dealt: how many there were of each kind.
    """

    def __init__(self, box: Box, seed: str) -> None:
        self.dealt: Counter[str] = Counter()
        self._box = box
        self._hand = random.Random(seed)
        self._last_zygote = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """One after the other, until it is cancelled."""
        while True:
            await asyncio.sleep(self._hand.expovariate(1 / EVERY))
            await self._strike()

    async def _strike(self) -> None:
        ((what, part),) = self._hand.choices(list(KINDS), tuple(KINDS.values()))
        now = asyncio.get_running_loop().time()
        if (what, part) == ("kill", "zygotes"):
            if now < self._last_zygote + ZYGOTE_EVERY:
                return
            self._last_zygote = now
        found = [each.pid for each in self._box.processes() if each.part == part]
        if not found:
            return
        pid = self._hand.choice(found)
        self.dealt[f"{what} {part}"] += 1
        with suppress(ProcessLookupError):
            if what == "kill":
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._hand.random() * PAUSE)
            finally:
                os.kill(pid, signal.SIGCONT)
