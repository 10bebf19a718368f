"""What does it cost that the node is another process, and do programs share it fairly?

Whatever the environment: a service of aiogpu's is started, and joined by this program
and by others.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import perf_counter_ns
from typing import Final

import aiogpu
from benchmarks.cores import one_core, running_on
from benchmarks.environments.aiogpu_node import service
from benchmarks.floor import open_floor
from benchmarks.method import Scale, all_at_once, alternate, one_at_a_time, percentile
from benchmarks.port import Call, Environment
from benchmarks.relay import open_relay
from benchmarks.rows import MS, Goal, Row, judge, latency_row, rate_row
from benchmarks.tasks import noop

LATENCY: Final = Goal(1.6, "x two-hop floor")
GATHERED: Final = Goal(0.3, "x floor", is_least=True)
FAIR: Final = Goal(0.95, "Jain's index", is_least=True)
ANSWER: Final = Goal(100, "ms")
RACERS: Final = 4
LOOKS: Final = 20
"""Times that the node is asked how it stands."""


async def measure(_environment: Environment, scale: Scale) -> list[Row]:
    """A call, many at once, four programs at once, and very many tasks that wait."""
    async with service("--num-cpus=2", "--num-gpus=1") as address:
        async with aiogpu.init(address=address, log_to_driver=False):
            call: Call[None] = aiogpu.remote(noop).remote
            one, many = await _one(call, scale), await _many(call, scale)
        rows = [one, many, await _fairness(address, scale)]
    async with service("--num-cpus=2", "--num-gpus=1") as address:
        return [*rows, await _crowd(address, scale)]


async def _one(call: Call[None], scale: Scale) -> Row:
    with running_on(one_core()):
        async with open_floor() as floor:
            known = [await one_at_a_time(floor.call, scale.calls) for _ in range(2)][1:]
    async with open_relay() as relay:
        pair = await alternate(
            partial(one_at_a_time, relay.call, scale.calls),
            partial(one_at_a_time, call, scale.calls),
            scale.blocks,
        )
    return latency_row("service: one call", pair, LATENCY, scale, known)


async def _many(call: Call[None], scale: Scale) -> Row:
    async with open_floor() as floor:
        pair = await alternate(
            partial(all_at_once, floor.call, scale.gathered),
            partial(all_at_once, call, scale.gathered),
            scale.gathers,
        )
    return rate_row("service: gathered", pair, scale.gathered, GATHERED, scale)


@asynccontextmanager
async def client(address: str, what: str, amount: float) -> AsyncIterator[Process]:
    """A program that has joined, and waits for the word to begin."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.service_client"),
        *(address, what, f"{amount}"),
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


async def _fairness(address: str, scale: Scale) -> Row:
    seconds = 5.0 if scale.is_judged else 0.5
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        racers = [await enter(client(address, "race", seconds)) for _ in range(RACERS)]
        counts = await asyncio.gather(*map(_begin, racers))
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    return Row(
        f"service: {RACERS} programs",
        "Jain's index",
        judge(jain, FAIR, scale),
        p50=jain,
        note=f"calls in {seconds:g} s: {', '.join(map(str, counts))}",
        goal=str(FAIR),
    )


async def _crowd(address: str, scale: Scale) -> Row:
    programs, each = (64, 10_000) if scale.is_judged else (4, 100)
    samples = []
    async with (
        aiogpu.init(address=address, log_to_driver=False),
        aiogpu.lease(num_gpus=1),
        AsyncExitStack() as stack,
    ):
        crowd = [
            await stack.enter_async_context(client(address, "wait", each))
            for _ in range(programs)
        ]
        assert sum(await asyncio.gather(*map(_begin, crowd))) == programs * each
        status = await aiogpu.status()
        assert status.waiting_count == programs * each, status.waiting_count
        for _ in range(LOOKS):
            start = perf_counter_ns()
            await aiogpu.status()
            samples.append(perf_counter_ns() - start)
    p50 = percentile([samples], 50) / MS
    return Row(
        f"service: status, {programs} x {each} waiting",
        "ms",
        judge(p50, ANSWER, scale),
        p50=p50,
        p99=percentile([samples], 99) / MS,
        goal=str(ANSWER),
        samples=[samples],
    )
