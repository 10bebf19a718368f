"""A node of another process: calls through it, fairness among programs."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, Final

import aiogpu
from benchmarks import service as services
from benchmarks.floors import first_core, open_floor, pinned_to
from benchmarks.micro.calls import beside_floor, gathered_beside
from benchmarks.micro.rows import (
    Goal,
    Row,
    Scale,
    figure_row,
    rate_row,
    slow_floor,
    time_row,
)
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
    async with services.service("--num-cpus=2", "--num-gpus=1") as address:
        async with aiogpu.init(address=address, log_to_driver=False):
            call: Any = aiogpu.remote(noop).remote
            with pinned_to(first_core()):
                async with open_floor() as floor:
                    await one_at_a_time(floor.call, scale(500, 20))
                    alone = [await one_at_a_time(floor.call, scale(500, 20))]
            one = await beside_floor(call, open_floor("relay"), scale)
            async with open_floor() as floor:
                many = await gathered_beside(floor.call, call, scale)
        fault, count = slow_floor(alone), scale(20_000, 200)
        return [
            time_row("service: one call", "us", one, LATENCY, scale, fault=fault),
            rate_row("service: gathered", "calls/s", many, count, GATHERED, scale),
            await _fairness(address, scale),
        ]


async def _fairness(address: str, scale: Scale) -> Row:
    seconds = 0.5 if scale.is_quick else 5.0
    async with AsyncExitStack() as stack:
        programs = [
            await stack.enter_async_context(_program(address, seconds))
            for _ in range(PROGRAMS)
        ]
        counts = await asyncio.gather(*map(_begin, programs))
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    note = f"calls in {seconds:g} s: {', '.join(map(str, counts))}"
    name = f"service: {PROGRAMS} programs"
    return figure_row(name, "Jain's index", jain, FAIR, scale, note)


@asynccontextmanager
async def _program(address: str, seconds: float) -> AsyncIterator[Process]:
    """Start a program that joins the node and waits for a line to begin."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, address, f"{seconds}"),
        stdin=PIPE,
        stdout=PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    try:
        yield process
    finally:
        process.stdin.close()
        await process.wait()


async def _begin(process: Process) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    return int(await process.stdout.readline())


async def _count_calls(seconds: float) -> int:
    """Return how many calls have ended after so long."""
    until, done = monotonic() + seconds, 0
    call: Any = aiogpu.remote(noop).remote

    async def lane() -> None:
        nonlocal done
        while monotonic() < until:
            await call(1)
            done += 1

    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    return done


async def program(address: str, seconds: float) -> None:
    """Be one of several programs, which call for so long."""
    read = partial(asyncio.get_running_loop().run_in_executor, None)
    async with aiogpu.init(address=address, log_to_driver=False):
        await aiogpu.remote(noop).remote(1)
        print("ready", flush=True)
        await read(sys.stdin.readline)
        print(await _count_calls(seconds), flush=True)
        await read(sys.stdin.read)


if __name__ == "__main__":
    aiogpu.run(program(sys.argv[1], float(sys.argv[2])))
