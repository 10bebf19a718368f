"""What does a process of its own cost each GPU task?"""

from __future__ import annotations

from functools import partial

from benchmarks.forks import open_forks
from benchmarks.method import (
    Block,
    Run,
    Scale,
    all_at_once,
    alternate,
    one_at_a_time,
    percentile,
)
from benchmarks.port import Call, Environment, Need
from benchmarks.rows import MS, NO_GOAL, Row
from benchmarks.tasks import noop

QUARTER = Need(num_gpus=0.25, is_isolated=True)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """One at a time, then many gathered on four quarters, beside bare forks."""
    await environment.open(num_cpus=4, num_gpus=1)
    try:
        call = environment.task(noop, QUARTER)
        single = partial(one_at_a_time, call, scale.isolated)
        gathered = partial(_gathered, call, scale.isolated)
        return [
            await _beside_forks("isolated: one at a time", single, scale),
            await _beside_forks(
                f"isolated: {scale.isolated} gathered", gathered, scale
            ),
        ]
    finally:
        await environment.close()


async def _gathered(call: Call[None], count: int) -> Block:
    """The time that each call adds to the whole."""
    (whole,) = await all_at_once(call, count)
    return [whole // count]


async def _beside_forks(name: str, workload: Run, scale: Scale) -> Row:
    with open_forks() as forks:
        floor = partial(forks.fork, scale.isolated)
        pair = await alternate(floor, workload, scale.isolates)
    return Row(
        name,
        "ms",
        NO_GOAL,
        p50=percentile(pair.workload, 50) / MS,
        p99=percentile(pair.workload, 99) / MS,
        floor=percentile(pair.floor, 50) / MS,
        floor_p99=percentile(pair.floor, 99) / MS,
        ratio=pair.ratio,
        samples=pair.workload,
        floor_samples=pair.floor,
    )
