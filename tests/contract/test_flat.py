"""Many workers, started and ended: nobody who stays grows by it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

import aiogpu
from aiogpu.linux.procfs import read_numbers
from tests.contract import tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

SLACK = 2 << 10
"""KiB by which a process may grow for reasons of its own: its allocator's pools."""


class Size(NamedTuple):
    """How large a process is."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        numbers = read_numbers(f"/proc/{pid}/status")
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(numbers["RssAnon"], descriptors, numbers["Threads"])


def sizes() -> dict[int, tuple[str, Size]]:
    """Driver, zygotes and keepers."""
    found = {os.getpid(): ("driver", Size.of(os.getpid()))}
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.name()
            if name.startswith(("aiogpu-zygote", "aiogpu-keep")):
                found[process.pid] = (name, Size.of(process.pid))
        except (psutil.NoSuchProcess, KeyError, OSError):
            continue  # a worker, which comes and goes
    return found


async def run(count: int) -> None:
    task = tasks.add.options(num_gpus=0.25)
    results = await asyncio.gather(*(task.remote(number) for number in range(count)))
    assert results == list(range(1, count + 1))


async def settle() -> None:
    """Wait until all shares are free and no worker is about to end."""
    task = tasks.add.options(num_gpus=1)
    assert await task.remote(1) == 2


@pytest.mark.parametrize(
    "count", [150, pytest.param(1000, marks=pytest.mark.slow)], ids=str
)
async def test_who_stays_does_not_grow(count: int) -> None:
    # Without a zygote that learns: its next generation would take its place.
    async with aiogpu.init(num_cpus=4, num_gpus=1, preload=()):
        await run(100)
        await settle()
        before = sizes()
        assert {"driver", "aiogpu-zygote"} <= {name for name, _ in before.values()}
        await run(count)
        await settle()
        after = sizes()
    stayed = before.keys() & after.keys()
    assert len(stayed) >= 3, "driver, zygote and at least one keeper"
    for pid in stayed:
        name, was = before[pid]
        _, now = after[pid]
        told = f"{name}: {was} became {now}"
        assert now.threads == was.threads, told
        assert now.descriptors <= was.descriptors + 2, told
        assert now.memory <= was.memory + SLACK, told
