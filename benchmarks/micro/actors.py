"""Actors: what one costs to create, what a thousand idle ones weigh, and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any, Final

import aiogpu
from benchmarks import tasks
from benchmarks.floors import open_floor, open_floors
from benchmarks.micro import rows
from benchmarks.micro.calls import method, one_by_one
from benchmarks.micro.rows import Goal, Row, Scale
from benchmarks.processes import descendants, private_memory
from benchmarks.timing import Block, Call, Pair, one_at_a_time, rotate

MB: Final = 1_000_000
CREATION: Final = Goal(10, "ms")
PRIVATE: Final = Goal(10, "MB")
BESIDE_ONE: Final = Goal(2, "x single")
BESIDE_BARE: Final = Goal(2, "x bare in turn")


async def creation(scale: Scale) -> list[Row]:
    """`await A.remote()`, one after the other; none ends meanwhile."""

    async def create(cls: type) -> Block:
        living: list[Any] = []

        async def one(_: int) -> None:
            living.append(await aiogpu.remote(cls).remote())

        return await one_at_a_time(one, scale(50, 4))

    kinds = {"plain": tasks.Plain, "coroutine": tasks.Interleaved}
    async with aiogpu.init(num_cpus=2):
        runs = [partial(create, cls) for cls in kinds.values()]
        blocks = await rotate(runs, scale(8, 1))
    return [
        rows.plain(f"actors: {name} created", found, CREATION)
        for name, found in zip(kinds, blocks, strict=True)
    ]


async def many_actors(scale: Scale) -> list[Row]:
    """A thousand idle actors: their memory; calls to one of them and to each in turn.

    A single actor is called, then one of many, then each of them in turn; as many bare
    workers, called in turn as well, tell how much of it is the machine's.
    """
    count = scale(1_000, 8)

    async def in_turn(actors: list[Call]) -> Pair:
        turn = cycle(actors)

        def call(number: int) -> Awaitable[object]:
            return next(turn)(number)

        return await one_by_one(floor.call, call, scale(500, 20), scale(10, 2))

    async with AsyncExitStack() as stack:
        # Without learning: a new zygote in the middle would have other memory.
        await stack.enter_async_context(aiogpu.init(num_cpus=2, preload=()))
        first = await method(tasks.Plain)
        floor = await stack.enter_async_context(open_floor())
        single = await in_turn([first])
        async with open_floors(count) as floors:
            bare = await in_turn([each.call for each in floors])
        before, start = descendants(), perf_counter()
        rest = await asyncio.gather(*(method(tasks.Plain) for _ in range(count - 1)))
        took = perf_counter() - start
        new = [pid for pid in descendants() if pid not in before]
        private = private_memory(new) / len(rest) / MB
        one, each = await in_turn([first]), await in_turn([first, *rest])
        del first, rest
    note = f"{count:,} actors, all processes that came with them; made in {took:.1f} s"
    return [
        Row("many_actors: memory", "MB each", private, PRIVATE, note),
        _beside("one called", single, one, BESIDE_ONE),
        _beside("each in turn", single, each, BESIDE_ONE),
        _beside("beside bare ones", bare, each, BESIDE_BARE),
    ]


def _beside(name: str, single: Pair, many: Pair, goal: Goal) -> Row:
    """Both beside the floor's calls of their own minutes, then beside each other."""
    note = f"{many.ratio:.2f} and {single.ratio:.2f} x the floor"
    ratio, own = many.ratio / single.ratio, rows.times("", "us", single)
    row = rows.times(f"many_actors: {name}", "us", many, goal, note, ratio=ratio)
    samples = single.workload
    return replace(row, floor=own.p50, floor_p99=own.p99, floor_samples=samples)
