"""What is an inline node's own about actors: their objects are in this process."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from tests.engines.actor_classes import Async, Broken, Counter

pytestmark = pytest.mark.usefixtures("no_leaks")

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.Session]:
    before = os.environ.get(VISIBLE)
    async with aiogpu.init(
        address="inline", num_cpus=1, num_gpus=2, cancel_grace=0.1
    ) as session:
        yield session
    assert os.environ.get(VISIBLE) == before
    assert aiogpu.get_runtime_context().worker_id == 0
    with pytest.raises(aiogpu.MisuseError):
        aiogpu.exit_actor()


async def test_an_actor_is_an_object_of_this_process(node: aiogpu.Session) -> None:
    counter = Counter.options(num_gpus=0.5).remote(5)
    assert await counter is counter
    assert await counter.add.remote() == 6
    assert await counter.pid.remote() == os.getpid()
    place = await counter.where.remote()
    assert place["ids"] == [0]
    assert place["visible"] == "0"
    assert (await aiogpu.available_resources())["GPU"] == 1.5
    with pytest.raises(KeyError, match="boom"):
        await counter.fail.remote(KeyError, "boom")
    assert await Broken.remote(OSError)._link.ended() is None
    with pytest.raises(aiogpu.ActorDiedError, match="OSError: no model"):
        await Broken.remote(OSError)
    del counter
    gc.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await aiogpu.available_resources())["GPU"] == 2.0


async def test_async(node: aiogpu.Session) -> None:
    actor: Any = Async.remote()
    assert await asyncio.gather(actor.later.remote(), actor.add.remote()) == [2, 1]
    assert await actor.hidden_coroutine.remote() == 12
