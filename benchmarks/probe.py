"""How long is the event loop held? A chain of `call_soon` that looks at each turn.

What the user's own code takes in a turn is subtracted, but not what a single call
takes that it makes: of a thousand short calls the user decides, of a long one not.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Final

SETTLES: Final = 200_000_000
"""Nanoseconds for which the loop is watched on, for what was put off."""


@dataclass(slots=True)
class Hold:
    """What was seen of one stretch of the loop's life. Nanoseconds.

    Attributes:
        longest: the loop's longest turn without the user's code, or the user's
            longest single call, whichever is longer.
        on_cpu: how much of that this thread was running.
        collecting: how much the garbage collector took at most, in one go.
        calls: what the user's calls took together.
        whole: the stretch.
    """

    longest: int = 0
    on_cpu: int = 0
    collecting: int = 0
    calls: int = 0
    whole: int = 0

    def note(self, wall: int, on_cpu: int) -> None:
        """Keep the longest."""
        if wall > self.longest:
            self.longest, self.on_cpu = wall, on_cpu


class Probe:
    """Watches the running loop, one stretch at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hold: Hold | None = None
        self._turn = self._turn_on_cpu = 0
        self._collection = 0

    @contextmanager
    def watch(self) -> Iterator[Hold]:
        """Watch the loop until the block ends."""
        hold = self._hold = Hold()
        gc.callbacks.append(self._on_collector)
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
            gc.callbacks.remove(self._on_collector)

    def _tick(self, hold: Hold) -> None:
        if self._hold is not hold:
            return
        now, on_cpu = perf_counter_ns(), thread_time_ns()
        hold.note(now - self._turn, on_cpu - self._turn_on_cpu)
        self._loop.call_soon(self._tick, hold)
        self._turn, self._turn_on_cpu = now, on_cpu

    def _on_collector(self, phase: str, _info: dict[str, int]) -> None:
        now = perf_counter_ns()
        if phase == "start":
            self._collection = now
        elif self._hold is not None:
            took = now - self._collection
            self._hold.collecting = max(self._hold.collecting, took)

    def call(self, call: Callable[[int], object], numbers: range) -> None:
        """The user's code: a call for each number, all in one turn of the loop."""
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


async def settle() -> None:
    """Let the loop turn on for a moment."""
    until = perf_counter_ns() + SETTLES
    while perf_counter_ns() < until:  # noqa: ASYNC110 - the turns are what is wanted
        await asyncio.sleep(0)
