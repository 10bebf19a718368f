"""[B28] Tasks with variables of their own, too, find a process that stands ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiogpu
from tests.contract.node_here import node_here
from tests.contract.tasks import pid

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]


async def ready() -> set[int]:
    """Wait until two workers stand ready and nothing runs; gives their pids.

    Nothing is learnt to import here: a zygote that is replaced takes its spares with
    it, and has others only after the next task, which is not what is asked for.
    """
    until = asyncio.get_running_loop().time() + 30
    while True:
        workers = (status := await aiogpu.status()).workers
        if len(workers) == 2 and all(each.state == "idle" for each in workers):
            return {each.pid for each in workers}
        assert asyncio.get_running_loop().time() < until, status
        await asyncio.sleep(0)


async def test_env_vars() -> None:
    isolated = pid.options(max_calls=1, runtime_env={"env_vars": {"X": "1"}})
    async with aiogpu.init(num_cpus=2, num_gpus=0, spare_workers=2, preload=[]):
        for _ in range(3):
            await isolated.remote()
            spares = await ready()
            assert await isolated.remote() in spares


@pytest.mark.parametrize("variables", [{}, {"X": "1"}])
async def test_a_program_that_has_joined(
    variables: dict[str, str], runtime_directory: Path
) -> None:
    isolated = pid.options(max_calls=1, runtime_env={"env_vars": variables})
    async with node_here(runtime_directory, learns=False) as here, here.join():
        for _ in range(3):
            await isolated.remote()
            spares = await ready()
            assert await isolated.remote() in spares
