"""Who was given an actor, and has failed with it, does not keep it from ending."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import aiogpu
from tests.contract import holder_tasks, tasks

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]
LIMIT = 20


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def has_ended() -> None:
    """Until whoever has a whole GPU has ended."""
    async with asyncio.timeout(LIMIT):
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.whole
@pytest.mark.parametrize("holder", holder_tasks.HOLDERS, ids=lambda one: one.__name__)
async def test_a_task_whose_call_has_failed_lets_go_of_its_actor(holder: Any) -> None:
    """[B32] In a worker that lives on, and whose collector never runs."""
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = holder_tasks.Failing.remote()
        with suppress(ValueError):
            await holder.remote(actor)
        del actor
        await has_ended()


async def test_a_program_whose_call_has_failed_lets_go_of_its_actor() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = holder_tasks.Failing.remote()
        with pytest.raises(ValueError, match="told"):
            await actor.fail.remote()
        with pytest.raises(ValueError, match="told"):
            async for _ in actor.fail_amid.remote():
                pass
        del actor
        await has_ended()
