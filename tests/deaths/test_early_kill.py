"""[B33] `kill(no_restart=False)` of an actor whose constructor has not begun."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import psutil
import pytest

import aiogpu
from tests.until import until


@aiogpu.remote(max_restarts=1)
class Restarted:
    def pid(self) -> int:
        return os.getpid()


@aiogpu.remote(max_calls=1)
def once() -> None:
    """Have the node keep spare workers, of which an actor takes one."""


def leaves() -> list[psutil.Process]:
    """The processes without children: the workers, and the keepers that have none."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not process.children():
                found.append(process)
    return found


@pytest.mark.fresh
@pytest.mark.usefixtures("no_leaks")
async def test_it_costs_no_restart() -> None:
    async with aiogpu.init(num_cpus=1) as node:
        await once.remote()
        await until(lambda: len(leaves()) >= 2)
        stopped = leaves()
        for process in stopped:
            process.suspend()
        actor = Restarted.remote()
        await until_held(node)
        aiogpu.kill(actor, no_restart=False)
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        first = await actor.pid.remote()
        assert first in {process.pid for process in stopped}
        aiogpu.kill(actor, no_restart=False)
        assert await actor.pid.remote() != first


async def until_held(node: aiogpu.Session) -> None:
    """Wait until the actor has its worker, so that its process was told of it."""
    async with asyncio.timeout(20):
        while not any(one.worker for one in (await node.status()).actors):
            await asyncio.sleep(0)
