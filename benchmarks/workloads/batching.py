"""What is lost when calls with one item are gathered, beside batches made by hand?

In this process, where such a call costs a few microseconds, and through an actor, where
each is sent and answered by itself.
"""

from __future__ import annotations

from asyncio import gather
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Final

from benchmarks.method import Block, Scale, alternate, percentile
from benchmarks.port import Environment, OnBatch
from benchmarks.rows import Goal, Row, judge, spread
from benchmarks.tasks import batch_in_thread, batch_on_loop

SIZE: Final = 32
CLIENTS: Final = 2 * SIZE
"""So that while a batch runs as many wait as make another."""
GOAL: Final = Goal(0.85, "x by hand", is_least=True)
FUNCTIONS: Final[dict[str, OnBatch]] = {
    "on the loop": batch_on_loop,
    "in a thread": batch_in_thread,
}

ByHand = Callable[[list[int]], Awaitable[list[int]]]
ByItem = Callable[[int], Awaitable[int]]


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Clients that call again and again, and a batch function that takes 1 ms."""
    rows = [
        await _beside_hand(
            f"batching: {where}", function, environment.batched(function, SIZE), scale
        )
        for where, function in FUNCTIONS.items()
    ]
    await environment.open(num_cpus=2)
    try:
        for where, function in FUNCTIONS.items():
            actor = await environment.batched_actor(function, SIZE)
            name = f"batching: in an actor, {where}"
            rows.append(await _beside_hand(name, *actor, scale))
        return rows
    finally:
        await environment.close()


async def _beside_hand(
    name: str, by_hand: ByHand, by_item: ByItem, scale: Scale
) -> Row:
    count = scale.gathered
    pair = await alternate(
        partial(_by_hand, by_hand, count),
        partial(_by_clients, by_item, count),
        scale.gathers,
    )
    rates = [1 / ratio for ratio in pair.ratios]
    return Row(
        name,
        "calls/s",
        judge(1 / pair.ratio, GOAL, scale),
        p50=count * 1e9 / percentile(pair.workload, 50),
        floor=count * 1e9 / percentile(pair.floor, 50),
        ratio=1 / pair.ratio,
        note=f"{SIZE} in a batch, {CLIENTS} clients; {spread(rates)}",
        goal=str(GOAL),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


async def _by_hand(function: ByHand, count: int) -> Block:
    start = perf_counter_ns()
    for first in range(0, count, SIZE):
        numbers = list(range(first, min(first + SIZE, count)))
        assert await function(numbers) == numbers
    return [perf_counter_ns() - start]


async def _by_clients(call: ByItem, count: int) -> Block:
    numbers = iter(range(count))
    start = perf_counter_ns()
    await gather(*(_client(call, numbers) for _ in range(CLIENTS)))
    return [perf_counter_ns() - start]


async def _client(call: ByItem, numbers: Iterator[int]) -> None:
    for number in numbers:
        assert await call(number) == number
