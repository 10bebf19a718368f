"""What is looked at all the time, and what is weighed at each rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from benchmarks.soak.box import Box
from benchmarks.soak.growth import Series
from benchmarks.soak.processes import counted, descriptors, own_memory
from benchmarks.soak.record import Record
from benchmarks.soak.sockets import listening, of_the_internet

LOOK_EVERY: Final = 1.0
MEMORY: Final = 24 << 20
"""Bytes by which a process may grow for reasons of its own: its allocator's pools."""
BOUNDS: Final[dict[str, float]] = {
    "memory": MEMORY,
    # A keeper and a worker more or less may be kept for what comes next.
    "descriptors": 60,
    "processes": 20,
    "segments": 8,
}
NO_INTERNET: Final = "no process has a socket of the internet's"
OWN_DIRECTORY: Final = "who listens does so in the node's own directory"


class Watch:
    """Of one box and the process in which its node lives."""

    def __init__(self, box: Box, what: str, record: Record) -> None:
        self._box = box
        self._what = what
        self._record = record
        self._series = {measure: Series() for measure in BOUNDS}
        self.most_spilled = 0
        self.latest = ""

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY)

    def look(self) -> None:
        """Once."""
        found = self._box.processes()
        pids = [process.pid for process in found]
        self._record.look(NO_INTERNET, of_the_internet(pids))
        strange = [
            path
            for path in listening(pids)
            if not path.startswith(f"{self._box.runtime}/")
        ]
        self._record.look(OWN_DIRECTORY, strange)
        spilled = sum(
            "/spill/" in target for pid in pids for target in descriptors(pid)
        )
        self.most_spilled = max(self.most_spilled, spilled)
        self.latest = ", ".join(f"{n} {part}" for part, n in counted(found).items())

    def weigh(self, pid: int) -> dict[str, float]:
        """The process of the node, and all others of its box, while it rests."""
        held = descriptors(pid)
        sample = {
            "memory": float(own_memory(pid)),
            "descriptors": float(len(held)),
            "processes": float(len(self._box.processes())),
            "segments": float(_segments(held)),
        }
        for measure, value in sample.items():
            self._series[measure].samples.append(value)
        return sample

    def judge(self) -> None:
        """Claim that nothing has grown."""
        for measure, series in self._series.items():
            if series.is_enough:
                told = f"{series.growth:g} more: {series.samples}"
                is_flat = series.growth <= BOUNDS[measure]
                self._record.check(f"{self._what}: {measure} flat", is_flat, told)
        last = {name: series.samples[-1:] for name, series in self._series.items()}
        figures = Counter({name: int(*value) for name, value in last.items() if value})
        figures["memory"] >>= 20
        figures["spilled at once"] = self.most_spilled
        self._record.add(f"{self._what}, at its last rest", figures)


def _segments(held: list[str]) -> int:
    return sum("memfd:aiogpu" in target or "/spill/" in target for target in held)
