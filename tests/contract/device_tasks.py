"""Tasks in placements, on several machines and on devices of several kinds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiogpu
from tests.support.gate import pass_gate


@aiogpu.remote(num_gpus=0.25)
def where() -> tuple[list[int | str], str | None, dict[str, float]]:
    context = aiogpu.get_runtime_context()
    resources = dict(context.assigned_resources)
    return aiogpu.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"), resources


@aiogpu.remote
def plain() -> list[int | str]:
    return aiogpu.get_gpu_ids()


@aiogpu.remote(num_gpus=0.5)
async def forever(started: Path) -> None:
    started.touch()
    import asyncio

    await asyncio.get_running_loop().create_future()


@aiogpu.remote(num_gpus=0.5)
async def parent(group: aiogpu.types.Placement) -> list[int | str]:
    return (await where.options(placement=group, bundle=0).remote())[0]


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


VARIABLES = ("CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "FPGA_VISIBLE")


@aiogpu.remote
def seen() -> dict[str, Any]:
    """Return the devices of this task by kind, its resources and the variables."""
    context = aiogpu.get_runtime_context()
    ids = context.get_accelerator_ids()
    return {
        "ids": {kind: held for kind, held in ids.items() if held},
        "resources": dict(context.assigned_resources),
        "knows": sorted(ids),
        "pid": os.getpid(),
        **{name: os.environ.get(name) for name in VARIABLES},
    }


@aiogpu.remote
class Holder:
    """An actor with devices."""

    def seen(self) -> list[str]:
        return aiogpu.get_runtime_context().get_accelerator_ids()["neuron_cores"]


@aiogpu.remote
def starts_another() -> dict[str, list[str]]:
    """Start a task with a device kind that only the node knows."""

    @aiogpu.remote(num_cpus=0, resources={"FPGA": 1})
    def inner() -> dict[str, list[str]]:
        return aiogpu.get_runtime_context().get_accelerator_ids()

    ids = aiogpu.get(inner.remote())
    return {kind: held for kind, held in ids.items() if held}


def _node() -> str:
    return str(aiogpu.get_runtime_context().node_id)


@aiogpu.remote
def node() -> str:
    return _node()


@aiogpu.remote
def gated_node(path: str, name: str) -> str:
    pass_gate(path, name)
    return _node()


@aiogpu.remote
def told_node(path: str, name: str) -> str:
    pass_gate(path, f"{name}@{_node()}")
    return _node()


@aiogpu.remote
def gpus() -> tuple[str, list[Any], str | None]:
    return _node(), aiogpu.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")


@aiogpu.remote
def count(number: int) -> Iterator[int]:
    yield from range(number)


@aiogpu.remote
def wait_for_ever() -> None:
    while True:
        signal.pause()
