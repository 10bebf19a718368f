"""[B19] On a real card: a framework sees the assigned device and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.accelerators.nvml.watch import is_host_namespace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_leaks")]


@aiogpu.remote(num_gpus=0.25)
def seen_by_torch() -> dict[str, Any]:
    import torch

    tensor = torch.ones(1 << 20, device="cuda:0")
    properties = torch.cuda.get_device_properties(0)
    return {
        "ids": aiogpu.get_gpu_ids(),
        "count": torch.cuda.device_count(),
        "uuid": f"GPU-{properties.uuid}",
        "sum": float(tensor.sum()),
    }


async def test_torch_sees_the_assigned_device_alone() -> None:
    pytest.importorskip("torch", reason="torch tells what CUDA sees")
    cards = {card.id: card for card in Nvidia().devices({}, None)}
    async with aiogpu.init():
        seen = await seen_by_torch.remote()
    assert seen["count"] == 1
    assert seen["sum"] == float(1 << 20)
    assert cards[seen["ids"][0]].uuid == seen["uuid"]


@pytest.mark.parametrize("share", [1, 0.25])
async def test_a_card_comes_back_after_a_task_of_torchs(share: float) -> None:
    """[B26] NVML lists a real process, and then does not."""
    pytest.importorskip("torch", reason="torch has a context on the card")
    async with aiogpu.init():
        total = (await aiogpu.cluster_resources())["GPU"]
        await seen_by_torch.options(num_gpus=share).remote()
        async with asyncio.timeout(60):
            while (status := await aiogpu.status()).available["GPU"] != total:
                await asyncio.sleep(0)
        assert [device.aside for device in status.devices] == [None] * int(total)
        if is_host_namespace():
            assert not any(device.is_unverified for device in status.devices)


async def test_torch_sees_no_device_without_asking() -> None:
    pytest.importorskip("torch", reason="torch tells what CUDA sees")
    async with aiogpu.init():
        blind = aiogpu.remote(_count_by_torch)
        assert await blind.remote() == 0


def _count_by_torch() -> int:
    import torch

    return int(torch.cuda.device_count())
