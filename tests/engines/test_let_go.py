"""An actor ends soon after its last handle, wherever that has been, and no sooner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

import aiogpu
from tests.engines import let_go_tasks
from tests.engines.let_go_tasks import Model, Serial, Soft
from tests.until import LIMIT

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]
CLASSES: list[Any] = [Serial, Soft]


async def gpu_is_free() -> None:
    """Return when no model lives any more."""
    gc.collect()
    async with asyncio.timeout(LIMIT):
        while (await aiogpu.available_resources())["GPU"] != 1:
            await asyncio.sleep(0)


async def test_what_an_idle_actor_was_given_for_a_call() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for holder in CLASSES:
            idle, model = await holder.remote(), await Model.remote()
            assert await idle.take.remote([model]) == 42
            del model
            await gpu_is_free()


async def test_what_an_idle_actor_has_made_and_given_away() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for maker in CLASSES:
            idle = await maker.remote()
            (model,) = await idle.make.remote()
            assert await model.answer.remote() == 42
            del model
            await gpu_is_free()


async def test_what_an_actor_was_given_as_a_result() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        for asker in CLASSES:
            maker, idle = await Serial.remote(), await asker.remote()
            for _ in range(2):
                assert await idle.ask.remote(maker) == 42
                await gpu_is_free()


async def test_what_a_task_was_given_as_a_result() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        maker = await Serial.remote()
        for _ in range(2):
            assert await let_go_tasks.ask.remote(maker) == 42
            await gpu_is_free()


async def test_what_an_actor_has_found_twice() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        idle, model = await Serial.remote(), await Model.options(name="it").remote()
        assert await idle.find_twice.remote("it") == 84
        del model
        await gpu_is_free()


@pytest.mark.parametrize(
    "pickle_it",
    [
        let_go_tasks.send_with_a_lock,
        let_go_tasks.pickle_by_hand,
        lambda model: aiogpu.put([model]),
    ],
    ids=["unpicklable", "by hand", "put"],
)
async def test_what_was_pickled_and_not_sent(pickle_it: Callable[[Any], None]) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        model, value = await Model.remote(), None
        try:
            value = pickle_it(model)
        except aiogpu.SerializationError:
            assert value is None
        del model
        await gpu_is_free()


async def test_a_result_keeps_it_whatever_another_call_sends_meanwhile() -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        maker = await Soft.remote()
        made = maker.make_at_the_gate.remote()
        while await maker.count.remote() < 1:
            await asyncio.sleep(0)
        called = maker.call_at_the_gate.remote()
        while await maker.count.remote() < 2:
            await asyncio.sleep(0)
        await maker.open.remote()
        await called
        # The task that was sent in the same turn has ended; what it held has gone.
        for _ in range(20):
            await maker.count.remote()
        (model,) = await made
        assert await model.answer.remote() == 42
