"""aiogpu: a node inside the program, or a service that the program joins."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, cast

import aiogpu
from benchmarks import tasks
from benchmarks.field.systems import Call, Function, Items, Need, Preload, System, Use
from benchmarks.service import service


class Aiogpu(System):
    """An embedded node."""

    libraries = ("aiogpu", "uvloop", "msgpack", "cloudpickle", "nvidia-ml-py")

    def first_result(self) -> str:
        """Return a program as users write it."""
        return tasks.FIRST_RESULT

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        modules = "auto" if preload is None else preload
        await aiogpu.init(num_cpus=num_cpus, num_gpus=num_gpus, preload=modules)

    async def close(self) -> None:
        await aiogpu.shutdown()

    def task(self, function: Function, need: Need) -> Call:
        """`f.remote`."""
        calls = 1 if need.is_isolated else 0
        remote: Any = aiogpu.remote(num_gpus=need.num_gpus, max_calls=calls)
        return cast("Call", remote(function).remote)

    def taking(self, function: Function) -> Use:
        """`f.remote` with values or handles."""
        return aiogpu.remote(function).remote

    def stream(self, function: Function) -> Items:
        """`f.remote`, whose result is iterated."""
        return cast("Items", aiogpu.remote(function).remote)

    async def actor(self, cls: type) -> Call:
        """`A.remote`."""
        remote_class: Any = aiogpu.remote(cls)
        return cast("Call", (await remote_class.remote()).noop.remote)


class Node(Aiogpu):
    """A service."""

    first_result = System.first_result

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def open(self, num_cpus: int, num_gpus: int, preload: Preload) -> None:
        options = [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}"]
        if preload is not None:
            options.append(f"--preload={','.join(preload)}")
        address = await self._stack.enter_async_context(service(*options))
        await aiogpu.init(address=address, log_to_driver=False)
        self._stack.push_async_callback(aiogpu.shutdown)

    async def close(self) -> None:
        await self._stack.aclose()
