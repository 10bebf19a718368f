"""Actors: what one costs to create, what a thousand idle ones weigh, and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from itertools import cycle
from time import perf_counter, perf_counter_ns
from typing import Any, Final

import aiogpu
from benchmarks.floors import open_floor, open_floors
from benchmarks.micro.calls import method
from benchmarks.micro.rows import (
    Goal,
    Row,
    Scale,
    figure_row,
    judge,
    plain_row,
    time_row,
)
from benchmarks.processes import descendants, private_memory
from benchmarks.tasks import Interleaved, Plain
from benchmarks.timing import Block, Call, Pair, alternate, one_at_a_time, rotate

MB: Final = 1_000_000
CREATION: Final = Goal(10, "ms")
PRIVATE: Final = Goal(10, "MB")
BESIDE_ONE: Final = Goal(2, "x single")
BESIDE_BARE: Final = Goal(2, "x bare in turn")


async def creation(scale: Scale) -> list[Row]:
    """`await A.remote()`, one after the other; none ends meanwhile."""

    async def create(cls: type) -> Block:
        living: list[Any] = []
        samples: Block = []
        for _ in range(scale(50, 4)):
            start = perf_counter_ns()
            living.append(await aiogpu.remote(cls).remote())
            samples.append(perf_counter_ns() - start)
        return samples

    async with aiogpu.init(num_cpus=2):
        kinds = [partial(create, cls) for cls in (Plain, Interleaved)]
        blocks = await rotate(kinds, scale(8, 1))
    return [
        plain_row(f"actors: {name} created", found, CREATION, scale)
        for name, found in zip(("plain", "coroutine"), blocks, strict=True)
    ]


async def many_actors(scale: Scale) -> list[Row]:
    """A thousand idle actors: their memory; calls to one of them and to each in turn.

    A single actor is called, then one of many, then each of them in turn; as many bare
    workers, called in turn as well, tell how much of it is the machine's.
    """
    count = scale(1_000, 8)
    # Without learning: a new zygote in the middle would have other memory.
    async with aiogpu.init(num_cpus=2, preload=()):
        first = await method(Plain)
        async with open_floor() as floor:
            single = await _in_turn(floor.call, [first], scale)
            async with open_floors(count) as floors:
                bare = await _in_turn(floor.call, [each.call for each in floors], scale)
            before, start = descendants(), perf_counter()
            rest = await asyncio.gather(*(method(Plain) for _ in range(count - 1)))
            took = perf_counter() - start
            new = [pid for pid in descendants() if pid not in before]
            private = private_memory(new) / len(rest) / MB
            one = await _in_turn(floor.call, [first], scale)
            each = await _in_turn(floor.call, [first, *rest], scale)
        del first, rest
    note = f"{count:,} actors, all processes that came with them; made in {took:.1f} s"
    return [
        figure_row("many_actors: memory", "MB each", private, PRIVATE, scale, note),
        _beside("one called", single, one, BESIDE_ONE, scale),
        _beside("each in turn", single, each, BESIDE_ONE, scale),
        _beside("beside bare ones", bare, each, BESIDE_BARE, scale),
    ]


async def _in_turn(floor: Call, actors: list[Call], scale: Scale) -> Pair:
    """Calls one at a time, each to the next actor."""
    turn = cycle(actors)
    calls = scale(500, 20)

    def call(number: int) -> Awaitable[object]:
        return next(turn)(number)

    return await alternate(
        partial(one_at_a_time, floor, calls),
        partial(one_at_a_time, call, calls),
        scale(10, 2),
    )


def _beside(name: str, single: Pair, many: Pair, goal: Goal, scale: Scale) -> Row:
    """Both beside the floor's calls of their own minutes, then beside each other."""
    ratio = many.ratio / single.ratio
    row = time_row(f"many_actors: {name}", "us", many, None, scale)
    beside = time_row("", "us", single, None, scale)
    return Row(
        row.name,
        row.unit,
        judge(ratio, goal, scale),
        p50=row.p50,
        p99=row.p99,
        floor=beside.p50,
        floor_p99=beside.p99,
        ratio=ratio,
        note=f"{many.ratio:.2f} and {single.ratio:.2f} x the floor; {row.note}",
        goal=str(goal),
        samples=many.workload,
        floor_samples=single.workload,
    )
