"""aiogpu, as a node of another process that this program has joined."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import aiogpu
from benchmarks.environments.aiogpu_local import AiogpuLocal
from benchmarks.port import Preload, Programs

FIRST_RESULT = """
from subprocess import run as start
from sys import executable
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from aiogpu import init, remote, run

@remote
def noop(number):
    return None

async def main(path, began):
    async with init(address=path):
        await noop.remote(1)
        print(perf_counter_ns() - began, flush=True)

with TemporaryDirectory(prefix="agb-") as place:
    path = f"{place}/node.sock"
    aiogpu = [executable, "-m", "aiogpu"]
    began = perf_counter_ns()
    options = ["--head", "--num-cpus=1", "--num-gpus=0", f"--socket={path}"]
    start([*aiogpu, "start", *options], capture_output=True, check=True)
    run(main(path, began))
    start([*aiogpu, "stop", f"--socket={path}", "--drain=0"], capture_output=True)
"""


LONGEST: Final = 40
"""Characters of the path in which a socket's own folder is made."""


class AiogpuNode(AiogpuLocal):
    """A service for each workload."""

    name = "node"
    programs = Programs(
        "import aiogpu", "from aiogpu import init, remote", FIRST_RESULT
    )

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def open(
        self, num_cpus: int, num_gpus: int = 0, preload: Preload = None
    ) -> None:
        """Start a service and join it."""
        options = [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}"]
        if preload is not None:
            options.append(f"--preload={','.join(preload)}")
        address = await self._stack.enter_async_context(service(*options))
        await aiogpu.init(address=address, log_to_driver=False)
        self._stack.push_async_callback(aiogpu.shutdown)

    async def close(self) -> None:
        """Leave it and stop it."""
        await self._stack.aclose()


@asynccontextmanager
async def service(*options: str) -> AsyncIterator[str]:
    """A node of another process; gives the path of its socket."""
    usual = tempfile.gettempdir()
    short = usual if len(usual) < LONGEST else "/tmp"  # a socket's path has an end
    with tempfile.TemporaryDirectory(prefix="agb-", dir=short) as place:
        path = f"{place}/node.sock"
        await _aiogpu("start", "--head", f"--socket={path}", *options)
        try:
            yield path
        finally:
            await _aiogpu("stop", f"--socket={path}", "--drain=0")


async def _aiogpu(*words: str) -> None:
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiogpu", *words, stdout=PIPE
    )
    told, _ = await command.communicate()
    assert command.returncode == 0, told
