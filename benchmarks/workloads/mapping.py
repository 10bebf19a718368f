"""What is lost when very many items are mapped, beside chunks made by hand?

The node finds out by itself how many items make a task. By hand somebody has measured
what an item takes, and gathers lists of them.
"""

from __future__ import annotations

import asyncio
import gc
from ctypes import CDLL
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from benchmarks.method import Block, Scale, alternate, percentile
from benchmarks.port import Environment, Mapped
from benchmarks.rows import Goal, Row, judge, spread
from benchmarks.tasks import short, short_each

SIZE: Final = 400
"""Items of a chunk by hand: 4 ms of work."""
GOAL: Final = Goal(1.5, "x by hand")
FLAT: Final = Goal(16, "MiB")
MIB: Final = 1 << 20


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Items that take 10 us each, on two CPUs."""
    await environment.open(num_cpus=2)
    try:
        mapped = environment.mapped(short, short_each)
        growths: list[int] = []
        pair = await alternate(
            partial(_by_hand, mapped, scale.mapped),
            partial(_by_map, mapped, scale.mapped, growths),
            scale.maps,
        )
    finally:
        await environment.close()
    growth = max(growths[1:]) / MIB
    return [
        Row(
            "map: 10 us an item",
            "items/s",
            judge(pair.ratio, GOAL, scale),
            p50=scale.mapped * 1e9 / percentile(pair.workload, 50),
            floor=scale.mapped * 1e9 / percentile(pair.floor, 50),
            ratio=pair.ratio,
            note=f"{scale.mapped:,} items; {spread(pair.ratios)}",
            goal=str(GOAL),
            samples=pair.workload,
            floor_samples=pair.floor,
        ),
        Row(
            "map: memory of the driver",
            "MiB",
            judge(growth, FLAT, scale),
            p50=growth,
            note="grown from the first tenth of the items to the last, at most",
            goal=str(FLAT),
        ),
    ]


async def _by_hand(mapped: Mapped, count: int) -> Block:
    start = perf_counter_ns()
    chunks = await asyncio.gather(
        *(
            mapped.by_hand(list(range(first, min(first + SIZE, count))))
            for first in range(0, count, SIZE)
        )
    )
    found = sum(number for chunk in chunks for number in chunk)
    block = [perf_counter_ns() - start]
    assert found == sum(range(count)), found
    return block


async def _by_map(mapped: Mapped, count: int, growths: list[int]) -> Block:
    """Notes how much memory was added after the first tenth."""
    found = before = 0
    _trim()
    start = perf_counter_ns()
    async for number in mapped.by_map(range(count)):
        found += number
        if number == count // 10:
            before = _resident()
    block = [perf_counter_ns() - start]
    growths.append(_resident() - before)
    assert found == sum(range(count)), found
    return block


def _trim() -> None:
    """Give free memory back, so that what is added is seen; see malloc_trim(3)."""
    gc.collect()
    CDLL(None).malloc_trim(0)


def _resident() -> int:
    """Bytes of this process that it shares with no file; see proc_pid_status(5)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10
