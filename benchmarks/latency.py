"""One question asked of several kinds of task: how long does one awaited call take?"""

from __future__ import annotations

from functools import partial

from benchmarks.floor import open_floor
from benchmarks.method import Scale, alternate, one_at_a_time
from benchmarks.port import Environment, Need
from benchmarks.rows import Goal, Row, latency_row
from benchmarks.tasks import noop

GOAL = Goal(1.6, "x floor")


async def measure_latency(
    name: str, environment: Environment, scale: Scale, need: Need
) -> Row:
    """Warm calls of a task that does nothing, awaited one at a time."""
    await environment.open(num_cpus=2, num_gpus=1 if need.num_gpus else 0)
    try:
        call = environment.task(noop, need)
        async with open_floor() as floor:
            pair = await alternate(
                partial(one_at_a_time, floor.call, scale.calls),
                partial(one_at_a_time, call, scale.calls),
                scale.blocks,
            )
    finally:
        await environment.close()
    return latency_row(name, pair, GOAL, scale)
