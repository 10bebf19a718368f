"""A node that is being stopped: who may still come, what it waits for, what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.node_here import Here, node_here
from tests.support.gate import Gate
from tests.support.until import LIMIT, until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
async def here(no_leaks: None, runtime_directory: Path) -> AsyncIterator[Here]:
    async with node_here(runtime_directory) as opened:
        yield opened


async def test_it_says_so_to_who_looks_and_lets_in_nobody_else(
    here: Here, gate: Gate
) -> None:
    async with here.join():
        assert (await aiogpu.status()).draining is None
        running = tasks.gated.remote(gate.path, "a")
        await gate.entered("a")
        draining = asyncio.create_task(here.engine.drain(LIMIT))
        await until(lambda: here.engine._supervisor.clients.is_draining)
        told = await aiogpu.status()
        assert told.draining is not None
        assert 0 < told.draining <= LIMIT
        gate.release("a")
        assert await running == "a"
        assert await draining == ""
    async with here.looks() as looker:
        assert "is being stopped: no new work" in str(await looker.status())
    with pytest.raises(
        aiogpu.errors.NodeError, match="is being stopped, and takes in nobody"
    ):
        await here.join()


async def test_it_waits_for_leases_as_for_tasks(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiogpu")
    async with here.join():
        lease = await aiogpu.lease(num_gpus=1)
        assert await here.engine.drain(0.01) == "1 lease"
        draining = asyncio.create_task(here.engine.drain(LIMIT))
        with pytest.raises(aiogpu.errors.NodeClosedError, match="grants nothing"):
            await aiogpu.lease(num_cpus=1)
        assert not draining.done()
        await lease.release()
        assert await draining == ""
    assert "there is still: 1 lease" in caplog.text
