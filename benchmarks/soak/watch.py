"""What is looked at all the time, and what is weighed at each rest."""

from __future__ import annotations

import asyncio
from typing import Final

from benchmarks.processes import (
    count_parts,
    descriptors,
    internet_sockets,
    listening,
    status_bytes,
)
from benchmarks.soak.box import Box
from benchmarks.soak.growth import Series
from benchmarks.soak.record import Record

LOOK_EVERY: Final = 1.0
MEMORY: Final = "MiB of its own"
DESCRIPTORS: Final = "descriptors"
PROCESSES: Final = "processes"
SEGMENTS: Final = "segments"
BOUNDS: Final[dict[str, float]] = {
    # What has run where (20 000 spans) and what was declared (2048 sites) is kept, and
    # takes a while to fill; the allocator's pools grow for reasons of their own.
    MEMORY: 16,
    # A keeper and a worker more or less may be kept for what comes next.
    DESCRIPTORS: 60,
    PROCESSES: 20,
    # The pool of warm segments holds 14 to 31 of them from one rest to the next, and
    # with the six samples of a short run medians of two thirds differ by up to 13.
    SEGMENTS: 16,
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
        self._record.look(NO_INTERNET, internet_sockets(pids))
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
        self.latest = ", ".join(f"{n} {part}" for part, n in count_parts(found).items())

    def weigh(self, pid: int) -> None:
        """The process of the node, and all others of its box, while it rests."""
        held = descriptors(pid)
        sample = {
            MEMORY: status_bytes("RssAnon", pid) / (1 << 20),
            DESCRIPTORS: float(len(held)),
            PROCESSES: float(len(self._box.processes())),
            SEGMENTS: float(_segments(held)),
        }
        for measure, value in sample.items():
            self._series[measure].samples.append(round(value, 1))

    def judge(self) -> None:
        """Claim that nothing has grown, and that values were spilled."""
        for measure, series in self._series.items():
            what = f"{self._what}, at its rests: {measure}"
            self._record.series[what] = series.samples
            if series.is_enough:
                told = f"{series.growth:g} more: {series.samples}"
                is_flat = series.growth <= BOUNDS[measure]
                self._record.check(f"{self._what}: {measure} flat", is_flat, told)
        self._record.add(f"{self._what}: spilled", {"at once": self.most_spilled})


def _segments(held: list[str]) -> int:
    return sum("memfd:aiogpu" in target or "/spill/" in target for target in held)
