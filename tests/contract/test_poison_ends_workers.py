"""A GPU context that is broken for good ends its worker, also where it is reused."""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from aiogpu.runtime.actors.registry import SPOILT
from tests.contract import tasks
from tests.contract.backlog_tasks import break_context
from tests.contract.let_go_tasks import Fragile
from tests.support.until import until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

STICKY = "CUDA error: an illegal memory access was encountered"


async def test_the_next_task_has_another_process() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        pid = tasks.pid.options(num_gpus=0.5, max_calls=0)
        first = await pid.remote()
        assert await pid.remote() == first
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            await break_context.remote(STICKY)
        assert caught.value.args[1] == first
        assert any(f"pid {first}" in note for note in caught.value.__notes__)
        assert await pid.remote() != first
        assert (await aiogpu.available_resources())["GPU"] == 1.0


async def test_an_error_that_does_not_stick_costs_no_worker() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        with pytest.raises(RuntimeError) as caught:
            await break_context.remote("CUDA error: invalid configuration argument")
        assert not hasattr(caught.value, "__notes__")
        pid = tasks.pid.options(num_gpus=0.5, max_calls=0)
        assert await pid.remote() == caught.value.args[1]


async def test_without_a_gpu_the_text_means_nothing() -> None:
    async with aiogpu.init(num_cpus=1):
        with pytest.raises(RuntimeError) as caught:
            await break_context.options(num_gpus=0).remote(STICKY)
        assert await tasks.pid.remote() == caught.value.args[1]


async def test_what_stood_behind_it_runs_once_and_elsewhere() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        await asyncio.gather(
            *(break_context.remote("x") for _ in range(50)), return_exceptions=True
        )
        calls = [
            break_context.remote(STICKY if number % 10 == 0 else "harmless")
            for number in range(200)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {RuntimeError}
        pids = [outcome.args[1] for outcome in outcomes]  # type: ignore[union-attr]
        broken = [pids[number] for number in range(0, 200, 10)]
        assert len(set(broken)) == 20, "each broke a worker of its own"


async def test_it_is_tried_again_in_another_process() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        task = break_context.options(retry_exceptions=True, max_retries=1)
        before = await tasks.pid.options(num_gpus=0.5, max_calls=0).remote()
        with pytest.raises(RuntimeError) as caught:
            await task.remote(STICKY)
        assert caught.value.args[1] != before


async def test_of_an_actor_that_crashes_for_it_the_successor_lives() -> None:
    loop = asyncio.get_running_loop()
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = await Fragile.remote()
        broken, crashed = actor.break_context.remote(), actor.crash.remote()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await broken
        with pytest.raises(aiogpu.ActorDiedError, match="exited with code 3"):
            await crashed
        successor, seen_until = await actor.pid.remote(), loop.time() + 2 * SPOILT
        await until(lambda: loop.time() > seen_until)
        assert await actor.pid.remote() == successor
