"""Calls of functions and actors, awaited and gathered; streams; batches; maps; Ray."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from ctypes import CDLL
from functools import partial
from typing import Any, Final, NamedTuple

import aiogpu
from benchmarks import tasks, timing
from benchmarks.floors import first_core, open_floor, open_floor_apart, pinned_to
from benchmarks.micro import rows
from benchmarks.micro.rows import Goal, Row, Scale
from benchmarks.processes import status_bytes
from benchmarks.timing import Block, Call, Pair

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
ON_RAY: Final = Goal(1.15, "x Ray's own")


async def task(**options: Any) -> Call:
    """Return `f.remote` of a function that does nothing."""
    remote: Any = aiogpu.remote(tasks.noop)
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


OF_TASKS = Goal(1.6, "x floor"), Goal(0.4, "x floor", is_least=True)
OF_ACTORS = Goal(1.5, "x floor"), Goal(0.5, "x floor", is_least=True)
QUARTER: Final = partial(task, num_gpus=0.25, max_calls=0)
TARGETS: Final = {
    "task": Target(task, "blocking", *OF_TASKS),
    "quarter GPU": Target(QUARTER, "blocking", *OF_TASKS),
    "actor": Target(partial(method, tasks.Plain), "blocking", *OF_ACTORS),
    "actor's coroutine": Target(
        partial(method, tasks.Interleaved), "coroutine", OF_ACTORS[0], None
    ),
}


async def latency(scale: Scale) -> list[Row]:
    """Warm calls that do nothing, awaited one at a time.

    With the floor's worker on another core than the driver; and with all on one core.
    """
    found: list[Row] = []
    fault = ""
    for name, target in TARGETS.items():
        with pinned_to(first_core()):
            alone = await _awaited(target, open_floor(target.floor), scale)
        apart = await _awaited(target, open_floor_apart(target.floor), scale)
        # Whether the machine was quiet is told by the floor on one core.
        if target.floor == "blocking":
            fault = rows.slow_floor(alone.floor)
        for where, pair in (("", apart), (", one core", alone)):
            name_here, goal = f"latency: {name}{where}", target.awaited
            found.append(rows.times(name_here, "us", pair, goal, fault=fault))
    return found


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
        return await one_by_one(opened.call, call, scale(500, 20), scale(40, 2))


async def one_by_one(floor: Call, call: Call, calls: int, blocks: int) -> Pair:
    """Calls awaited one at a time, in turn with others."""
    return await timing.alternate(
        partial(timing.one_at_a_time, floor, calls),
        partial(timing.one_at_a_time, call, calls),
        blocks,
    )


async def gathered(floor: Call, call: Call, calls: int, blocks: int) -> Pair:
    """Calls that are all made before the first is awaited, in turn with others."""
    return await timing.alternate(
        partial(timing.all_at_once, floor, calls),
        partial(timing.all_at_once, call, calls),
        blocks,
    )


async def throughput(scale: Scale) -> list[Row]:
    """Calls that do nothing, 20 000 gathered, beside the floor's with one worker.

    Two workers serve the tasks: two quarters of a GPU fit as well, since each takes a
    CPU besides.
    """
    found, count = [], scale(20_000, 200)
    for name, target in TARGETS.items():
        async with aiogpu.init(num_cpus=2, num_gpus=1), open_floor() as floor:
            call = await target.make()
            pair = await gathered(floor.call, call, count, scale(5, 2))
            del call
        row = f"throughput: {name}"
        found.append(rows.rates(row, "calls/s", pair, count, target.gathered))
    return found


async def streams(scale: Scale) -> list[Row]:
    """Small items of a generator with the default window, beside a bare sender."""
    found, count = [], scale(100_000, 500)
    kinds = {"plain": tasks.numbers, "coroutine": tasks.numbers_async}
    async with aiogpu.init(num_cpus=1), open_floor("stream") as floor:
        for name, generator in kinds.items():
            start: Any = aiogpu.remote(generator).remote
            pair = await timing.alternate(
                partial(timing.timed, partial(floor.items, count)),
                partial(timing.timed, partial(timing.consume, start, count)),
                scale(5, 2),
            )
            found.append(
                rows.rates(
                    f"streams: {name}", "items/s", pair, count, STREAM, absolute=True
                )
            )
    return found


class Batching:
    """An actor with a plain method and one under `batch`; each batch takes 1 ms."""

    async def on_loop(self, numbers: list[int]) -> list[int]:
        return await tasks.batch_on_loop(numbers)

    async def in_thread(self, numbers: list[int]) -> list[int]:
        return await tasks.batch_in_thread(numbers)

    batched_on_loop = aiogpu.batch(max_size=BATCH)(on_loop)
    batched_in_thread = aiogpu.batch(max_size=BATCH)(in_thread)


async def batching(scale: Scale) -> list[Row]:
    """Single calls gathered by `batch`, beside lists of 32 passed by hand.

    64 clients call again and again; a batch takes 1 ms, on the loop or in a thread; in
    this process, and in an actor, to which each call is sent by itself.
    """
    batch: Any = aiogpu.batch(max_size=BATCH)
    on_loop, in_thread = tasks.batch_on_loop, tasks.batch_in_thread
    async with aiogpu.init(num_cpus=2):
        actor: Any = await aiogpu.remote(Batching).remote()
        by_hand, by_item = actor.on_loop.remote, actor.batched_on_loop.remote
        threaded, each = actor.in_thread.remote, actor.batched_in_thread.remote
        return [
            await _batched("on the loop", on_loop, batch(on_loop), scale),
            await _batched("in a thread", in_thread, batch(in_thread), scale),
            await _batched("in an actor, on the loop", by_hand, by_item, scale),
            await _batched("in an actor, in a thread", threaded, each, scale),
        ]


async def _batched(where: str, by_hand: Any, by_item: Any, scale: Scale) -> Row:
    count = scale(20_000, 200)

    async def lists() -> None:
        for first in range(0, count, BATCH):
            items = list(range(first, min(first + BATCH, count)))
            assert await by_hand(items) == items

    async def client(items: Iterator[int]) -> None:
        for item in items:
            assert await by_item(item) == item

    async def clients() -> None:
        items = iter(range(count))
        await asyncio.gather(*(client(items) for _ in range(CLIENTS)))

    runs = partial(timing.timed, lists), partial(timing.timed, clients)
    pair = await timing.alternate(*runs, scale(5, 2))
    return rows.rates(f"batching: {where}", "calls/s", pair, count, BATCHED, lowest=0)


async def mapping(scale: Scale) -> list[Row]:
    """`f.map(items, chunk="auto")` of 10 us each, beside chunks of 400 made by hand."""
    count, growths = scale(1_000_000, 2_000), []
    expected = sum(range(count))
    by_hand, by_map = aiogpu.remote(tasks.busy_each), aiogpu.remote(tasks.busy)

    async def lists() -> None:
        items = list(range(count))
        starts = range(0, count, CHUNK)
        chunks = (by_hand.remote(items[start : start + CHUNK]) for start in starts)
        found = sum(map(sum, await asyncio.gather(*chunks)))
        assert found == expected, found

    async def mapped() -> None:
        found = before = 0
        async for number in by_map.map(range(count), chunk="auto"):
            found += number
            if number == count // 10:
                before = status_bytes("RssAnon")
        growths.append(status_bytes("RssAnon") - before)
        assert found == expected, found

    async def trimmed() -> Block:
        gc.collect()
        CDLL(None).malloc_trim(0)  # free memory goes back, so that growth is seen
        return await timing.timed(mapped)

    async with aiogpu.init(num_cpus=2):
        pair = await timing.alternate(
            partial(timing.timed, lists), trimmed, scale(3, 1)
        )
    note = "grown from the first tenth of the items to the last, at most"
    growth = max(growths[1:]) / MIB
    return [
        rows.times("map: 10 us an item", "us", pair, MAPPED, calls=count),
        Row("map: memory of the driver", "MiB", growth, FLAT, note),
    ]


async def ray(scale: Scale) -> list[Row]:
    """The same calls on one Ray cluster by Ray's own interface and by aiogpu.

    One awaited and 2 000 gathered, of a task and of three kinds of actors.
    """
    rows.require("ray")
    import ray

    remote: Any = aiogpu.remote
    async with aiogpu.init(address="ray", num_cpus=2, log_to_driver=False):
        theirs, ours = ray.remote(tasks.noop), remote(tasks.noop)
        found = await _on_ray("a task", theirs, ours, scale)
        for name, cls, options in (
            ("an actor", tasks.Plain, {}),
            ("a threaded actor", tasks.Plain, {"max_concurrency": 2}),
            ("an actor's coroutine", tasks.Interleaved, {}),
        ):
            mine = await remote(num_cpus=0, **options)(cls).remote()
            their = ray.remote(num_cpus=0, **options)(cls).remote()
            found += await _on_ray(name, their.noop, mine.noop, scale)
            del mine, their
    return found


async def _on_ray(what: str, theirs: Any, ours: Any, scale: Scale) -> list[Row]:
    # A call on Ray takes ten times as long as one of ours, so there are fewer.
    both, count = (theirs.remote, ours.remote), scale(2_000, 20)
    single = await one_by_one(*both, scale(50, 2), scale(40, 2))
    many = await gathered(*both, count, scale(5, 2))
    return [
        rows.times(f"ray: one call, {what}", "us", single, ON_RAY),
        rows.times(f"ray: gathered, {what}", "us", many, ON_RAY, calls=count),
    ]
