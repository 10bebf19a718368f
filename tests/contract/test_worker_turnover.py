"""What outlives workers has no more descriptors, threads or processes after many."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

import aiogpu
from benchmarks.processes import Process, descendants, descriptors
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def census() -> Counter[str]:
    """Descriptors, threads and processes: of the driver, the zygote and the keepers."""
    found: Counter[str] = Counter()
    processes = [Process(pid, 0, name) for pid, name in descendants().items()]
    driver = Process(os.getpid(), 0, "driver")
    for process in (driver, *processes):
        if process.part != "workers":
            part = process.name if process is driver else process.part
            found[f"{part}"] += 1
            found[f"{part}: descriptors"] += len(descriptors(process.pid))
            found[f"{part}: threads"] += len(os.listdir(f"/proc/{process.pid}/task"))
    return found


async def test_many_workers_leave_nothing_in_what_outlives_them() -> None:
    """Each that left a descriptor would show as a hundred more at the end."""

    @aiogpu.remote(num_gpus=0.25, max_calls=1)
    def noop(number: int) -> None:
        """Sent as it is: a worker that imported this module would import pytest."""

    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=()):
        await asyncio.gather(*map(noop.remote, range(50)))
        before = census()
        await asyncio.gather(*map(noop.remote, range(100)))
        await until(lambda: (census() - before).total() < 30)
        assert {"driver", "zygotes", "keepers"} <= census().keys()
