"""Very many waiting tasks: what they weigh, and how long they hold the loop.

Run as a program, so that the memory is its own:
`python -m benchmarks.backlog ENVIRONMENT COUNT [collected]` prints what it found as
JSON. A task at a gate holds the node's only CPU, and all others wait behind it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import uvloop

from benchmarks.environments import ENVIRONMENTS
from benchmarks.port import Environment, Need, UnsupportedError
from benchmarks.probe import Hold, Probe, settle
from benchmarks.tasks import noop, wait_at_gate

PORTION: Final = 1_000
"""Calls that the user makes in one turn of the loop."""
PART: Final = 10
"""One in so many is cancelled, or finishes."""


class Backlog:
    """As many tasks as asked for, waiting; each stage leaves it as it was."""

    def __init__(self, environment: Environment, count: int) -> None:
        self._environment = environment
        self._count = count
        # Made before any memory is looked at: the list is the user's.
        self._handles: list[asyncio.Future[None] | None] = [None] * count
        self._probe = Probe()
        self.holds: dict[str, Hold] = {}
        self.weight: dict[str, float] = {}

    async def fill(self) -> None:
        """Submit all, in portions; weigh them."""
        gc.collect()
        bytes_before, tracked_before = _resident(), len(gc.get_objects())
        with self._probe.watch() as hold:
            await self._submit(range(self._count))
            await settle()
        self.holds["submitting"] = hold
        self.weight["bytes"] = (_resident() - bytes_before) / self._count
        tracked = len(gc.get_objects()) - tracked_before
        self.weight["tracked"] = tracked / self._count

    async def _submit(self, places: range) -> None:
        call = self._environment.task(noop, Need())

        def submit(place: int) -> None:
            self._handles[place] = call(place)

        await self._in_portions(places, submit)

    async def _in_portions(
        self, places: range, call: Callable[[int], object], portion: int = PORTION
    ) -> None:
        for start in range(0, len(places), portion):
            self._probe.call(call, places[start : start + portion])
            await asyncio.sleep(0)

    async def ask(self) -> None:
        """Ask the system what runs and what waits."""
        with self._probe.watch() as hold:
            await self._environment.picture()
            await settle()
        self.holds["status"] = hold

    async def cancel(self, name: str, *, at_once: bool) -> None:
        """Cancel some, spread over all; in one turn of the loop or in portions."""
        places = range(0, self._count, PART)

        def cancel(place: int) -> None:
            handle = self._handles[place]
            assert handle is not None
            handle.cancel()

        with self._probe.watch() as hold:
            portion = len(places) if at_once else PORTION
            await self._in_portions(places, cancel, portion)
            await settle()
        self.holds[name] = hold
        with self._probe.watch():
            await self._submit(places)

    async def finish(self, gate: socket.socket) -> None:
        """Open the gate and let some finish."""
        # Those that were cancelled last have come back behind all others.
        waiting = [place for place in range(self._count) if place % PART]
        last = self._handles[waiting[self._count // PART - 1]]
        assert last is not None
        with self._probe.watch() as hold:
            gate.close()
            await last
        self.holds["finishing"] = hold

    async def close(self) -> None:
        """Shut down while all the others wait."""
        with self._probe.watch() as hold:
            await self._environment.close()
        self.holds["shutdown"] = hold


async def look(environment: Environment, count: int) -> dict[str, Any]:
    """All of it; gives what is printed."""
    await environment.open(num_cpus=1)
    try:
        await environment.picture()
        await environment.task(noop, Need())(0)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0aiogpu-benchmarks-{os.getpid()}")
            listener.listen()
            listener.setblocking(False)
            held = environment.task(wait_at_gate, Need())(os.getpid())
            gate, _ = await asyncio.get_running_loop().sock_accept(listener)
        backlog = Backlog(environment, count)
        start = perf_counter_ns()
        await backlog.fill()
        await backlog.ask()
        await backlog.cancel("cancelling at once", at_once=True)
        await backlog.cancel("cancelling in portions", at_once=False)
        await backlog.finish(gate)
        await held
        await backlog.close()
        whole = perf_counter_ns() - start
    finally:
        await environment.close()
    holds = {name: asdict(hold) for name, hold in backlog.holds.items()}
    return {"weight": backlog.weight, "holds": holds, "whole": whole}


def _resident() -> int:
    """Bytes of this process that are in memory; see proc_pid_statm(5)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def main(name: str, count: str, *options: str) -> None:
    """Look, print, and leave without tidying up a million handles."""
    if "collected" not in options:
        gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            found = runner.run(look(ENVIRONMENTS[name](), int(count)))
        except UnsupportedError as reason:
            found = {"unsupported": str(reason)}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
