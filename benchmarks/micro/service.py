"""A node of another process: calls through it, fairness among programs, its status."""

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
    plain_row,
    rate_row,
    slow_floor,
    time_row,
)
from benchmarks.tasks import noop
from benchmarks.timing import one_at_a_time, timed

LATENCY: Final = Goal(1.6, "x two-hop floor")
GATHERED: Final = Goal(0.3, "x floor", is_least=True)
FAIR: Final = Goal(0.95, "Jain's index", is_least=True)
ANSWER: Final = Goal(100, "ms")
PROGRAMS: Final = 4
IN_FLIGHT: Final = 64
"""Calls that each of them has under way."""
QUERIES: Final = 20


async def service(scale: Scale) -> list[Row]:
    """Awaited calls beside a relay's, gathered ones beside the floor's; sharing.

    Sharing: four programs at once; and `status` while 64 programs have 10 000 waiting
    tasks each.
    """
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
        rows = [
            time_row("service: one call", "us", one, LATENCY, scale, fault=fault),
            rate_row("service: gathered", "calls/s", many, count, GATHERED, scale),
            await _fairness(address, scale),
        ]
    async with services.service("--num-cpus=2", "--num-gpus=1") as address:
        return [*rows, await _status(address, scale)]


async def _fairness(address: str, scale: Scale) -> Row:
    seconds = 0.5 if scale.is_quick else 5.0
    async with AsyncExitStack() as stack:
        counts = await _all_programs(stack, address, PROGRAMS, "call", seconds)
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    note = f"calls in {seconds:g} s: {', '.join(map(str, counts))}"
    name = f"service: {PROGRAMS} programs"
    return figure_row(name, "Jain's index", jain, FAIR, scale, note)


async def _status(address: str, scale: Scale) -> Row:
    programs, each = scale(64, 4), scale(10_000, 100)
    async with (
        aiogpu.init(address=address, log_to_driver=False),
        aiogpu.lease(num_gpus=1),
        AsyncExitStack() as stack,
    ):
        counts = await _all_programs(stack, address, programs, "wait", each)
        waiting = (await aiogpu.status()).waiting_count
        assert sum(counts) == programs * each == waiting, (counts, waiting)
        blocks = [await timed(aiogpu.status) for _ in range(QUERIES)]
    name = f"service: status, {programs} x {each} waiting"
    return plain_row(name, blocks, ANSWER, scale)


async def _all_programs(
    stack: AsyncExitStack, address: str, count: int, what: str, amount: float
) -> list[int]:
    """Start programs, then let all of them begin; return what each counts."""
    programs = [
        await stack.enter_async_context(_program(address, what, amount))
        for _ in range(count)
    ]
    return await asyncio.gather(*map(_begin, programs))


@asynccontextmanager
async def _program(address: str, what: str, amount: float) -> AsyncIterator[Process]:
    """Start a program that joins the node and waits for a line to begin."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, address, what, f"{amount}"),
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


async def program(address: str, what: str, amount: float) -> None:
    """Be one of several programs: `call` for so long, or have so many tasks `wait`."""
    read = partial(asyncio.get_running_loop().run_in_executor, None)
    async with aiogpu.init(address=address, log_to_driver=False):
        if what == "call":
            await aiogpu.remote(noop).remote(1)
        await aiogpu.cluster_resources()
        print("ready", flush=True)
        await read(sys.stdin.readline)
        if what == "call":
            print(await _count_calls(amount), flush=True)
        else:
            # They never run: the GPU is leased.
            wait: Any = aiogpu.remote(num_gpus=1)(noop).remote
            handles = [wait(number) for number in range(int(amount))]
            await aiogpu.cluster_resources()  # the node has received all of them
            print(len(handles), flush=True)
        await read(sys.stdin.read)


if __name__ == "__main__":
    aiogpu.run(program(sys.argv[1], sys.argv[2], float(sys.argv[3])))
