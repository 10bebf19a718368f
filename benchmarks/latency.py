"""One question asked of several kinds of task: how long does one awaited call take?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from benchmarks.cores import floor_apart, one_core, running_on
from benchmarks.floor import Floor, open_floor
from benchmarks.method import Pair, Scale, alternate, one_at_a_time
from benchmarks.port import Environment, Need
from benchmarks.rows import Goal, Row, latency_row
from benchmarks.tasks import noop

GOAL = Goal(1.6, "x floor")

Opening = AbstractAsyncContextManager[Floor]


async def measure_latency(
    name: str, environment: Environment, scale: Scale, need: Need
) -> list[Row]:
    """Warm calls of a task that does nothing, awaited one at a time.

    With the floor's worker on another core than the driver; and with everything on one.
    """
    with running_on(one_core()):
        on_one = await _of_a_task(environment, scale, need, open_floor())
    apart = await _of_a_task(environment, scale, need, floor_apart())
    return [
        latency_row(name, apart, GOAL, scale, on_one.floor),
        latency_row(f"{name}: one core", on_one, GOAL, scale),
    ]


async def beside_floor(
    call: Callable[[int], Awaitable[object]], opening: Opening, scale: Scale
) -> Pair:
    """Calls awaited one at a time, in turn with the floor's; ends the floor."""
    async with opening as floor:
        return await alternate(
            partial(one_at_a_time, floor.call, scale.calls),
            partial(one_at_a_time, call, scale.calls),
            scale.blocks,
        )


async def _of_a_task(
    environment: Environment, scale: Scale, need: Need, opening: Opening
) -> Pair:
    await environment.open(num_cpus=2, num_gpus=1 if need.num_gpus else 0)
    try:
        return await beside_floor(environment.task(noop, need), opening, scale)
    finally:
        await environment.close()
