"""How long does one awaited call of a fractional-GPU task take, warm and reused?"""

from __future__ import annotations

from benchmarks.latency import measure_latency
from benchmarks.method import Scale
from benchmarks.port import Environment, Need
from benchmarks.rows import Row


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """A task that does nothing, on a quarter of a GPU whose worker is kept."""
    need = Need(num_gpus=0.25)
    return await measure_latency("gpu_latency", environment, scale, need)
