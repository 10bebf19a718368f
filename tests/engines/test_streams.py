"""[B17] Generators as tasks: items in order, back-pressure, and an early end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from tests.engines import stream_tasks, tasks
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("no_leaks")


async def idle(cpus: float) -> None:
    """Wait until all resources are free again: the code has stopped."""
    async with asyncio.timeout(30):
        while (await aiogpu.available_resources())["CPU"] != cpus:
            await asyncio.sleep(0)


@pytest.mark.parametrize("generator", stream_tasks.KINDS)
@pytest.mark.parametrize("window", [1, 2, None, 1000])
async def test_all_items_come_in_order(
    address: str, generator: Any, window: int | None
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.options(max_buffered=window).remote(300)
        assert [item async for item in stream] == list(range(300))
        assert [item async for item in generator.remote(0)] == []


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
@pytest.mark.parametrize("window", [1, 5])
async def test_a_producer_is_no_further_ahead_than_its_window(
    address: str, gate: Gate, generator: Any, window: int
) -> None:
    bounded = generator.options(max_buffered=window)
    async with (
        aiogpu.init(address=address, num_cpus=1),
        bounded.remote(gate.path) as stream,
    ):
        for taken in range(12):
            assert await anext(stream) == taken
            await gate.entered(f"begun-{taken + 1}")
            last = max(int(name[6:]) for name in gate.pids)
            assert last <= taken + window


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
async def test_leaving_the_loop_ends_the_producer_at_its_yield(
    address: str, gate: Gate, generator: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        async for item in generator.remote(gate.path):
            if item == 7:
                break
        await gate.entered("exit", "closed")
        await idle(1.0)
        assert await tasks.add.remote(1) == 2, "its worker goes on"
