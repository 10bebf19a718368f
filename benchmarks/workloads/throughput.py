"""How many calls a second, when very many are gathered?"""

from __future__ import annotations

from functools import partial

from benchmarks.floor import open_floor
from benchmarks.method import Scale, all_at_once, alternate
from benchmarks.port import Environment, Need
from benchmarks.rows import Row, rate_row
from benchmarks.tasks import noop


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Calls that do nothing, all made before the first is awaited; two workers."""
    await environment.open(num_cpus=2)
    try:
        call = environment.task(noop, Need())
        async with open_floor() as floor:
            pair = await alternate(
                partial(all_at_once, floor.call, scale.gathered),
                partial(all_at_once, call, scale.gathered),
                scale.gathers,
            )
    finally:
        await environment.close()
    return [rate_row("throughput", pair, scale.gathered, scale)]
