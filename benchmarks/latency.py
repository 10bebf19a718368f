"""One question asked of several kinds of task: how long does one awaited call take?"""

from __future__ import annotations

from functools import partial

from benchmarks.cores import floor_apart, one_core, running_on
from benchmarks.floor import open_floor
from benchmarks.method import Pair, Scale, alternate, one_at_a_time
from benchmarks.port import Environment, Need
from benchmarks.rows import Goal, Row, latency_row
from benchmarks.tasks import noop

GOAL = Goal(1.6, "x floor")


async def measure_latency(
    name: str, environment: Environment, scale: Scale, need: Need
) -> list[Row]:
    """Warm calls of a task that does nothing, awaited one at a time.

    With the floor's worker on another core than the driver; and with everything on one.
    """
    with running_on(one_core()):
        on_one = await _beside_floor(environment, scale, need, is_apart=False)
    apart = await _beside_floor(environment, scale, need, is_apart=True)
    return [
        latency_row(name, apart, GOAL, scale, on_one.floor),
        latency_row(f"{name}: one core", on_one, GOAL, scale),
    ]


async def _beside_floor(
    environment: Environment, scale: Scale, need: Need, is_apart: bool
) -> Pair:
    await environment.open(num_cpus=2, num_gpus=1 if need.num_gpus else 0)
    try:
        call = environment.task(noop, need)
        async with floor_apart() if is_apart else open_floor() as floor:
            return await alternate(
                partial(one_at_a_time, floor.call, scale.calls),
                partial(one_at_a_time, call, scale.calls),
                scale.blocks,
            )
    finally:
        await environment.close()
