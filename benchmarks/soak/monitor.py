"""What a run claims and counts; the faults that it makes; and what is checked.

Faults are kills and pauses of a node's processes. A monitor checks all processes of a
sandbox meanwhile, and measures the node's own when it is idle.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
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
from benchmarks.soak.sandbox import Sandbox

SHOWN: Final = 10
"""Failures of one claim that are shown."""


class Record:
    """The claims and figures of a whole run.

    Attributes:
        checks: how often each claim was checked.
        failures: of each claim, each time that it did not hold, in words.
        figures: what was counted, by what it is.
        series: what was measured at each idle phase, by what it is.
    """

    def __init__(self) -> None:
        self.checks: Counter[str] = Counter()
        self.failures: defaultdict[str, list[str]] = defaultdict(list)
        self.figures: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.series: dict[str, list[float]] = {}
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begun

    @property
    def holds(self) -> bool:
        """Whether no check of any claim has failed."""
        return not self.failures

    def check(self, claim: str, wrong: Sequence[str]) -> None:
        """Check a claim once, which holds if nothing is wrong."""
        self.checks[claim] += 1
        if wrong:
            detail = "; ".join(wrong[:SHOWN])
            self.failures[claim].append(f"[{self.seconds:.0f} s] {detail}")
            print(f"FAILED: {claim}: {detail}", flush=True)

    def table(self) -> str:
        """Render the figures and the claims."""
        lines = []
        for what, counted in self.figures.items():
            pairs = (f"{name} {n}" for name, n in counted.most_common())
            lines.append(f"{what}: {', '.join(pairs)}")
        for what, samples in self.series.items():
            lines.append(f"{what}: {' '.join(f'{each:g}' for each in samples)}")
        width = max(map(len, self.checks), default=0)
        lines += ["", f"{'claim':{width}}  checks  verdict"]
        for name, checks in self.checks.items():
            failures = self.failures.get(name, [])
            verdict = f"FAILED {len(failures)} x" if failures else "held"
            lines.append(f"{name:{width}}  {checks:6}  {verdict}")
            lines += [f"    {failure}" for failure in failures[:SHOWN]]
        return "\n".join(lines)


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
        self._random = random.Random(f"{seed}/faults")
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


def growth(samples: Sequence[float]) -> float:
    """Return the median of the last third less that of the first one, warmed up.

    Medians, so that one phase with more than usual says nothing.
    """
    settled = samples[max(1, round(len(samples) * WARM_UP)) :]
    third = max(1, len(settled) // 3)
    return median(settled[-third:]) - median(settled[:third])


class Monitor:
    """Checks all processes of a sandbox, and measures its node when it is idle."""

    def __init__(self, sandbox: Sandbox, what: str, record: Record) -> None:
        self._sandbox = sandbox
        self._what = what
        self._record = record
        self._series: dict[str, list[float]] = {what: [] for what in BOUNDS}
        self.most_spilled = 0
        self.latest = ""

    async def run(self) -> None:
        """Check again and again, until it is cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECKS_EVERY)

    def check(self) -> None:
        """Check once."""
        found, own = self._sandbox.processes(), f"{self._sandbox.runtime}/"
        pids = [process.pid for process in found]
        self._record.check(NO_INTERNET, internet_sockets(pids))
        elsewhere = [path for path in listening(pids) if not path.startswith(own)]
        self._record.check(OWN_DIRECTORY, elsewhere)
        spilled = sum(
            "/spill/" in target for pid in pids for target in descriptors(pid)
        )
        self.most_spilled = max(self.most_spilled, spilled)
        self.latest = ", ".join(f"{n} {part}" for part, n in count_parts(found).items())

    def measure(self, pid: int) -> None:
        """Measure the process of the node while it is idle."""
        held = descriptors(pid)
        segments = [at for at in held if "memfd:aiogpu" in at or "/spill/" in at]
        for what, value in {
            MEMORY: status_bytes("RssAnon", pid) / (1 << 20),
            DESCRIPTORS: len(held),
            PROCESSES: len(self._sandbox.processes()),
            SEGMENTS: len(segments),
        }.items():
            self._series[what].append(round(value, 1))

    def judge(self) -> None:
        """Check that nothing has grown; note how much was spilled."""
        for what, samples in self._series.items():
            self._record.series[f"{self._what}, when idle: {what}"] = samples
            if len(samples) >= ENOUGH:
                more = growth(samples)
                wrong = [f"{more:g} more: {samples}"] if more > BOUNDS[what] else []
                self._record.check(f"{self._what}: {what} flat", wrong)
        self._record.figures[f"{self._what}: spilled"]["at once"] = self.most_spilled
