"""What does a call to an actor cost, and what does an actor cost?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Final

from benchmarks import coroutine_floor
from benchmarks import floor as plain_floor
from benchmarks.cores import floor_apart, one_core, running_on
from benchmarks.floor import open_floor
from benchmarks.latency import Opening, beside_floor
from benchmarks.method import Block, Pair, Scale, all_at_once, rotate
from benchmarks.port import Call, Create, Environment
from benchmarks.rows import Goal, Row, latency_row, rate_row, time_row
from benchmarks.tasks import Interleaved, Plain

LATENCY: Final = Goal(1.5, "x floor")
RATE: Final = Goal(0.5, "x floor", is_least=True)
CREATION: Final = Goal(10, "ms")

OpenFloor = Callable[[str], Opening]


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Calls one at a time, calls gathered, and making one; plain and coroutines."""
    with running_on(one_core()):
        on_one = await _awaited_alone(environment, scale)
    await environment.open(num_cpus=2)
    try:
        creates = [environment.actor(cls) for cls in (Plain, Interleaved)]
        plain, interleaved = [await create() for create in creates]
        rows = _told(
            await _awaited([plain, interleaved], floor_apart, scale), on_one, scale
        )
        async with (
            open_floor() as floor,
            open_floor(coroutine_floor.__name__) as coroutines,
        ):
            calls = [floor.call, plain, coroutines.call, interleaved]
            rows += await _gathered(calls, scale)
        del calls, plain, interleaved
        return [*rows, *await _created(creates, scale)]
    finally:
        await environment.close()


async def _awaited_alone(environment: Environment, scale: Scale) -> list[Pair]:
    """Both, on a node of its own."""
    await environment.open(num_cpus=2)
    try:
        calls = [await environment.actor(cls)() for cls in (Plain, Interleaved)]
        return await _awaited(calls, open_floor, scale)
    finally:
        await environment.close()


async def _awaited(
    calls: Sequence[Call[None]], opened: OpenFloor, scale: Scale
) -> list[Pair]:
    """Each beside its own floor alone."""
    floors = (plain_floor, coroutine_floor)
    return [
        await beside_floor(call, opened(worker.__name__), scale)
        for worker, call in zip(floors, calls, strict=True)
    ]


def _told(apart: Sequence[Pair], on_one: Sequence[Pair], scale: Scale) -> list[Row]:
    """What is measured on two cores, and on one; whether it was quiet says the last."""
    known = on_one[0].floor
    return [
        latency_row(f"actors: {name}{where}", pair, LATENCY, scale, known)
        for pairs, where in ((apart, ""), (on_one, ", one core"))
        for name, pair in zip(("plain", "coroutine"), pairs, strict=True)
    ]


async def _gathered(calls: list[Call[None]], scale: Scale) -> list[Row]:
    floor, plain, coroutines, interleaved = await rotate(
        [partial(all_at_once, call, scale.gathered) for call in calls], scale.gathers
    )
    beside = 1 / Pair(coroutines, interleaved).ratio
    count = scale.gathered
    return [
        rate_row("actors: plain gathered", Pair(floor, plain), count, RATE, scale),
        rate_row(
            "actors: coroutines gathered",
            Pair(floor, interleaved),
            count,
            None,
            scale,
            f"{beside:.2f} x the coroutine floor",
        ),
    ]


async def _created(creates: list[Create], scale: Scale) -> list[Row]:
    blocks = await rotate(
        [partial(_create, create, scale.singles) for create in creates], scale.isolates
    )
    return [
        time_row(f"actors: {name} created", found, CREATION, scale)
        for name, found in zip(("plain", "coroutine"), blocks, strict=True)
    ]


async def _create(create: Create, count: int) -> Block:
    """One after the other; none ends before the last is there."""
    living: list[Call[None]] = []
    samples: Block = []
    for _ in range(count):
        start = perf_counter_ns()
        living.append(await create())
        samples.append(perf_counter_ns() - start)
    return samples
