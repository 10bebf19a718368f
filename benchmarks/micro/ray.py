"""The Ray engine: the same calls on one cluster by Ray's own API and by aiogpu."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import aiogpu
from benchmarks.micro.rows import Goal, Row, Scale, require, time_row
from benchmarks.tasks import Interleaved, Plain, noop
from benchmarks.timing import all_at_once, alternate, one_at_a_time

OVERHEAD: Final = Goal(1.15, "x Ray's own")
ACTORS: Final[tuple[tuple[str, type, dict[str, int]], ...]] = (
    ("an actor", Plain, {"num_cpus": 0}),
    ("a threaded actor", Plain, {"num_cpus": 0, "max_concurrency": 2}),
    ("an actor's coroutine", Interleaved, {"num_cpus": 0}),
)


async def ray(scale: Scale) -> list[Row]:
    """One awaited call and 2 000 gathered, of a task and of three kinds of actors."""
    require("ray")
    import ray

    remote: Any = aiogpu.remote
    async with aiogpu.init(address="ray", num_cpus=2, log_to_driver=False):
        rows = await _compared("a task", ray.remote(noop), remote(noop), scale)
        for name, cls, options in ACTORS:
            ours = await remote(**options)(cls).remote()
            theirs = ray.remote(**options)(cls).remote()
            rows += await _compared(name, theirs.noop, ours.noop, scale)
            del ours, theirs
    return rows


async def _compared(what: str, theirs: Any, ours: Any, scale: Scale) -> list[Row]:
    # A call on Ray takes ten times as long as one of ours, so there are fewer.
    rows = []
    for way, run, calls, blocks in (
        ("one call", one_at_a_time, scale(50, 2), scale(40, 2)),
        ("gathered", all_at_once, scale(2_000, 20), scale(5, 2)),
    ):
        pair = await alternate(
            partial(run, theirs.remote, calls),
            partial(run, ours.remote, calls),
            blocks,
        )
        each = calls if run is all_at_once else 1
        name = f"ray: {way}, {what}"
        rows.append(time_row(name, "us", pair, OVERHEAD, scale, calls=each))
    return rows
