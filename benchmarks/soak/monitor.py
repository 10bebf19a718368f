"""The record of a run, the faults that it injects, and the monitor of processes.

Faults are kills and pauses of a node's processes. A monitor checks all processes of a
sandbox meanwhile, and measures the node's process when the node is idle.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Final

from aiogpu.linux import syscalls as kernel
from benchmarks.processes import descriptors, internet_sockets, listening, status_bytes
from benchmarks.soak.sandbox import Sandbox

SHOWN: Final = 10
"""The number of failures of a claim that are printed."""


class Record:
    """The claims and figures of a whole run.

    Attributes:
        checks: number of checks of each claim.
        failures: descriptions of each claim's failures.
        figures: groups of counts, by title.
        series: measurements at each idle phase, by title.
    """

    def __init__(self) -> None:
        self.checks: Counter[str] = Counter()
        self.failures: defaultdict[str, list[str]] = defaultdict(list)
        self.figures: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.series: dict[str, list[float]] = {}
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._start

    @property
    def holds(self) -> bool:
        """True if no check of any claim has failed."""
        return not self.failures

    def check(self, claim: str, wrong: Sequence[str]) -> None:
        """Record one check of a claim, which holds if `wrong` is empty."""
        self.checks[claim] += 1
        if wrong:
            detail = "; ".join(wrong[:SHOWN])
            self.failures[claim].append(f"[{self.seconds:.0f} s] {detail}")
            print(f"FAILED: {claim}: {detail}", flush=True)

    def table(self) -> str:
        """Render the figures and the claims."""
        lines = []
        for title, counts in self.figures.items():
            pairs = (f"{name} {n}" for name, n in counts.most_common())
            lines.append(f"{title}: {', '.join(pairs)}")
        for title, samples in self.series.items():
            lines.append(f"{title}: {' '.join(f'{each:g}' for each in samples)}")
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
"""Seconds between two deaths of a zygote: a node ends after three in ten seconds."""
PAUSE: Final = 0.3
"""The longest pause of a process, in seconds."""
FAULTS: Final = {
    ("kill", "workers"): 6,
    ("kill", "keepers"): 2,
    ("kill", "zygotes"): 1,
    ("pause", "workers"): 1,
    ("pause", "keepers"): 1,
    ("pause", "zygotes"): 1,
}


class Faults:
    """Random kills and pauses of a node's processes.

    Attributes:
        counts: faults of each kind.
    """

    def __init__(self, sandbox: Sandbox, seed: str) -> None:
        self.counts: Counter[str] = Counter()
        self._sandbox = sandbox
        self._random = random.Random(f"{seed}/faults")
        self._last_zygote = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Inject one fault after the other, until cancelled."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / FAULTS_EVERY))
            await self._inject()

    async def _inject(self) -> None:
        ((action, kind),) = self._random.choices(list(FAULTS), tuple(FAULTS.values()))
        now = asyncio.get_running_loop().time()
        if (action, kind) == ("kill", "zygotes"):
            if now < self._last_zygote + ZYGOTE_EVERY:
                return
            self._last_zygote = now
        pids = [each.pid for each in self._sandbox.processes() if each.kind == kind]
        if not pids:
            return
        pid = self._random.choice(pids)
        self.counts[f"{action} {kind}"] += 1
        kernel.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        if action == "pause":
            try:
                await asyncio.sleep(self._random.random() * PAUSE)
            finally:
                kernel.kill(pid, signal.SIGCONT)


WARM_UP: Final = 1 / 4
"""The share of the samples that is dropped: the node has not settled yet."""
ENOUGH: Final = 4
"""The number of samples from which growth can be told."""
CHECKS_EVERY: Final = 1.0
MEMORY: Final = "MiB of its own"
DESCRIPTORS: Final = "descriptors"
PROCESSES: Final = "processes"
SEGMENTS: Final = "segments"
BOUNDS: Final[dict[str, float]] = {
    # A node keeps 10 000 ended tasks and 2048 declared sites, which takes a while to
    # fill; the allocator's pools grow for reasons of their own.
    MEMORY: 16,
    # One more keeper and worker may be kept for the next task.
    DESCRIPTORS: 60,
    PROCESSES: 20,
    # The pool of warm segments holds 14 to 31 of them from one idle phase to the next,
    # and with six samples, as in a short run, medians of thirds differ by up to 13.
    SEGMENTS: 16,
}
NO_INTERNET: Final = "no process has an internet socket"
OWN_DIRECTORY: Final = "sockets listen in the node's own directory alone"


def growth(samples: Sequence[float]) -> float:
    """Return the median of the last third minus that of the first third.

    The warm-up is dropped. Medians, so that a single high sample has no effect.
    """
    settled = samples[max(1, round(len(samples) * WARM_UP)) :]
    third = max(1, len(settled) // 3)
    return median(settled[-third:]) - median(settled[:third])


class Monitor:
    """Checks all processes of a sandbox, and measures its node when it is idle."""

    def __init__(self, sandbox: Sandbox, scenario: str, record: Record) -> None:
        self._sandbox = sandbox
        self._scenario = scenario
        self._record = record
        self._series: dict[str, list[float]] = {name: [] for name in BOUNDS}
        self.most_spilled = 0
        self.latest = ""

    async def run(self) -> None:
        """Check again and again, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECKS_EVERY)

    def check(self) -> None:
        """Check once."""
        processes, own = self._sandbox.processes(), f"{self._sandbox.runtime}/"
        pids = [process.pid for process in processes]
        self._record.check(NO_INTERNET, internet_sockets(pids))
        elsewhere = [path for path in listening(pids) if not path.startswith(own)]
        self._record.check(OWN_DIRECTORY, elsewhere)
        targets = [target for pid in pids for target in descriptors(pid)]
        spilled = sum("/spill/" in target for target in targets)
        self.most_spilled = max(self.most_spilled, spilled)
        kinds = Counter(process.kind for process in processes)
        self.latest = ", ".join(f"{n} {kind}" for kind, n in kinds.items())

    def measure(self, pid: int) -> None:
        """Measure the node's process while the node is idle."""
        targets = descriptors(pid)
        for name, value in {
            MEMORY: status_bytes("RssAnon", pid) / (1 << 20),
            DESCRIPTORS: len(targets),
            PROCESSES: len(self._sandbox.processes()),
            SEGMENTS: sum("memfd:aiogpu" in at or "/spill/" in at for at in targets),
        }.items():
            self._series[name].append(round(value, 1))

    def judge(self) -> None:
        """Check that nothing has grown; record how much was spilled."""
        for name, samples in self._series.items():
            self._record.series[f"{self._scenario}, when idle: {name}"] = samples
            if len(samples) >= ENOUGH:
                more = growth(samples)
                wrong = [f"{more:g} more: {samples}"] if more > BOUNDS[name] else []
                self._record.check(f"{self._scenario}: {name} flat", wrong)
        figures = self._record.figures[f"{self._scenario}: spilled"]
        figures["at once"] = self.most_spilled
