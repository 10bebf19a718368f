"""What comes on Ray to a process that waits for nothing: it keeps nothing of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from aiogpu.client.current import current
from tests.contract.let_go_tasks import Model
from tests.support.until import LIMIT

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("rayed")]


@aiogpu.remote
class Maker:
    """Gives models away that have their GPU."""

    def __init__(self) -> None:
        self.made = 0

    async def make(self) -> list[Any]:
        model = await Model.remote()
        self.made += 1
        return [model]

    async def count(self) -> int:
        return self.made


class Leaving:
    """Asks, and waits for no answer."""

    def leave(self, maker: Any) -> None:
        maker.make.remote()

    def leave_many(self, maker: Any) -> None:
        for _ in range(100):
            maker.count.remote()

    def waiting(self) -> int:
        """How many calls have not ended, as this process sees it."""
        client: Any = current.client
        return len(client.calls.live)


Actor = aiogpu.remote(Leaving)


@aiogpu.remote
def leave(maker: Any) -> None:
    Leaving().leave(maker)


@pytest.mark.parametrize("asker", ["actor", "task"])
async def test_an_answer_that_nobody_looks_at(asker: str) -> None:
    """It is a handle, and its actor has the GPU until that goes."""
    async with aiogpu.init(address="ray", num_cpus=4, num_gpus=1):
        maker, idle = await Maker.remote(), await Actor.remote()
        await (idle.leave if asker == "actor" else leave).remote(maker)
        async with asyncio.timeout(LIMIT):
            while await maker.count.remote() < 1:
                await asyncio.sleep(0)
            await Model.remote()


async def test_calls_of_an_actor_that_nobody_waits_for_do_not_pile_up() -> None:
    async with aiogpu.init(address="ray", num_cpus=4):
        maker, idle = await Maker.remote(), await Actor.remote()
        await idle.leave_many.remote(maker)
        async with asyncio.timeout(LIMIT):
            while await idle.waiting.remote():
                await asyncio.sleep(0)
