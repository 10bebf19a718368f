"""What tasks with GPUs find: limits of memory, CPUs near their GPUs, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiogpu
from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.core.model.request import Device
from aiogpu.runtime.devices import binding as affinity
from aiogpu.runtime.devices import binding as mps
from tests.contract import gpu_limit_tasks as tasks
from tests.unit.worker.test_gpu_memory import TORCH_SOURCE as TORCH

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

GIB = 1 << 30


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logical GPU with memory, and a place on the bus."""
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
async def test_limits_reach_the_frameworks(
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
async def test_threads_go_by_the_cpus_of_a_task_with_gpus(
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
async def test_a_worker_is_used_again_for_the_same_limit_alone() -> None:
    name = "CUPY_GPU_MEMORY_LIMIT"
    small = tasks.variables.options(gpu_memory="1GiB", max_calls=0)
    large = tasks.variables.options(gpu_memory="2GiB", max_calls=0)
    async with aiogpu.init(num_cpus=2):
        for task, limit in ((small, GIB), (large, 2 * GIB), (small, GIB)):
            assert await task.remote(name) == {name: str(limit)}


async def test_shares_are_told_to_an_mps_server(
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
