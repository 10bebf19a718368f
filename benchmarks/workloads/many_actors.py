"""Very many idle actors: what does each weigh, and do they slow each other down?"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Final

from benchmarks.census import descendants, weigh
from benchmarks.crowd import open_floors
from benchmarks.floor import open_floor
from benchmarks.method import Pair, Scale, alternate, one_at_a_time, percentile
from benchmarks.port import Call, Create, Environment
from benchmarks.rows import US, Goal, Row, judge, spread
from benchmarks.tasks import Plain

MB: Final = 1_000_000
PRIVATE: Final = Goal(10, "MB")
BESIDE_ONE: Final = Goal(2, "x single")
BESIDE_BARE: Final = Goal(2, "x bare in turn")
BLOCKS: Final = 10


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """A single one is called, then one of many, then each of them in turn.

    As many bare workers, called in turn as well, tell how much of it is the machine's.
    """
    # Without learning: a new generation in the middle is another's memory.
    await environment.open(num_cpus=2, preload=())
    try:
        create = environment.actor(Plain)
        first = await create()
        async with open_floor() as floor:
            single = await _called(floor.call, [first], scale)
            async with open_floors(scale.actors) as floors:
                bare = await _called(floor.call, [each.call for each in floors], scale)
            before = descendants()
            rest, seconds = await _make(create, scale.actors - 1)
            memory = _weigh(before, len(rest), seconds, environment, scale)
            one = await _called(floor.call, [first], scale)
            each = await _called(floor.call, [first, *rest], scale)
        return [
            memory,
            _beside("many_actors: one called", single, one, BESIDE_ONE, scale),
            _beside("many_actors: each in turn", single, each, BESIDE_ONE, scale),
            _beside("many_actors: beside bare ones", bare, each, BESIDE_BARE, scale),
        ]
    finally:
        await environment.close()


async def _make(create: Create, count: int) -> tuple[list[Call[None]], float]:
    start = perf_counter()
    made = await asyncio.gather(*(create() for _ in range(count)))
    return made, perf_counter() - start


def _weigh(
    before: dict[int, str],
    count: int,
    seconds: float,
    environment: Environment,
    scale: Scale,
) -> Row:
    """All processes that have come with them, shared out among them."""
    come = {pid: name for pid, name in descendants().items() if pid not in before}
    lasting = [
        pid
        for pid, name in come.items()
        if name.startswith(tuple(environment.lasting.values()))
    ]
    workers = [pid for pid in come if pid not in lasting]
    private = weigh([*come]).private / count / MB
    parts = f"workers {weigh(workers).private / count / MB:.1f}"
    if lasting:
        words = " and ".join(environment.lasting)
        parts += f", {words} {weigh(lasting).private / count / MB:.1f}"
    return Row(
        "many_actors: memory",
        "MB each",
        judge(private, PRIVATE, scale),
        p50=private,
        note=f"{count + 1:,} actors: {parts}; made in {seconds:.1f} s",
        goal=str(PRIVATE),
    )


async def _called(floor: Call[None], actors: list[Call[None]], scale: Scale) -> Pair:
    """Calls one at a time, each to the next actor."""
    turn = cycle(actors).__next__

    def call(number: int) -> asyncio.Future[None]:
        return turn()(number)

    return await alternate(
        partial(one_at_a_time, floor, scale.calls),
        partial(one_at_a_time, call, scale.calls),
        min(scale.blocks, BLOCKS),
    )


def _beside(name: str, single: Pair, many: Pair, goal: Goal, scale: Scale) -> Row:
    """Each beside the floor's calls in its own minutes, then beside each other."""
    ratio = many.ratio / single.ratio
    return Row(
        name,
        "us",
        judge(ratio, goal, scale),
        p50=percentile(many.workload, 50) / US,
        p99=percentile(many.workload, 99) / US,
        floor=percentile(single.workload, 50) / US,
        floor_p99=percentile(single.workload, 99) / US,
        ratio=ratio,
        note=f"{many.ratio:.2f} and {single.ratio:.2f} x the ping-pong floor; "
        + spread(many.ratios),
        goal=str(goal),
        samples=many.workload,
        floor_samples=single.workload,
    )
