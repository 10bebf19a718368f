"""What is done to the processes of a soak, and what is checked of them meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from statistics import median
from typing import Final

from benchmarks.processes import (
    count_parts,
    descriptors,
    internet_sockets,
    listening,
    status_bytes,
)
from benchmarks.soak.claims import Record
from benchmarks.soak.sandbox import Sandbox

FAULTS_EVERY: Final = 0.4
"""Seconds between two faults, on average."""
ZYGOTE_EVERY: Final = 4.0
"""Seconds between two deaths of a zygote: three in ten seconds are its limit."""
PAUSE: Final = 0.3
"""Seconds for which a process is stopped, at most."""
FAULTS: Final = {
    ("kill", "workers"): 6,
    ("kill", "keepers"): 2,
    ("kill", "zygotes"): 1,
    ("pause", "workers"): 1,
    ("pause", "keepers"): 1,
    ("pause", "zygotes"): 1,
}


class Faults:
    """Kills and pauses of a node's processes, drawn by a seed.

    Attributes:
        counts: how many there were of each kind.
    """

    def __init__(self, sandbox: Sandbox, seed: str) -> None:
        self.counts: Counter[str] = Counter()
        self._sandbox = sandbox
        self._random = random.Random(seed)
        self._last_zygote = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """One after the other, until it is cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / FAULTS_EVERY))
            await self._inject()

    async def _inject(self) -> None:
        ((what, part),) = self._random.choices(list(FAULTS), tuple(FAULTS.values()))
        now = asyncio.get_running_loop().time()
        if (what, part) == ("kill", "zygotes"):
            if now < self._last_zygote + ZYGOTE_EVERY:
                return
            self._last_zygote = now
        found = [each.pid for each in self._sandbox.processes() if each.part == part]
        if not found:
            return
        pid = self._random.choice(found)
        self.counts[f"{what} {part}"] += 1
        with suppress(ProcessLookupError):
            if what == "kill":
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._random.random() * PAUSE)
            finally:
                os.kill(pid, signal.SIGCONT)


WARM_UP: Final = 1 / 4
"""The part of all samples that is dropped: nothing has settled."""
ENOUGH: Final = 4
"""Samples from which growth can be told at all."""


class Series:
    """What something measured, at one idle phase after the other."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    @property
    def settled(self) -> list[float]:
        """The samples after the warm-up."""
        return self.samples[max(1, round(len(self.samples) * WARM_UP)) :]

    @property
    def is_enough(self) -> bool:
        """Whether growth can be told."""
        return len(self.samples) >= ENOUGH

    @property
    def growth(self) -> float:
        """The median of the last third less that of the first one.

        Medians, so that one phase with more than usual says nothing.
        """
        settled = self.settled
        third = max(1, len(settled) // 3)
        return median(settled[-third:]) - median(settled[:third])


CHECKS_EVERY: Final = 1.0
MEMORY: Final = "MiB of its own"
DESCRIPTORS: Final = "descriptors"
PROCESSES: Final = "processes"
SEGMENTS: Final = "segments"
BOUNDS: Final[dict[str, float]] = {
    # What has ended (10 000 tasks) and what was declared (2048 sites) is kept, and
    # takes a while to fill; the allocator's pools grow for reasons of their own.
    MEMORY: 16,
    # A keeper and a worker more or less may be kept for what comes next.
    DESCRIPTORS: 60,
    PROCESSES: 20,
    # The pool of warm segments holds 14 to 31 of them from one idle phase to the next,
    # and with six samples, as in a short run, medians of thirds differ by up to 13.
    SEGMENTS: 16,
}
NO_INTERNET: Final = "no process has an internet socket"
OWN_DIRECTORY: Final = "sockets listen in the node's own directory alone"


class Monitor:
    """Checks all processes of a sandbox, and measures its node when it is idle."""

    def __init__(self, sandbox: Sandbox, what: str, record: Record) -> None:
        self._sandbox = sandbox
        self._what = what
        self._record = record
        self._series = {what: Series() for what in BOUNDS}
        self.most_spilled = 0
        self.latest = ""

    async def run(self) -> None:
        """Check again and again, until it is cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECKS_EVERY)

    def check(self) -> None:
        """Check once."""
        found = self._sandbox.processes()
        pids = [process.pid for process in found]
        self._record.check_none(NO_INTERNET, internet_sockets(pids))
        elsewhere = [
            path
            for path in listening(pids)
            if not path.startswith(f"{self._sandbox.runtime}/")
        ]
        self._record.check_none(OWN_DIRECTORY, elsewhere)
        spilled = sum(
            "/spill/" in target for pid in pids for target in descriptors(pid)
        )
        self.most_spilled = max(self.most_spilled, spilled)
        self.latest = ", ".join(f"{n} {part}" for part, n in count_parts(found).items())

    def measure(self, pid: int) -> None:
        """Measure the process of the node while it is idle."""
        held = descriptors(pid)
        sample = {
            MEMORY: status_bytes("RssAnon", pid) / (1 << 20),
            DESCRIPTORS: float(len(held)),
            PROCESSES: float(len(self._sandbox.processes())),
            SEGMENTS: float(_segments(held)),
        }
        for what, value in sample.items():
            self._series[what].samples.append(round(value, 1))

    def judge(self) -> None:
        """Check that nothing has grown; note how much was spilled."""
        for what, series in self._series.items():
            name = f"{self._what}, when idle: {what}"
            self._record.series[name] = series.samples
            if series.is_enough:
                detail = f"{series.growth:g} more: {series.samples}"
                is_flat = series.growth <= BOUNDS[what]
                self._record.check(f"{self._what}: {what} flat", is_flat, detail)
        self._record.add(f"{self._what}: spilled", {"at once": self.most_spilled})


def _segments(held: list[str]) -> int:
    return sum("memfd:aiogpu" in target or "/spill/" in target for target in held)
