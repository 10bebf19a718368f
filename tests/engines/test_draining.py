"""A node that is being stopped: who may still come, what it waits for, what it says."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aiogpu
from aiogpu.api.node import Opening
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine
from tests.engines import tasks
from tests.gate import Gate
from tests.until import LIMIT, until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


class Here:
    """A node of this process, which it joins by its socket as others would.

    Attributes:
        engine: the node.
        path: of its socket.
    """

    def __init__(self, engine: LocalEngine, path: str) -> None:
        self.engine = engine
        self.path = path

    def join(self) -> aiogpu.api.node.Opening:
        """This program works there."""
        return aiogpu.init(address=self.path, log_to_driver=False)

    def looks(self) -> Opening:
        """This program only looks."""
        return Opening(self.path, NodeOptions(only_looks=True), False)


@pytest.fixture
async def here(no_leaks: None, runtime_directory: Path) -> AsyncIterator[Here]:
    engine = LocalEngine(
        NodeOptions(num_cpus=2, num_gpus=1, log_to_driver=False),
        asyncio.get_running_loop(),
    )
    await engine.open()
    path = runtime_directory / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(8)
        await engine.serve(listening)
        try:
            yield Here(engine, str(path))
        finally:
            await engine.close()
            path.unlink()


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
    with pytest.raises(aiogpu.NodeError, match="is being stopped, and takes in nobody"):
        await here.join()


async def test_it_waits_for_leases_as_for_tasks(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiogpu")
    async with here.join():
        lease = await aiogpu.lease(num_gpus=1)
        assert await here.engine.drain(0.01) == "1 lease"
        draining = asyncio.create_task(here.engine.drain(LIMIT))
        with pytest.raises(aiogpu.NodeClosedError, match="grants nothing"):
            await aiogpu.lease(num_cpus=1)
        assert not draining.done()
        await lease.release()
        assert await draining == ""
    assert "there is still: 1 lease" in caplog.text
