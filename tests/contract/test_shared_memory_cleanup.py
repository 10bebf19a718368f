"""What tasks leave in `/dev/shm` is removed by trackers before the share is free.

Python's resource tracker, loky's and PyTorch's manager are processes that clean up
after the others have ended.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.runtime.workers import pool
from aiogpu.worker.zygote import keeper, main
from tests.contract import tasks, tracked_tasks
from tests.faults.leftovers import wait_until_gone
from tests.support.gate import Gate
from tests.support.program import start

pytestmark = pytest.mark.usefixtures("no_leaks")

MEMORY = Path("/dev/shm")


@pytest.fixture
def name() -> str:
    return f"aiogpu-test-{uuid.uuid4().hex}"


def named(*parts: str) -> list[str]:
    """Return the names in `/dev/shm` that contain one of these parts."""
    found = os.listdir(MEMORY)
    return [name for name in found if any(part in name for part in parts)]


WAYS = ["return", "error", "death", "exit", "interrupt", "kill", "child"]


@pytest.mark.parametrize("max_calls", [1, 0], ids=["fresh", "reused"])
@pytest.mark.parametrize("way", WAYS)
async def test_memory_of_a_worker_is_removed_with_it(
    way: str, max_calls: int, name: str, gate: Gate
) -> None:
    leave = aiogpu.remote(num_gpus=1, max_retries=0, max_calls=max_calls)(
        tracked_tasks.leave_memory
    )
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.05):
        handle = leave.remote(name, way, gate.path)
        if way in ("interrupt", "kill"):
            await gate.entered("made")
            assert named(name)
            handle.cancel()
        await asyncio.wait([handle])
        if max_calls or way in ("death", "exit", "kill"):
            # There is one GPU: it is free when the worker and its trackers are gone.
            await tasks.pid.options(num_gpus=1).remote()
            assert not named(name)
        else:
            assert named(name), "the process lives on"
    assert not named(name)


async def test_memory_of_an_actor_is_removed_with_it(name: str) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        actor = tracked_tasks.Holder.options(num_gpus=1).remote(name)
        assert await actor.ready.remote()
        assert named(name)
        aiogpu.kill(actor)
        await tasks.pid.options(num_gpus=1).remote()
        assert not named(name)


async def ended_worker(task: Any, way: str) -> int:
    """Run a task in a fresh worker that ends in some way; return its process id."""
    fresh = aiogpu.remote(num_gpus=1, max_retries=0)(task)
    try:
        pid: int = await fresh.remote(way)
    except aiogpu.WorkerDiedError as error:
        pid = error.pid
    await tasks.pid.options(num_gpus=1).remote()
    return pid


@pytest.mark.parametrize("way", ["return", "death"])
async def test_semaphores_of_joblib_are_removed(way: str) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        pid = await ended_worker(tracked_tasks.run_joblib, way)
        assert not named(f"loky-{pid}-", f"joblib_memmapping_folder_{pid}_")


@pytest.mark.parametrize("way", ["return", "death"])
async def test_tensors_shared_by_name_are_removed(way: str) -> None:
    pytest.importorskip("torch")
    before = {path.name for path in Path("/tmp").glob("torch-shm-dir-*")}
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        pid = await ended_worker(tracked_tasks.share_tensor, way)
        assert not named(f"torch_{pid}_")
    # Other programs may share tensors meanwhile.
    after = {path.name for path in Path("/tmp").glob("torch-shm-dir-*")}
    assert not {name for name in after - before if not is_served(name)}


def is_served(directory: str) -> bool:
    """Return whether a manager of PyTorch listens in a directory."""
    return keeper.is_served(f"/tmp/{directory}/manager.sock")


PRELOADED = """
    import asyncio, os, sys
    import aiogpu
    from tests.contract import tracked_tasks

    @aiogpu.remote(num_gpus=1)
    def use():
        from tests.contract.preloaded_memory import memory

        memory.buf[0] += 1
        return memory.buf[0]

    async def main():
        preload = ["tests.contract.preloaded_memory"]
        async with aiogpu.init(num_cpus=1, num_gpus=1, preload=preload):
            leave = aiogpu.remote(num_gpus=1)(tracked_tasks.leave_memory)
            name = os.environ["MEMORY_NAME"]
            for turn in range(1, 4):
                await leave.remote(name + "-of-a-task", "return", "")
                assert await use.remote() == turn
                left = [each for each in os.listdir("/dev/shm") if name in each]
                assert left == [name], left

    aiogpu.run(main())
"""


def test_memory_of_a_preloaded_module_is_removed_with_its_zygote(
    name: str, tmp_path: Path
) -> None:
    """The memory of a task is removed with its worker all the same."""
    program = start(PRELOADED, MEMORY_NAME=name, XDG_RUNTIME_DIR=str(tmp_path))
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    # Python's own warnings of each tracker, as of a program that leaves its memory.
    assert "died unexpectedly" not in err
    assert not named(name)


KILLED = """
    import asyncio, sys
    import aiogpu
    from tests.contract import tracked_tasks

    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            leave = aiogpu.remote(tracked_tasks.leave_memory)
            gpus = int(sys.argv[3])
            hang = leave.options(num_gpus=gpus).remote(sys.argv[1], "kill", sys.argv[2])
            await hang

    aiogpu.run(main())
"""


@pytest.mark.parametrize("gpus", ["0", "1"])
async def test_memory_is_removed_after_the_death_of_the_driver(
    gpus: str, name: str, gate: Gate, tmp_path: Path
) -> None:
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    program = start(KILLED, name, gate.path, gpus, XDG_RUNTIME_DIR=str(directory))
    await gate.entered("made")
    assert named(name)
    program.kill()
    await asyncio.to_thread(program.communicate)
    await asyncio.to_thread(wait_until_gone, 20.0, str(directory))
    assert not named(name)


def test_trackers_have_less_time_than_keepers() -> None:
    limits = (main.KEEPER_LIMIT, pool.END_LIMIT, pool.CLOSE_LIMIT)
    assert min(limits) > keeper.TRACKER_LIMIT
