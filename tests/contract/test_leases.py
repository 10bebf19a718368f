"""Leases for code that is no task, on every engine."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from pathlib import Path

import pytest

import aiogpu
from tests.contract import tasks
from tests.support.until import LIMIT

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.needs("leases"),
    pytest.mark.either_loop,
]


async def until_free(name: str, amount: float) -> None:
    async with asyncio.timeout(LIMIT):
        while (await aiogpu.available_resources())[name] != amount:
            await asyncio.sleep(0)


async def until_waits(lease: aiogpu.types.Lease) -> aiogpu.types.Why:
    async with asyncio.timeout(LIMIT):
        while not (repr(lease).endswith("waiting>") and (why := await lease.why())):
            await asyncio.sleep(0)
        while why.state != "waiting":
            why = await lease.why()
    return why


async def test_a_lease_keeps_others_away_and_says_where(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=2, num_cpus=2):
        async with aiogpu.lease(num_gpus=1, name="mine") as gpu:
            assert gpu.is_held
            assert gpu.ids == [0]
            assert gpu.accelerators == {"GPU": [0]}
            assert gpu.environ["CUDA_VISIBLE_DEVICES"] == "0"
            assert gpu.gpu_memory == 0
            assert repr(gpu) == "<Lease mine held>"
            assert (await aiogpu.available_resources())["GPU"] == 1
            status = await aiogpu.status()
            (task,) = [task for task in status.tasks if task.is_lease]
            assert (task.name, task.state, task.pid) == ("mine", "running", os.getpid())
            assert status.devices[0].holders[0].task == "mine"
            assert (await gpu.why()).state == "running"
        assert not gpu.is_held
        await gpu.release()
        await until_free("GPU", 2)


async def test_a_lease_waits_and_says_why(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        held = await aiogpu.lease(num_gpus=1, name="first")
        second = aiogpu.lease(num_gpus=0.5, name="second")
        waiting = asyncio.ensure_future(second)
        why = await until_waits(second)
        assert "held by first" in str(why)
        status = await aiogpu.status()
        assert [task.name for task in status.waiting] == ["second"]
        await held.release()
        assert (await waiting).ids == [0]
        await second.release()


async def test_memory_is_limited_as_for_a_task(address: str) -> None:
    async with (
        aiogpu.init(address=address, num_gpus=1, gpu_memory="8GiB"),
        aiogpu.lease(gpu_memory="2GiB") as gpu,
    ):
        assert gpu.gpu_memory == 2 << 30
        assert gpu.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"


async def test_what_is_given_up_while_it_waits_holds_nothing(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        async with aiogpu.lease(num_gpus=1):
            with pytest.raises(aiogpu.TaskTimeoutError, match=r"timeout of 0\.01 s"):
                await aiogpu.lease(num_gpus=1, timeout=0.01)
            second = aiogpu.lease(num_gpus=1)
            waiting = asyncio.ensure_future(second)
            await until_waits(second)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not (await aiogpu.status()).waiting
        await until_free("GPU", 1)


async def test_what_can_never_be_is_refused(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        with pytest.raises(aiogpu.InfeasibleError, match="GPU 2 of 1"):
            await aiogpu.lease(num_gpus=2)
        with pytest.raises(aiogpu.errors.MisuseError, match="awaited before"):
            async with aiogpu.lease(num_gpus=1) as gpu:
                await gpu


async def test_a_task_takes_its_turn_after_a_lease(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        async with aiogpu.lease(num_gpus=1):
            handle = tasks.add.options(num_gpus=1).remote(1, 2)
            why = await handle.why()
            assert not handle.done()
            assert why.state in ("waiting", "opening")
        assert await handle == 3


async def test_a_forgotten_lease_is_given_back(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        gpu = await aiogpu.lease(num_gpus=1, name="forgotten")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del gpu
            gc.collect()
        assert any("forgotten was never released" in str(w.message) for w in caught)
        await until_free("GPU", 1)


async def test_a_lease_ends_with_its_node(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        gpu = await aiogpu.lease(num_gpus=1)
        lost = asyncio.ensure_future(gpu.lost())
        await asyncio.sleep(0)
    assert isinstance(await lost, aiogpu.errors.NodeClosedError)
    assert not gpu.is_held
    await gpu.release()


@pytest.mark.needs("processes")
async def test_it_is_held_until_its_processes_have_ended(
    address: str, tmp_path: Path
) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        async with aiogpu.lease(num_gpus=1) as gpu:
            started = await asyncio.create_subprocess_exec(
                "sleep", "60", env={**os.environ, **gpu.environ}
            )
        async with asyncio.timeout(LIMIT):
            while True:
                (task,) = (await aiogpu.status()).tasks
                if task.state == "stopping":
                    break
        assert (await aiogpu.available_resources())["GPU"] == 0
        started.kill()
        await until_free("GPU", 1)
        await started.wait()


@pytest.mark.either_loop
async def test_a_task_has_what_its_options_say(address: str) -> None:
    @aiogpu.remote
    async def inside() -> None:
        await aiogpu.lease(num_gpus=1)

    async with aiogpu.init(address=address, num_gpus=1):
        with pytest.raises(aiogpu.errors.NodeError, match="inside a task"):
            await inside.remote()
