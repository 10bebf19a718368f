"""Calls of functions and actors, awaited and gathered; streams; batches; maps."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from ctypes import CDLL
from functools import partial
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

import aiogpu
from benchmarks.floors import first_core, open_floor, open_floor_apart, pinned_to
from benchmarks.micro.rows import (
    Goal,
    Row,
    Scale,
    figure_row,
    rate_row,
    slow_floor,
    time_row,
)
from benchmarks.processes import status_bytes
from benchmarks.tasks import (
    Interleaved,
    Plain,
    batch_in_thread,
    batch_on_loop,
    busy,
    busy_each,
    noop,
    numbers,
    numbers_async,
)
from benchmarks.timing import Block, Call, Pair, all_at_once, alternate, one_at_a_time

STREAM: Final = Goal(50_000, "items/s", is_least=True)
BATCHED: Final = Goal(0.85, "x by hand", is_least=True)
BATCH: Final = 32
CLIENTS: Final = 2 * BATCH
"""So that while a batch runs as many wait as make another."""
MAPPED: Final = Goal(1.5, "x by hand")
CHUNK: Final = 400
"""Items of a chunk by hand: 4 ms of work."""
FLAT: Final = Goal(16, "MiB")
MIB: Final = 1 << 20


async def task(**options: Any) -> Call:
    """Return `f.remote` of a function that does nothing."""
    remote: Any = aiogpu.remote(noop)
    call: Call = (remote.options(**options) if options else remote).remote
    return call


async def method(cls: Any) -> Call:
    """Return the method of a new actor, which lives as long as the method is held."""
    call: Call = (await aiogpu.remote(cls).remote()).noop.remote
    return call


class Target(NamedTuple):
    """Something to call.

    Attributes:
        make: returns the call, on an open node.
        floor: kind of the floor.
        awaited: goal of the ratio of awaited calls.
        gathered: goal of the ratio of gathered calls.
    """

    make: Callable[[], Awaitable[Call]]
    floor: str
    awaited: Goal
    gathered: Goal | None


AWAITED, ACTORS_AWAITED = Goal(1.6, "x floor"), Goal(1.5, "x floor")
GATHERED = Goal(0.4, "x floor", is_least=True)
ACTORS_GATHERED = Goal(0.5, "x floor", is_least=True)
TARGETS: Final = {
    "task": Target(task, "blocking", AWAITED, GATHERED),
    "quarter GPU": Target(
        partial(task, num_gpus=0.25, max_calls=0), "blocking", AWAITED, GATHERED
    ),
    "actor": Target(
        partial(method, Plain), "blocking", ACTORS_AWAITED, ACTORS_GATHERED
    ),
    "actor's coroutine": Target(
        partial(method, Interleaved), "coroutine", ACTORS_AWAITED, None
    ),
}


async def latency(scale: Scale) -> list[Row]:
    """Warm calls that do nothing, awaited one at a time.

    With the floor's worker on another core than the driver; and with all on one core.
    """
    rows: list[Row] = []
    for name, target in TARGETS.items():
        with pinned_to(first_core()):
            alone = await _awaited(target, open_floor(target.floor), scale)
        apart = await _awaited(target, open_floor_apart(target.floor), scale)
        # Whether the machine was quiet is told by the floor on one core.
        if target.floor == "blocking":
            fault = slow_floor(alone.floor)
        goal = target.awaited
        rows += [
            time_row(f"latency: {name}", "us", apart, goal, scale, fault=fault),
            time_row(
                f"latency: {name}, one core", "us", alone, goal, scale, fault=fault
            ),
        ]
    return rows


async def _awaited(
    target: Target, floor: AbstractAsyncContextManager[Any], scale: Scale
) -> Pair:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        return await beside_floor(await target.make(), floor, scale)


async def beside_floor(
    call: Call, floor: AbstractAsyncContextManager[Any], scale: Scale
) -> Pair:
    """Calls awaited one at a time, in turn with the floor's; ends the floor."""
    async with floor as opened:
        return await alternate(
            partial(one_at_a_time, opened.call, scale(500, 20)),
            partial(one_at_a_time, call, scale(500, 20)),
            scale(40, 2),
        )


async def gathered_beside(floor: Call, call: Call, scale: Scale) -> Pair:
    """Calls that are all made before the first is awaited, in turn with the floor's."""
    count = scale(20_000, 200)
    return await alternate(
        partial(all_at_once, floor, count),
        partial(all_at_once, call, count),
        scale(5, 2),
    )


async def throughput(scale: Scale) -> list[Row]:
    """Calls that do nothing, 20 000 gathered, beside the floor's with one worker.

    Two workers serve the tasks: two quarters of a GPU fit as well, since each takes a
    CPU besides.
    """
    rows = []
    for name, target in TARGETS.items():
        async with aiogpu.init(num_cpus=2, num_gpus=1):
            call = await target.make()
            async with open_floor() as floor:
                pair = await gathered_beside(floor.call, call, scale)
            del call
        goal, count = target.gathered, scale(20_000, 200)
        rows.append(
            rate_row(f"throughput: {name}", "calls/s", pair, count, goal, scale)
        )
    return rows


