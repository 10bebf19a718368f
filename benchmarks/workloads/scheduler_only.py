"""How fast are decisions alone, with no process and no socket?"""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import Final

from benchmarks.method import Scale, percentile
from benchmarks.port import Environment, Need
from benchmarks.rows import BUSY, NO_GOAL, US, Goal, Row, judge

GPUS: Final = 4
LEAST_SHARE: Final = 0.9
"""Of one core, else others ran on it."""
GOAL: Final = Goal(100_000, "cycles/s", is_least=True)


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """From submission to end, one task after the other, on a quarter of a GPU."""
    cycle = environment.decision(GPUS, Need(num_gpus=0.25))
    blocks: list[list[int]] = []
    began, began_on_cpu = perf_counter_ns(), thread_time_ns()
    for _ in range(scale.blocks):
        block = []
        for number in range(scale.calls):
            start = perf_counter_ns()
            cycle(number)
            block.append(perf_counter_ns() - start)
        blocks.append(block)
    share = (thread_time_ns() - began_on_cpu) / (perf_counter_ns() - began)
    fault = "" if share >= LEAST_SHARE else f"it had {share:.0%} of a core; {BUSY}"
    rates = [1e9 * len(block) / sum(block) for block in blocks]
    rate = median(rates)
    return [
        Row(
            "scheduler_only: rate",
            "cycles/s",
            judge(rate, GOAL, scale, fault),
            p50=rate,
            note=f"blocks {min(rates):,.0f} to {max(rates):,.0f}",
            goal=str(GOAL),
            samples=blocks,
        ),
        Row(
            "scheduler_only: one cycle",
            "us",
            NO_GOAL,
            p50=percentile(blocks, 50) / US,
            p99=percentile(blocks, 99) / US,
        ),
    ]
