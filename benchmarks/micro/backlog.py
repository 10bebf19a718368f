"""A million waiting tasks: their memory, and how long they block the event loop.

Runs as a program, to have memory of its own: `python -m benchmarks.micro.backlog COUNT`
prints the measurements as JSON. One task holds the node's only CPU, and all others wait
behind it. The garbage collector is off: the user decides when it runs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any, Final

import uvloop

import aiogpu
from benchmarks import tasks
from benchmarks.latch import connected, open_latch
from benchmarks.micro.rows import BUSY, MS, Goal, Row, Scale
from benchmarks.micro.start import run_python
from benchmarks.processes import status_bytes

LONGEST: Final = Goal(20, "ms")
HEAVIEST: Final = Goal(1024, "bytes")
PORTION: Final = 1_000
"""Calls that the user's code makes in one turn of the loop."""
PART: Final = 10
"""One task in ten is cancelled, or finishes."""
SETTLING: Final = 200_000_000
"""Nanoseconds for which the loop is watched longer, since work may be deferred."""


async def backlog(scale: Scale) -> list[Row]:
    """A million waiting tasks: memory of each, and the longest hold of the loop."""
    count = scale(1_000_000, 2_000)
    return rows_of(json.loads(run_python("-m", __name__, f"{count}")), count)


def rows_of(measured: dict[str, Any], count: int) -> list[Row]:
    """Return the rows of the program's output."""
    name, note = "backlog: memory of a waiting task", "its handle included"
    rows = [Row(name, "bytes", measured["bytes"], HEAVIEST, note)]
    for stage, hold in measured["holds"].items():
        longest, on_cpu = hold["longest"] / MS, hold["on_cpu"] / MS
        fault = ""
        if not LONGEST.admits(longest) and LONGEST.admits(on_cpu):
            # If aiogpu's own code waited, a quiet machine would show this as well.
            fault = f"the thread ran for {on_cpu:.1f} ms of these; {BUSY}"
        note = f"{hold['whole'] / MS:,.0f} ms in all"
        if hold["calls"]:
            calls = count if stage == "submitting" else count // PART
            note = f"{hold['calls'] / calls / 1e3:.1f} us a call"
        note = f"on CPU {on_cpu:.1f} ms; {note}"
        rows.append(Row(f"backlog: {stage}", "ms held", longest, LONGEST, note, fault))
    return rows


@dataclass(slots=True)
class Hold:
    """One stretch of the loop's life, in nanoseconds.

    Attributes:
        longest: the loop's longest turn without the user's code, or the user's longest
            single call, whichever is longer.
        on_cpu: time within `longest` in which this thread ran.
        calls: total time of the user's calls.
        whole: the stretch.
    """

    longest: int = 0
    on_cpu: int = 0
    calls: int = 0
    whole: int = 0

    def note(self, wall: int, on_cpu: int) -> None:
        """Keep the longest turn or call."""
        if wall > self.longest:
            self.longest, self.on_cpu = wall, on_cpu


class LoopMonitor:
    """Watches the running loop by a chain of `call_soon`, one stretch at a time.

    The time of the user's code in a turn is subtracted, since the user decides how many
    calls to make. A single call counts by itself: its time is aiogpu's.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hold: Hold | None = None
        self._turn = self._turn_on_cpu = 0

    @contextmanager
    def watch(self) -> Iterator[Hold]:
        """Watch the loop until the block ends."""
        hold = self._hold = Hold()
        start = self._turn = perf_counter_ns()
        self._turn_on_cpu = thread_time_ns()
        ticking = self._loop.call_soon(self._tick, hold)
        try:
            yield hold
        finally:
            self._tick(hold)
            hold.whole = perf_counter_ns() - start
            self._hold = None
            ticking.cancel()

    def _tick(self, hold: Hold) -> None:
        if self._hold is not hold:
            return
        now, on_cpu = perf_counter_ns(), thread_time_ns()
        hold.note(now - self._turn, on_cpu - self._turn_on_cpu)
        self._loop.call_soon(self._tick, hold)
        self._turn, self._turn_on_cpu = now, on_cpu

    def call(self, call: Callable[[int], object], numbers: range) -> None:
        """Make a call for each number as the user's code, in one turn of the loop."""
        hold = self._hold
        assert hold is not None, "watch first"
        start, start_on_cpu = perf_counter_ns(), thread_time_ns()
        for number in numbers:
            before, before_on_cpu = perf_counter_ns(), thread_time_ns()
            call(number)
            took = perf_counter_ns() - before
            hold.calls += took
            hold.note(took, thread_time_ns() - before_on_cpu)
        self._turn += perf_counter_ns() - start
        self._turn_on_cpu += thread_time_ns() - start_on_cpu

    async def call_in_portions(
        self, call: Callable[[int], object], numbers: range, portion: int = PORTION
    ) -> None:
        """Make the calls as the user's code, `portion` of them in each turn."""
        for start in range(0, len(numbers), portion):
            self.call(call, numbers[start : start + portion])
            await asyncio.sleep(0)


async def settle() -> None:
    """Let the loop run for a moment."""
    until = perf_counter_ns() + SETTLING
    while perf_counter_ns() < until:  # noqa: ASYNC110 - each turn is measured
        await asyncio.sleep(0)


async def measure(count: int) -> dict[str, Any]:
    """Fill the node with waiting tasks; return the measurements of each stage."""
    # The list belongs to the user, so it is made before any memory is measured.
    handles: list[Any] = [None] * count
    holds: dict[str, Hold] = {}
    monitor, call = LoopMonitor(), aiogpu.remote(tasks.noop).remote

    def submit(place: int) -> None:
        handles[place] = call(place)

    def cancel(place: int) -> None:
        handles[place].cancel()

    async def cancel_some(stage: str, portion: int) -> None:
        places = range(0, count, PART)
        with monitor.watch() as holds[stage]:
            await monitor.call_in_portions(cancel, places, portion)
            await settle()
        with monitor.watch():
            await monitor.call_in_portions(submit, places)

    async with aiogpu.init(num_cpus=1) as session:
        await aiogpu.status()
        await call(0)
        with open_latch() as latch:
            first = aiogpu.remote(tasks.wait_for_release).remote(os.getpid())
            running = await connected(latch)
        gc.collect()
        before = status_bytes("VmRSS")
        with monitor.watch() as holds["submitting"]:
            await monitor.call_in_portions(submit, range(count))
            await settle()
        weight = (status_bytes("VmRSS") - before) / count
        with monitor.watch() as holds["status"]:
            await aiogpu.status()
            await settle()
        await cancel_some("cancelling at once", count)
        await cancel_some("cancelling in portions", PORTION)
        # Tasks that were cancelled were submitted again, behind all others.
        waiting = [place for place in range(count) if place % PART]
        with monitor.watch() as holds["finishing"]:
            running.close()
            await handles[waiting[count // PART - 1]]
        await first
        with monitor.watch() as holds["shutdown"]:
            await session.shutdown()
    return {
        "bytes": weight,
        "holds": {name: asdict(hold) for name, hold in holds.items()},
    }


if __name__ == "__main__":
    gc.disable()
    print(json.dumps(uvloop.run(measure(int(sys.argv[1])))), flush=True)
    os._exit(0)  # without freeing a million handles
