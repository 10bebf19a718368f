"""What does a task cost that a task starts?"""

from __future__ import annotations

from functools import partial
from time import perf_counter_ns
from typing import Final

from benchmarks.method import Block, Scale, all_at_once, alternate, percentile
from benchmarks.port import Call, Environment, Need
from benchmarks.rows import US, Goal, Row, judge, spread
from benchmarks.tasks import noop

GOAL: Final = Goal(3, "x flat")


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """A tree of three levels on one CPU, beside as many calls gathered on the same."""
    return [
        await _beside_flat("nested: plain", environment, scale, is_async=False),
        await _beside_flat("nested: coroutines", environment, scale, is_async=True),
    ]


async def _beside_flat(
    name: str, environment: Environment, scale: Scale, *, is_async: bool
) -> Row:
    # The root, what it starts, and what these start.
    count = 1 + scale.width + scale.width * (scale.width - 1)
    root = environment.tree(is_async)
    await environment.open(num_cpus=1)
    try:
        flat = environment.task(noop, Need())
        pair = await alternate(
            partial(all_at_once, flat, count),
            partial(_tree, root, scale.width, count),
            scale.trees,
        )
    finally:
        await environment.close()
    return Row(
        name,
        "us a task",
        judge(pair.ratio, GOAL, scale),
        p50=percentile(pair.workload, 50) / count / US,
        floor=percentile(pair.floor, 50) / count / US,
        ratio=pair.ratio,
        note=spread(pair.ratios),
        goal=str(GOAL),
        samples=pair.workload,
        floor_samples=pair.floor,
    )


async def _tree(root: Call[int], width: int, count: int) -> Block:
    start = perf_counter_ns()
    below = await root(width)
    block = [perf_counter_ns() - start]
    assert below == count - 1, (below, count)
    return block
