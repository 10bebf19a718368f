"""Running out of device memory, as those see it who wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiogpu
from aiogpu.errors import RemoteTraceback
from aiogpu.observe.status import ShapeStatus
from tests.contract import gpu_oom_tasks as tasks
from tests.support.gate import Gate
from tests.support.until import LIMIT

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.needs("device memory"),
]

OOM = aiogpu.GpuOutOfMemoryError
ORIGINAL = "tests.contract.gpu_oom_tasks.OutOfMemoryError"


async def test_who_waits_is_told_what_was_asked(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1):
        with pytest.raises(OOM) as caught:
            await tasks.run_out.remote()
        error = caught.value
        assert str(error).startswith(
            f"run_out ran out of GPU memory: {ORIGINAL}: {tasks.TEXT.rstrip('.')}. It "
            f"had asked for num_gpus=0.5 without gpu_memory= of GPU 0,"
        )
        assert (error.asked, error.limit, error.peak) == (0, 0, 0)
        assert (error.devices, error.neighbours) == ((0,), ())
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "raise OutOfMemoryError(text)" in str(error.__cause__)
        with pytest.raises(OOM, match="ValueError: the model does not fit"):
            await tasks.run_out_softly.remote()
        # What is no such failure is told as it was.
        with pytest.raises(MemoryError, match="Unable") as other:
            await tasks.run_out_of_main_memory.remote()
        assert type(other.value) is MemoryError
        with pytest.raises(tasks.OutOfMemoryError):
            await tasks.fail_without_a_gpu.remote()
        assert (await aiogpu.available_resources())["GPU"] == 1.0


async def test_streams_and_chunks_and_children(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1):
        stream = tasks.yield_and_run_out.remote()
        assert await anext(stream) == 1
        with pytest.raises(OOM, match=r"^yield_and_run_out ran out"):
            await anext(stream)
        told, devices = await tasks.start_and_catch.remote()
        assert told.startswith("run_out ran out of GPU memory")
        assert devices == (0,)
        with pytest.raises(OOM, match=r"^run_out ran out of GPU memory") as passed:
            await tasks.start_and_fail.remote()
        assert passed.value.neighbours == ("start_and_fail",)
        with pytest.raises(OOM, match=r"^double ran out of GPU memory"):
            assert [each async for each in tasks.double.map(range(9), chunk=3)]


async def test_actors(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=2):
        model, soft = tasks.Model.remote(), tasks.AsyncModel.remote()
        with pytest.raises(
            OOM, match=r"^Model.predict ran out of GPU memory"
        ) as caught:
            await model.predict.remote()
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert await model.fine.remote() == "fine"
        with pytest.raises(OOM, match=r"^AsyncModel.predict ran out"):
            await soft.predict.remote()
        stream = soft.items.remote()
        assert await anext(stream) == 1
        with pytest.raises(OOM, match=r"^AsyncModel.items ran out"):
            await anext(stream)
        broken = tasks.Model.remote(tasks.TEXT)
        with pytest.raises(aiogpu.ActorDiedError, match="GpuOutOfMemoryError") as died:
            await broken.fine.remote()
        assert isinstance(died.value.__cause__, OOM)
        assert died.value.__cause__.devices == (1,)


async def test_retries_go_by_either_name(tmp_path: Path, address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1):
        assert await tasks.run_out_once.remote(str(tmp_path / "a")) == "second"
        ours = tasks.run_out_once.options(retry_exceptions=[OOM])
        assert await ours.remote(str(tmp_path / "b")) == "second"
        other = tasks.run_out_once.options(retry_exceptions=[KeyError])
        with pytest.raises(OOM):
            await other.remote(str(tmp_path / "c"))


@pytest.mark.needs("processes")
async def test_one_more_try_with_a_gpu_of_its_own(
    tmp_path: Path, address: str, gate: Gate
) -> None:
    beside = tasks.run_out_beside_others.options(gpu_memory="20GiB")
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1, gpu_memory="80GiB"):
        neighbour = tasks.hold.remote(gate.path)
        await gate.entered("hold")
        handle = beside.remote(str(tmp_path / "a"), 1)
        shapes: tuple[ShapeStatus, ...] = ()
        async with asyncio.timeout(LIMIT):
            while not shapes:
                await asyncio.sleep(0)
                shapes = (await aiogpu.status()).shapes
        assert shapes[0].request["GPU"] == 1.0, "it waits for the whole GPU"
        gate.release("hold")
        assert await neighbour == "hold"
        assert await handle == (1, None, 1.0), "all of it, without a limit"
        with pytest.raises(OOM, match=r"It had GPU 0 .* to itself") as caught:
            await beside.remote(str(tmp_path / "b"), 2)
        assert ", tried once more with a GPU of its own, ran out" in str(caught.value)
        assert caught.value.limit == 0
        assert (tmp_path / "b").stat().st_size == 2, "once, and no more"
        with pytest.raises(OOM):
            await beside.options(retry_oom=None).remote(str(tmp_path / "c"), 1)


@pytest.mark.needs("processes")
async def test_a_try_alone_does_not_wait_for_an_actors_end(
    tmp_path: Path, address: str
) -> None:
    """[B24] What is held for life is never waited for."""
    beside = tasks.run_out_beside_others.options(gpu_memory="20GiB")
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1, gpu_memory="80GiB"):
        model = tasks.Model.remote()
        assert await model.fine.remote() == "fine"
        with pytest.raises(OOM) as caught:
            await beside.remote(str(tmp_path / "a"), 1)
        assert caught.value.neighbours == ("Model",)
