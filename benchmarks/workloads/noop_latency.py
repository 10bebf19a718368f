"""How long does one awaited call of a CPU task take, warm?"""

from __future__ import annotations

from benchmarks.latency import measure_latency
from benchmarks.method import Scale
from benchmarks.port import Environment, Need
from benchmarks.rows import Row


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """A task that does nothing, on one CPU."""
    return await measure_latency("noop_latency", environment, scale, Need())
