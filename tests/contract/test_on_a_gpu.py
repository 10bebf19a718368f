"""Tests on a real GPU: frameworks see what was assigned, share it, and release it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import aiogpu
from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.accelerators.nvml.watch import NvmlWatch, is_host_namespace
from tests.contract import gpu_tasks
from tests.contract.gpu_tasks import GIB
from tests.support.gate import Gate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_leaks")]


SLACK = 256 << 20
"""Bytes that a driver may keep for its next context."""


@pytest.fixture(params=["torch", "cupy"])
def framework(request: pytest.FixtureRequest) -> str:
    """The name of an installed framework."""
    name: str = request.param
    pytest.importorskip(name, reason=f"{name} uses the card")
    return name


@pytest.fixture
def needs_torch() -> None:
    """Skip the test without torch."""
    pytest.importorskip("torch", reason="torch uses the card")


@pytest.fixture
async def gpus() -> AsyncIterator[float]:
    """Open a node with all GPUs; return their number."""
    async with aiogpu.init(num_cpus=8, cancel_grace=0.5):
        yield (await aiogpu.cluster_resources())["GPU"]


async def all_back(total: float) -> None:
    """Wait until no share is held; check that NVML lists no process of ours."""
    async with asyncio.timeout(60):
        while (status := await aiogpu.status()).available["GPU"] != total:
            await asyncio.sleep(0)
    assert [device.aside for device in status.devices] == [None] * int(total)
    if is_host_namespace():
        assert not any(device.is_unverified for device in status.devices)


def used() -> int:
    """Return the bytes in use on the first GPU, as NVML tells."""
    watch = NvmlWatch()
    watch.open()
    try:
        in_use = watch.look(Nvidia().devices({}, None)[0]).used
    finally:
        watch.close()
    assert in_use is not None
    return in_use


async def test_each_task_sees_its_own_device_alone(framework: str, gpus: float) -> None:
    """Checked by UUID, with a task on each GPU."""
    cards = {card.id: card.uuid for card in Nvidia().devices({}, None)}
    see = aiogpu.remote(num_gpus=1)(gpu_tasks.see)
    for seen in await asyncio.gather(*(see.remote(framework) for _ in cards)):
        [device] = seen["ids"]
        assert seen["uuids"] == [cards[device]]


async def test_torch_sees_no_gpu_by_default(needs_torch: None, gpus: float) -> None:
    blind = aiogpu.remote(gpu_tasks.see)
    assert (await blind.remote("torch"))["uuids"] == []


async def test_memory_comes_back_after_each_task(framework: str, gpus: float) -> None:
    leak = aiogpu.remote(num_gpus=0.5)(gpu_tasks.leak)
    await leak.remote(framework, GIB)
    await all_back(gpus)
    before = used()
    for _ in range(5):
        await leak.remote(framework, GIB)
        await all_back(gpus)
        assert used() < before + SLACK


async def test_a_leak_does_not_harm_the_next_task(framework: str, gpus: float) -> None:
    leak = aiogpu.remote(num_gpus=1)(gpu_tasks.leak)
    free = aiogpu.remote(num_gpus=1)(gpu_tasks.free_bytes)
    before = await free.remote(framework)
    await leak.remote(framework, before // 2)
    await all_back(gpus)
    assert await free.remote(framework) > before - SLACK


async def test_quarters_run_at_once(framework: str, gpus: float, gate: Gate) -> None:
    """All four run on one GPU, each with its own memory."""
    hold = aiogpu.remote(num_gpus=0.25)(gpu_tasks.compute_at_gate)
    names = [f"quarter-{number}" for number in range(4)]
    waiting = [hold.remote(framework, gate.path, name) for name in names]
    await gate.entered(*names)
    devices = [d for d in (await aiogpu.status()).devices if d.holders]
    assert [len(device.holders) for device in devices] == [4]
    gate.release(*names)
    assert await asyncio.gather(*waiting) == [1] * 4


async def test_a_fork_of_a_zygote_with_torch_uses_cuda(needs_torch: None) -> None:
    """The zygote has imported torch, and its forks can still start CUDA."""
    async with aiogpu.init(preload=("torch",)):
        ask = aiogpu.remote(num_gpus=0.5)(gpu_tasks.was_loaded_before)
        answers = await asyncio.gather(*(ask.remote("torch") for _ in range(4)))
        assert answers == [True] * 4


async def test_cancel_ends_a_long_kernel(
    needs_torch: None, gpus: float, gate: Gate
) -> None:
    """A task that waits in C for the GPU ignores interrupts: it is killed."""
    running = aiogpu.remote(num_gpus=1)(gpu_tasks.spin).remote(gate.path)
    await gate.entered("spins")
    gate.release("spins")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(60):
        compute = aiogpu.remote(num_gpus=gpus)(gpu_tasks.compute)
        assert await compute.remote("torch") == 1


async def test_a_memory_limit_holds(framework: str, gpus: float, gate: Gate) -> None:
    """A task that takes more than it asked for fails; its neighbour goes on."""
    hold = aiogpu.remote(gpu_memory="2GiB")(gpu_tasks.compute_at_gate)
    neighbour = hold.remote(framework, gate.path, "neighbour")
    await gate.entered("neighbour")
    take = aiogpu.remote(gpu_memory="2GiB")(gpu_tasks.leak)
    with pytest.raises(aiogpu.GpuOutOfMemoryError) as caught:
        await take.remote(framework, 4 * GIB)
    error = caught.value
    assert error.asked == error.limit == 2 * GIB
    assert error.neighbours == ("compute_at_gate",)
    assert await take.remote(framework, GIB) == 1
    gate.release("neighbour")
    assert await neighbour == 1


async def test_a_retry_on_a_whole_gpu_succeeds(framework: str, gpus: float) -> None:
    """A quarter of a GPU is too little; a whole GPU is enough."""
    total = Nvidia().devices({}, None)[0].memory
    leak = aiogpu.remote(gpu_tasks.leak).options(num_gpus=0.25, gpu_memory="share")
    take = leak.options(retry_oom="exclusive")
    assert await take.remote(framework, total // 2) == 1
    assert await take.options(retry_oom=None).remote(framework, total // 8) == 1
    with pytest.raises(aiogpu.GpuOutOfMemoryError):
        await take.options(retry_oom=None).remote(framework, total // 2)


async def test_a_task_beyond_its_share_is_ended(needs_torch: None, gate: Gate) -> None:
    """If no framework limits the task, the driver's figures do."""
    async with aiogpu.init(gpu_memory_enforce=True):
        run = aiogpu.remote(
            gpu_memory="2GiB",
            max_retries=0,
            runtime_env={"env_vars": {"CUPY_GPU_MEMORY_LIMIT": "0"}},
        )(_outgrow)
        with pytest.raises(aiogpu.GpuOutOfMemoryError) as caught:
            await run.remote(gate.path)
        assert caught.value.peak > 2 * GIB


def _outgrow(path: str) -> None:
    """Lift the framework's limit, take too much memory, and wait."""
    import torch

    torch.cuda.set_per_process_memory_fraction(1.0)
    gpu_tasks.kept.append(gpu_tasks.allocate("torch", 6 * GIB))
    gpu_tasks.pass_gate(path, "outgrown")
