"""What does aiogpu's face cost on a Ray cluster, over Ray's own interface?

Whatever the environment: a cluster is started here, and the same calls of a task and of
actors are made on it by `ray.remote` from asyncio and by aiogpu, in turn.
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
from benchmarks.tasks import Interleaved, Plain, noop

OVERHEAD: Final = Goal(1.15, "x Ray's own")
CALLS: Final = 10
"""A call on Ray takes so many times as long as one of ours, so there are fewer."""
ACTORS: Final[tuple[tuple[str, type, dict[str, int]], ...]] = (
    ("an actor", Plain, {"num_cpus": 0}),
    ("a threaded actor", Plain, {"num_cpus": 0, "max_concurrency": 2}),
    ("an actor's coroutine", Interleaved, {"num_cpus": 0}),
)
"""By the name of its rows, a class and its options; without a CPU, all have a place."""


async def measure(_environment: Environment, scale: Scale) -> list[Row]:
    """A call, and many at once."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UnsupportedError("ray is not installed") from None
    remote: Any = aiogpu.remote
    async with aiogpu.init(address="ray", num_cpus=2, log_to_driver=False):
        rows = await _compared("", ray.remote(noop).remote, remote(noop).remote, scale)
        for name, cls, options in ACTORS:
            ours = await remote(**options)(cls).remote()
            theirs = ray.remote(**options)(cls).remote()
            called = theirs.noop.remote, ours.noop.remote
            rows += await _compared(f", {name}", *called, scale)
            del ours, theirs, called
    return rows


async def _compared(what: str, theirs: Any, ours: Any, scale: Scale) -> list[Row]:
    calls, gathered = max(scale.calls // CALLS, 2), max(scale.gathered // CALLS, 2)
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
        _row(f"ray: one call{what}", one, 1, scale),
        _row(f"ray: gathered{what}", many, gathered, scale),
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
