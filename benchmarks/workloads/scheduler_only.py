"""How fast are decisions alone, with no process and no socket?"""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns

from benchmarks.method import Scale, percentile
from benchmarks.port import Environment, Need
from benchmarks.rows import NO_GOAL, Row

GPUS = 4


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """From submission to end, one task after the other, on a quarter of a GPU."""
    cycle = environment.decision(GPUS, Need(num_gpus=0.25))
    blocks: list[list[int]] = []
    for _ in range(scale.blocks):
        block = []
        for number in range(scale.calls):
            start = perf_counter_ns()
            cycle(number)
            block.append(perf_counter_ns() - start)
        blocks.append(block)
    rate = 1e9 / median(sum(block) / len(block) for block in blocks)
    return [
        Row("scheduler_only: rate", "cycles/s", NO_GOAL, p50=rate, samples=blocks),
        Row(
            "scheduler_only: one cycle",
            "us",
            NO_GOAL,
            p50=percentile(blocks, 50) / 1000,
            p99=percentile(blocks, 99) / 1000,
        ),
    ]
