"""A node of another process: calls through it, fairness among programs."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from time import monotonic
from typing import Any, Final

import aiogpu
from benchmarks import service as services
from benchmarks.floors import first_core, open_floor, pinned_to
from benchmarks.micro import rows
from benchmarks.micro.calls import beside_floor, gathered
from benchmarks.micro.rows import Goal, Row, Scale
from benchmarks.tasks import noop
from benchmarks.timing import one_at_a_time

LATENCY: Final = Goal(1.6, "x two-hop floor")
GATHERED: Final = Goal(0.3, "x floor", is_least=True)
FAIR: Final = Goal(0.95, "Jain's index", is_least=True)
PROGRAMS: Final = 4
IN_FLIGHT: Final = 64
"""Calls that each of them has under way."""


async def service(scale: Scale) -> list[Row]:
    """Awaited calls beside a relay's, gathered beside the floor's; four programs."""
    count = scale(20_000, 200)
    async with services.service("--num-cpus=2", "--num-gpus=1") as address:
        async with aiogpu.init(address=address, log_to_driver=False):
            call: Any = aiogpu.remote(noop).remote
            with pinned_to(first_core()):
                async with open_floor() as floor:
                    await one_at_a_time(floor.call, scale(500, 20))
                    alone = [await one_at_a_time(floor.call, scale(500, 20))]
            one = await beside_floor(call, open_floor("relay"), scale)
            async with open_floor() as floor:
                many = await gathered(floor.call, call, count, scale(5, 2))
        fault = rows.slow_floor(alone)
        return [
            rows.times("service: one call", "us", one, LATENCY, fault=fault),
            rows.rates("service: gathered", "calls/s", many, count, GATHERED),
            await _fairness(address, scale(50, 5) / 10),
        ]


async def _fairness(address: str, seconds: float) -> Row:
    words = sys.executable, "-m", __name__, address, f"{seconds}"
    programs = [
        await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        for _ in range(PROGRAMS)
    ]
    for program in programs:
        assert program.stdout is not None
        assert await program.stdout.readline() == b"ready\n"
    # They begin when their input ends.
    found = await asyncio.gather(*(each.communicate(b"") for each in programs))
    counts = [int(line) for line, _ in found]
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    note = f"calls in {seconds:g} s: {', '.join(map(str, counts))}"
    return Row(f"service: {PROGRAMS} programs", "Jain's index", jain, FAIR, note)


async def program(address: str, seconds: float) -> None:
    """Be one of several programs, which call for so long."""
    done = 0
    async with aiogpu.init(address=address, log_to_driver=False):
        call: Any = aiogpu.remote(noop).remote
        await call(1)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        until = monotonic() + seconds

        async def lane() -> None:
            nonlocal done
            while monotonic() < until:
                await call(1)
                done += 1

        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
        print(done, flush=True)


if __name__ == "__main__":
    aiogpu.run(program(sys.argv[1], float(sys.argv[2])))