async def streams(scale: Scale) -> list[Row]:
    """Small items of a generator with the default window, beside a bare sender."""
    rows, count = [], scale(100_000, 500)
    async with aiogpu.init(num_cpus=1), open_floor("stream") as floor:
        for name, generator in (("plain", numbers), ("coroutine", numbers_async)):
            start: Any = aiogpu.remote(generator).remote

            async def consume(start: Any = start) -> Block:
                began, found = perf_counter_ns(), 0
                async for _ in start(count):
                    found += 1
                block = [perf_counter_ns() - began]
                assert found == count, (found, count)
                return block

            async def receive() -> Block:
                began = perf_counter_ns()
                await floor.items(count)
                return [perf_counter_ns() - began]

            pair = await alternate(receive, consume, scale(5, 2))
            rows.append(
                rate_row(
                    f"streams: {name}",
                    "items/s",
                    pair,
                    count,
                    STREAM,
                    scale,
                    absolute=True,
                )
            )
    return rows


class Batching:
    """An actor with a plain method and one under `batch`; each batch takes 1 ms."""

    async def on_loop(self, numbers: list[int]) -> list[int]:
        return await batch_on_loop(numbers)

    async def in_thread(self, numbers: list[int]) -> list[int]:
        return await batch_in_thread(numbers)

    batched_on_loop = aiogpu.batch(max_size=BATCH)(on_loop)
    batched_in_thread = aiogpu.batch(max_size=BATCH)(in_thread)


async def batching(scale: Scale) -> list[Row]:
    """Single calls gathered by `batch`, beside lists of 32 passed by hand.

    64 clients call again and again; a batch takes 1 ms, on the loop or in a thread; in
    this process, and in an actor, to which each call is sent by itself.
    """
    ways: list[tuple[str, Any, Any]] = [
        (where, function, aiogpu.batch(max_size=BATCH)(function))
        for where, function in (
            ("on the loop", batch_on_loop),
            ("in a thread", batch_in_thread),
        )
    ]
    async with aiogpu.init(num_cpus=2):
        actor: Any = await aiogpu.remote(Batching).remote()
        ways += [
            (
                "in an actor, on the loop",
                actor.on_loop.remote,
                actor.batched_on_loop.remote,
            ),
            (
                "in an actor, in a thread",
                actor.in_thread.remote,
                actor.batched_in_thread.remote,
            ),
        ]
        return [await _batched(*way, scale) for way in ways]


async def _batched(where: str, by_hand: Any, by_item: Any, scale: Scale) -> Row:
    count = scale(20_000, 200)

    async def lists() -> Block:
        start = perf_counter_ns()
        for first in range(0, count, BATCH):
            items = list(range(first, min(first + BATCH, count)))
            assert await by_hand(items) == items
        return [perf_counter_ns() - start]

    async def client(items: Iterator[int]) -> None:
        for item in items:
            assert await by_item(item) == item

    async def clients() -> Block:
        items, start = iter(range(count)), perf_counter_ns()
        await asyncio.gather(*(client(items) for _ in range(CLIENTS)))
        return [perf_counter_ns() - start]

    pair = await alternate(lists, clients, scale(5, 2))
    name = f"batching: {where}"
    return rate_row(name, "calls/s", pair, count, BATCHED, scale, lowest=0)


async def mapping(scale: Scale) -> list[Row]:
    """`f.map(items, chunk="auto")` of 10 us each, beside chunks of 400 made by hand."""
    count, growths = scale(1_000_000, 2_000), []
    expected = sum(range(count))
    by_hand, by_map = aiogpu.remote(busy_each), aiogpu.remote(busy)

    async def lists() -> Block:
        start = perf_counter_ns()
        chunks = await asyncio.gather(
            *(
                by_hand.remote(list(range(first, min(first + CHUNK, count))))
                for first in range(0, count, CHUNK)
            )
        )
        found = sum(number for chunk in chunks for number in chunk)
        block = [perf_counter_ns() - start]
        assert found == expected, found
        return block

    async def mapped() -> Block:
        found = before = 0
        gc.collect()
        CDLL(None).malloc_trim(0)  # free memory goes back, so that growth is seen
        start = perf_counter_ns()
        async for number in by_map.map(range(count), chunk="auto"):
            found += number
            if number == count // 10:
                before = status_bytes("RssAnon")
        block = [perf_counter_ns() - start]
        growths.append(status_bytes("RssAnon") - before)
        assert found == expected, found
        return block

    async with aiogpu.init(num_cpus=2):
        pair = await alternate(lists, mapped, scale(3, 1))
    note = "grown from the first tenth of the items to the last, at most"
    growth = max(growths[1:]) / MIB
    return [
        time_row("map: 10 us an item", "us", pair, MAPPED, scale, calls=count),
        figure_row("map: memory of the driver", "MiB", growth, FLAT, scale, note),
    ]
