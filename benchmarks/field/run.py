"""One run: the order of systems, workloads and blocks.

Systems stay started while workloads need the same setup. In each workload all systems
run a block in turn, again and again; a block is compared with the other blocks of the
same turn. A system that fails or does not answer in time leaves that workload.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from time import monotonic
from typing import Any, Final, NamedTuple

from benchmarks.field.process import FailedError, LateError, SystemProcess
from benchmarks.field.systems import UnsupportedError
from benchmarks.field.workloads import WORKLOADS, Amount, Figures

PAUSE: Final = 0.03
"""Seconds before a block, in which the machine finishes the work of the last one."""
MOST_LATE: Final = 2
"""After this many late answers a system leaves the run."""
OPENS_WITHIN: Final = 120.0
ANSWERS_WITHIN: Final = 60.0
CLOSES_WITHIN: Final = 20.0
"""Limits in seconds for the answers of a system."""


class Extent(NamedTuple):
    """The size of a run.

    Attributes:
        amount: the work in each block.
        turns: the most turns; there are fewer once the workload's time is over.
        least: the fewest turns, even if the time is over.
        idle: seconds for which idle systems are watched.
    """

    amount: Amount
    turns: int
    least: int
    idle: float


FULL: Final = Extent(Amount(500, 0.2, waiting=1_000_000, tasks=160), 15, 3, 2.0)
QUICK: Final = Extent(Amount(8, 0.01, waiting=500, tasks=12), 1, 1, 0.1)


@dataclass(slots=True)
class Entry:
    """The results of one system in one workload.

    Attributes:
        turns: the figures of each turn.
        notes: facts about these figures.
        why: why there are no figures; "" if there are.
    """

    workload: str
    system: str
    turns: list[Figures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why: str = ""


class Run:
    """One run.

    Attributes:
        entries: the results.
        idle: share of one core that each system uses when idle.
        libraries: the libraries of all systems, with their versions.
    """

    def __init__(self, names: Sequence[str], extent: Extent) -> None:
        self.entries: list[Entry] = []
        self.idle: dict[str, float] = {}
        self.libraries: dict[str, str] = {}
        self._late: Counter[str] = Counter()
        self._names = names
        self._extent = extent

    def run(self, workloads: Sequence[str], report: Callable[[str], None]) -> None:
        """Run the workloads; report a line for each one that is done."""
        for _, group in groupby(workloads, lambda name: WORKLOADS[name].setup):
            systems = [SystemProcess(name) for name in self._names]
            try:
                for workload in group:
                    start = monotonic()
                    entries = self._run_workload(workload, systems)
                    self.entries += entries
                    line = f"{workload}: {monotonic() - start:.0f} s"
                    for entry in entries:
                        if entry.why.startswith("failed"):
                            line += f"; {entry.system} {entry.why}"
                    report(line)
                    if not self.idle:
                        self.idle = self._watch_idle(systems)
                for system in systems:
                    self.libraries |= system.libraries
            finally:
                for system in systems:
                    system.stop(CLOSES_WITHIN)

    def _run_workload(self, name: str, systems: Sequence[SystemProcess]) -> list[Entry]:
        """Run all turns of one workload."""
        entries = [Entry(name, system.name) for system in systems]
        workload = WORKLOADS[name]
        if workload.needs and find_spec(workload.needs) is None:
            for entry in entries:
                entry.why = f"{workload.needs} is not installed"
            return entries
        both = list(zip(systems, entries, strict=True))
        is_fresh = workload.setup.is_fresh
        if not is_fresh:
            for system, entry in both:
                self._turn(system, entry)
                entry.turns.clear()  # the first block is a warm-up
        least = 1 if is_fresh else self._extent.least
        until, turn = monotonic() + workload.seconds, 0
        while turn < self._extent.turns and (turn < least or monotonic() < until):
            for system, entry in both:
                self._turn(system, entry)
            turn += 1
        return entries

    def _turn(self, system: SystemProcess, entry: Entry) -> None:
        """Run one block of one system; the entry says why if there is no block."""
        if self._late[system.name] >= MOST_LATE:
            entry.why = f"left out: it was late {MOST_LATE} times before"
        if entry.why:
            return
        time.sleep(PAUSE)
        try:
            figures, entry.notes = self._block(entry.workload, system)
            entry.turns.append(figures)
        except UnsupportedError as reason:
            entry.why = f"not supported: {reason}"
        except FailedError as reason:
            entry.why = f"failed: {reason}"
            self._late[system.name] += isinstance(reason, LateError)
            system.stop()
        if WORKLOADS[entry.workload].setup.is_fresh:
            system.stop(CLOSES_WITHIN)

    def _block(self, workload: str, system: SystemProcess) -> Any:
        if system.reaper is None:
            system.start()
        if system.workload != workload:
            system.libraries |= system.request(OPENS_WITHIN, "prepare", workload)
            system.workload = workload
        try:
            return system.request(ANSWERS_WITHIN, "block", self._extent.amount)
        except UnsupportedError:
            system.stop()  # the workload may still run
            raise

    def _watch_idle(self, systems: Sequence[SystemProcess]) -> dict[str, float]:
        present = [system for system in systems if system.reaper is not None]
        before = [system.cpu_time() for system in present]
        time.sleep(self._extent.idle)
        return {
            system.name: max(0.0, system.cpu_time() - was) / self._extent.idle
            for system, was in zip(present, before, strict=True)
        }
