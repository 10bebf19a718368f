"""A task that goes on for long: what it has let go of is free meanwhile."""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from aiogpu.engines.local import LocalEngine
from aiogpu.serialization.references import SHARED_FROM
from tests.contract import long_tasks
from tests.support.gate import Gate
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

COUNT = 8


@pytest.mark.parametrize("way", ["items", "results", "values"])
@pytest.mark.parametrize("task", [long_tasks.take, long_tasks.take_softly])
async def test_values_that_it_has_had(task: object, way: str, gate: Gate) -> None:
    assert isinstance(task, aiogpu.types.RemoteFunction)
    async with aiogpu.init(num_cpus=1) as session:
        taking = task.remote(gate.path, way, COUNT, SHARED_FROM)
        await gate.entered("taken")
        engine = session._session._engine
        assert isinstance(engine, LocalEngine)
        memory = engine.store.memory
        # The last one may be told with what is said next.
        await until(lambda: memory.used <= 2 * SHARED_FROM)
        gate.release("taken")
        await taking


async def test_an_actor_that_it_has_dropped(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        taking = long_tasks.drop_an_actor.remote(gate.path)
        await gate.entered("taken")
        async with asyncio.timeout(20):
            while (await aiogpu.status()).actors:
                pass
        gate.release("taken")
        await taking
