"""Limits of tasks with GPUs, and running out of device memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.core.model.request import Device
from aiogpu.observe.status import ShapeStatus
from aiogpu.runtime.devices import binding as affinity
from aiogpu.runtime.devices import binding as mps
from aiogpu.serialization.exceptions import RemoteTraceback
from aiogpu.types import Node
from tests.contract import gpu_tasks as tasks
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import LIMIT, until_free
from tests.unit.worker.test_gpu_memory import TORCH_SOURCE as TORCH

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.needs("device memory"),
    pytest.mark.aiogpu(num_cpus=4, num_gpus=1),
]


GIB = 1 << 30


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logical GPU with memory and a PCI address."""
    device = Device(0, memory=80 * GIB, pci="00000000:3B:00.0")
    monkeypatch.setattr(Nvidia, "devices", lambda *_: (device,))


@pytest.fixture
def one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A CPU that is near the GPU."""
    cpu = min(os.sched_getaffinity(0))
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(f"{cpu}\n")
    monkeypatch.setattr(affinity, "ROOT", tmp_path)
    return cpu


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU only")
@pytest.mark.usefixtures("one_gpu")
async def test_a_worker_stays_on_the_cpus_near_its_gpus(one_cpu: int) -> None:
    every = sorted(os.sched_getaffinity(0))
    async with aiogpu.init(num_cpus=2):
        assert await tasks.cpus.remote() == ([one_cpu], f"[{one_cpu}]")
        assert await tasks.cpus_without_a_gpu.remote() == every
    async with aiogpu.init(num_cpus=2, cpu_affinity="off"):
        assert await tasks.cpus.remote() == (every, str(every))


@pytest.mark.usefixtures("one_gpu")
async def test_memory_limits_reach_the_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("from torch import cuda as cuda\n")
    (torch / "cuda.py").write_text(TORCH.replace("return 2", "return 1"))
    monkeypatch.syspath_prepend(tmp_path)
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT")
    limited = tasks.variables.options(gpu_memory="8GiB")
    async with aiogpu.init(num_cpus=2):
        found = await limited.remote(*names)
        assert list(found.values()) == ["0.1", str(8 * GIB)]
        found = await tasks.variables.options(gpu_memory="share").remote(*names)
        assert list(found.values()) == ["0.25", str(20 * GIB)]
        assert set((await tasks.variables.remote(*names)).values()) == {None}
        own = limited.options(runtime_env={"env_vars": {names[1]: "1"}})
        assert (await own.remote(names[1]))[names[1]] == "1"
        half = tasks.fractions.options(gpu_memory="40GiB")
        assert await half.remote() == {0: 0.5}
        assert await tasks.fractions.remote() == {}


@pytest.mark.usefixtures("one_gpu")
async def test_a_task_with_gpus_has_as_many_threads_as_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "OMP_NUM_THREADS"
    monkeypatch.delenv(name, raising=False)
    two = tasks.variables.options(num_cpus=2)
    async with aiogpu.init(num_cpus=8):
        assert await two.remote(name) == {name: "2"}
        assert await tasks.variables.remote(name) == {name: "1"}
        holder = tasks.Holder.options(num_cpus=3).remote()
        assert await holder.variable.remote(name) == "3"
        own = two.options(runtime_env={"env_vars": {name: "7"}})
        assert await own.remote(name) == {name: "7"}
    monkeypatch.setenv(name, "5")
    async with aiogpu.init(num_cpus=8):
        assert await two.remote(name) == {name: "5"}


@pytest.mark.usefixtures("one_gpu")
async def test_a_worker_is_reused_only_for_the_same_limit() -> None:
    name = "CUPY_GPU_MEMORY_LIMIT"
    small = tasks.variables.options(gpu_memory="1GiB", max_calls=0)
    large = tasks.variables.options(gpu_memory="2GiB", max_calls=0)
    async with aiogpu.init(num_cpus=2):
        for task, limit in ((small, GIB), (large, 2 * GIB), (small, GIB)):
            assert await task.remote(name) == {name: str(limit)}


async def test_shares_reach_an_mps_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(0, memory=80 * GIB, uuid="GPU-abc")
    monkeypatch.setattr(Nvidia, "devices", lambda *_: (device,))
    os.mkfifo(tmp_path / "control")
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    names = mps.THREADS, mps.MEMORY, "CUDA_VISIBLE_DEVICES"
    limited = tasks.variables.options(gpu_memory="8GiB")
    async with aiogpu.init(num_cpus=2, mps="auto"):
        found = await limited.remote(*names)
        assert list(found.values()) == ["25", "0=8192M", "GPU-abc"]
    async with aiogpu.init(num_cpus=2):
        found = await limited.remote(*names)
        assert list(found.values()) == [None, None, "0"]


OOM = errors.GpuOutOfMemoryError
ORIGINAL = "tests.contract.gpu_tasks.OutOfMemoryError"


@pytest.mark.needs("memory errors")
async def test_an_out_of_memory_error_names_task_and_request(node: Node) -> None:
    caught = await raises(OOM, lambda: tasks.run_out.remote())
    error = caught
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
    # Other errors stay as they are.
    with pytest.raises(MemoryError, match="Unable") as other:
        await tasks.run_out_of_main_memory.remote()
    assert type(other.value) is MemoryError
    await raises(tasks.OutOfMemoryError, lambda: tasks.fail_without_a_gpu.remote())
    await until_free(GPU=1.0)  # the test has no other wait for the worker's end


@pytest.mark.needs("memory errors")
async def test_streams_chunks_and_children_run_out_of_memory(node: Node) -> None:
    stream = tasks.yield_and_run_out.remote()
    assert await anext(stream) == 1
    await raises(OOM, lambda: anext(stream), match=r"^yield_and_run_out ran out")
    told, devices = await tasks.start_and_catch.remote()
    assert told.startswith("run_out ran out of GPU memory")
    assert devices == (0,)
    with pytest.raises(OOM, match=r"^run_out ran out of GPU memory") as passed:
        await tasks.start_and_fail.remote()
    assert passed.value.neighbours == ("start_and_fail",)
    with pytest.raises(OOM, match=r"^double ran out of GPU memory"):
        assert [each async for each in tasks.double.map(range(9), chunk=3)]


@pytest.mark.needs("memory errors")
@pytest.mark.aiogpu(num_cpus=4, num_gpus=2)
async def test_actors_run_out_of_memory(node: Node) -> None:
    model, soft = tasks.Model.remote(), tasks.AsyncModel.remote()
    error = await raises(
        OOM,
        lambda: model.predict.remote(),
        match=r"^Model.predict ran out of GPU memory",
    )
    assert isinstance(error.__cause__, RemoteTraceback)
    assert await model.fine.remote() == "fine"
    with pytest.raises(OOM, match=r"^AsyncModel.predict ran out"):
        await soft.predict.remote()
    stream = soft.items.remote()
    assert await anext(stream) == 1
    await raises(OOM, lambda: anext(stream), match=r"^AsyncModel.items ran out")
    broken = tasks.Model.remote(tasks.TEXT)
    with pytest.raises(errors.ActorDiedError, match="GpuOutOfMemoryError") as died:
        await broken.fine.remote()
    assert isinstance(died.value.__cause__, OOM)
    assert died.value.__cause__.devices == (1,)


@pytest.mark.needs("memory errors")
async def test_either_class_of_the_error_is_retried(node: Node, tmp_path: Path) -> None:
    assert await tasks.run_out_once.remote(str(tmp_path / "a")) == "second"
    ours = tasks.run_out_once.options(retry_exceptions=[OOM])
    assert await ours.remote(str(tmp_path / "b")) == "second"
    other = tasks.run_out_once.options(retry_exceptions=[KeyError])
    await raises(OOM, lambda: other.remote(str(tmp_path / "c")))


@pytest.mark.needs("processes")
async def test_retry_oom_tries_once_more_on_a_whole_gpu(
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
        assert shapes[0].request["GPU"] == 1.0, "the retry waits for the whole GPU"
        gate.release("hold")
        assert await neighbour == "hold"
        assert await handle == (1, None, 1.0), "the whole GPU, without a limit"
        with pytest.raises(OOM, match=r"It had GPU 0 .* to itself") as caught:
            await beside.remote(str(tmp_path / "b"), 2)
        assert ", retried alone on a GPU, ran out" in str(caught.value)
        assert caught.value.limit == 0
        assert (tmp_path / "b").stat().st_size == 2, "once, and no more"
        with pytest.raises(OOM):
            await beside.options(retry_oom=None).remote(str(tmp_path / "c"), 1)


@pytest.mark.needs("processes")
async def test_retry_oom_tries_twice_the_share_and_then_a_whole_gpu(
    tmp_path: Path, address: str
) -> None:
    climbing = tasks.run_out_beside_others.options(
        num_gpus=0.25, gpu_memory="10GiB", retry_oom=["share", "exclusive"]
    )
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1, gpu_memory="80GiB"):
        count, limit, share = await climbing.remote(str(tmp_path / "a"), 1)
        assert (count, share) == (1, 0.5)
        assert limit == str(20 * GIB)
        assert await climbing.remote(str(tmp_path / "b"), 2) == (2, None, 1.0)
        error = await raises(OOM, lambda: climbing.remote(str(tmp_path / "c"), 3))
        assert ", retried alone on a GPU, ran out" in str(error)
        # An actor holds a share for life, so there is no whole GPU.
        model = tasks.Model.remote()
        assert await model.fine.remote() == "fine"
        error = await raises(OOM, lambda: climbing.remote(str(tmp_path / "d"), 3))
        assert ", retried on twice its share, ran out" in str(error)
        assert error.asked == 20 * GIB
        assert (tmp_path / "d").stat().st_size == 2


@pytest.mark.needs("processes")
async def test_retry_oom_does_not_wait_for_an_actors_end(
    tmp_path: Path, address: str
) -> None:
    """An actor holds its share for life."""
    beside = tasks.run_out_beside_others.options(gpu_memory="20GiB")
    async with aiogpu.init(address=address, num_cpus=4, num_gpus=1, gpu_memory="80GiB"):
        model = tasks.Model.remote()
        assert await model.fine.remote() == "fine"
        error = await raises(OOM, lambda: beside.remote(str(tmp_path / "a"), 1))
        assert error.neighbours == ("Model",)
