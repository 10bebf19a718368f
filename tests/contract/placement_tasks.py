"""What runs in placements."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiogpu


@aiogpu.remote(num_gpus=0.25)
def where() -> tuple[list[int | str], str | None, dict[str, float]]:
    context = aiogpu.get_runtime_context()
    resources = dict(context.assigned_resources)
    return aiogpu.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"), resources


@aiogpu.remote
def plain() -> list[int | str]:
    return aiogpu.get_gpu_ids()


@aiogpu.remote(num_gpus=0.5)
async def forever(begun: Path) -> None:
    begun.touch()
    await asyncio.get_running_loop().create_future()


@aiogpu.remote(num_gpus=0.5)
async def parent(group: aiogpu.types.Placement) -> list[int | str]:
    found = await where.options(placement=group, bundle=0).remote()
    return found[0]


@aiogpu.remote(num_gpus=0.5)
def plain_parent(group: aiogpu.types.Placement) -> list[int | str]:
    return aiogpu.get(where.options(placement=group, bundle=0).remote())[0]


@aiogpu.remote
async def asks_for_one() -> str:
    try:
        aiogpu.placement([{"CPU": 1}])
    except aiogpu.errors.NodeError as error:
        return str(error)
    return ""


@aiogpu.remote
async def waits_for(group: aiogpu.types.Placement) -> str:
    try:
        await group
    except aiogpu.errors.MisuseError as error:
        return str(error)
    return ""


@aiogpu.remote(num_gpus=0.5)
class Actor:
    def where(self) -> list[int | str]:
        return aiogpu.get_gpu_ids()


@aiogpu.remote
def adds(a: int, b: int) -> int:
    return a + b
