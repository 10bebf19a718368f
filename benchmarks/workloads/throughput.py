"""How many calls a second, when very many are gathered?"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.floor import open_floor
from benchmarks.method import Scale, all_at_once, alternate
from benchmarks.port import Environment, Need
from benchmarks.rows import Goal, Row, rate_row
from benchmarks.tasks import noop

GOAL: Final = Goal(0.4, "x floor", is_least=True)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Calls that do nothing, all made before the first is awaited; two workers.

    On CPUs, and on quarters of a GPU whose workers are kept: two fit, since each
    takes a CPU as well.
    """
    return [
        await _gathered("throughput: CPU", environment, scale, Need()),
        await _gathered(
            "throughput: quarter GPU", environment, scale, Need(num_gpus=0.25)
        ),
    ]


async def _gathered(
    name: str, environment: Environment, scale: Scale, need: Need
) -> Row:
    await environment.open(num_cpus=2, num_gpus=1 if need.num_gpus else 0)
    try:
        call = environment.task(noop, need)
        async with open_floor() as floor:
            pair = await alternate(
                partial(all_at_once, floor.call, scale.gathered),
                partial(all_at_once, call, scale.gathered),
                scale.gathers,
            )
    finally:
        await environment.close()
    return rate_row(name, pair, scale.gathered, GOAL, scale)
