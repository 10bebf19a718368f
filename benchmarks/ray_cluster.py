"""What does aiogpu's face cost on a Ray cluster, over Ray's own interface?

Whatever the environment: a cluster is started here, and the same calls are made on it
by `ray.remote` from asyncio and by aiogpu, in turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import aiogpu
from benchmarks.method import (
    Pair,
    Scale,
    all_at_once,
    alternate,
    one_at_a_time,
    percentile,
)
from benchmarks.port import Environment, UnsupportedError
from benchmarks.rows import US, Goal, Row, judge, spread
from benchmarks.tasks import noop

OVERHEAD: Final = Goal(1.15, "x Ray's own")
CALLS: Final = 10
"""A call on Ray takes so many times as long as one of ours, so there are fewer."""


async def measure(_environment: Environment, scale: Scale) -> list[Row]:
    """A call, and many at once."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UnsupportedError("ray is not installed") from None
    calls, gathered = max(scale.calls // CALLS, 2), max(scale.gathered // CALLS, 2)
    async with aiogpu.init(address="ray", num_cpus=2, log_to_driver=False):
        theirs: Any = ray.remote(noop).remote
        ours = aiogpu.remote(noop).remote
        one = await alternate(
            partial(one_at_a_time, theirs, calls),
            partial(one_at_a_time, ours, calls),
            scale.blocks,
        )
        many = await alternate(
            partial(all_at_once, theirs, gathered),
            partial(all_at_once, ours, gathered),
            scale.gathers,
        )
    return [
        _row("ray: one call", one, 1, scale),
        _row("ray: gathered", many, gathered, scale),
    ]


def _row(name: str, pair: Pair, calls: int, scale: Scale) -> Row:
    return Row(
        name,
        "us",
        judge(pair.ratio, OVERHEAD, scale),
        p50=percentile(pair.workload, 50) / calls / US,
        p99=percentile(pair.workload, 99) / calls / US,
        floor=percentile(pair.floor, 50) / calls / US,
        floor_p99=percentile(pair.floor, 99) / calls / US,
        ratio=pair.ratio,
        goal=str(OVERHEAD),
        note=spread(pair.ratios),
        samples=pair.workload,
        floor_samples=pair.floor,
    )
