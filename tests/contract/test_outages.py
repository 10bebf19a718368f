"""[B46] A node that cannot start workers keeps its tasks, says why, and recovers."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import TracebackType

import psutil
import pytest

import aiogpu
from aiogpu.observe.status import OutageStatus
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]


@pytest.fixture
def doom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While it exists, each zygote dies as it imports `preloaded_trouble`."""
    path = tmp_path / "doom"
    monkeypatch.setenv("DOOM", str(path))
    return path


async def end_zygotes() -> None:
    """Kill the zygotes that live; returns when each of them has been seen to end."""
    children = psutil.Process().children()
    zygotes = [each for each in children if each.name() == "aiogpu-zygote"]
    for zygote in zygotes:
        zygote.kill()
    async with asyncio.timeout(60):
        while any(psutil.pid_exists(zygote.pid) for zygote in zygotes):
            await asyncio.sleep(0)


async def outage(failures: int) -> OutageStatus:
    """Wait until so many tries in a row have failed."""
    async with asyncio.timeout(60):
        while True:
            for found in (await aiogpu.status()).outages:
                if found.failures >= failures:
                    return found
            await asyncio.sleep(0)


async def test_tasks_wait_while_zygotes_die(doom: Path) -> None:
    """The plain environment's: four deaths in a row once broke the node for good."""
    async with aiogpu.init(
        num_cpus=4, num_gpus=1, preload=["tests.contract.preloaded_trouble"]
    ):
        assert await tasks.add.remote(1) == 2
        doom.touch()
        await end_zygotes()
        handles = [
            tasks.add.options(max_calls=1, max_retries=0, num_gpus=0.5).remote(n)
            for n in range(10)
        ]
        found = await outage(4)
        assert "the zygote ended with status -9" in found.reason
        assert found.seconds > 0
        assert not any(handle.done() for handle in handles)
        seen = await aiogpu.status()
        assert seen.waiting_count == len(handles)
        assert seen.available["GPU"] == 1, "what waits holds nothing"
        assert str(found).startswith("no worker can be started: the zygote ended with")
        assert "no worker can be started" in str(seen)
        assert "no worker can be started" in repr(seen)
        assert "no worker can be started" in seen.shapes[0].reason
        why = await handles[-1].why()
        assert why.outage is not None
        assert "add (task" in str(why)
        assert "for a worker\n  no worker can be started: the zygote" in str(why)
        doom.unlink()
        assert await asyncio.gather(*handles) == [n + 1 for n in range(10)]
        assert (await aiogpu.status()).outages == ()


async def test_what_can_be_started_goes_past(doom: Path) -> None:
    """One environment's zygotes die; others' tasks, and its own workers, go on."""
    broken = {"env_vars": {"DOOM": str(doom), "PYTHONHASHSEED": "1"}}
    sound = {"env_vars": {"DOOM": "", "PYTHONHASHSEED": "2"}}
    preload = ["tests.contract.preloaded_trouble"]
    async with aiogpu.init(num_cpus=1, num_gpus=0, preload=preload):
        doom.touch()
        waiting = [
            tasks.add.options(runtime_env=broken, priority=1).remote(n)
            for n in range(2)
        ]
        found = await outage(1)
        assert found.variables == ("DOOM", "PYTHONHASHSEED")
        assert "for tasks with DOOM, PYTHONHASHSEED: " in str(found)
        passing = tasks.add.options(runtime_env=sound)
        assert await passing.remote(1) == 2
        assert await asyncio.gather(*(passing.remote(n) for n in range(3))) == [1, 2, 3]
        assert await tasks.add.remote(1) == 2
        assert not any(handle.done() for handle in waiting)
        doom.unlink()
        assert await asyncio.gather(*waiting) == [1, 2]


async def test_a_cancelled_task_leaves_the_queue_of_an_outage(doom: Path) -> None:
    async with aiogpu.init(
        num_cpus=1, num_gpus=0, preload=["tests.contract.preloaded_trouble"]
    ):
        doom.touch()
        await end_zygotes()
        handle = tasks.add.remote(1)
        expiring = tasks.add.options(timeout=0.2).remote(1)
        await outage(2)
        handle.cancel()
        with pytest.raises(aiogpu.TaskTimeoutError):
            await expiring
        async with asyncio.timeout(60):
            while (await aiogpu.status()).outages:
                await asyncio.sleep(0)


def tracebacks() -> int:
    """How many traceback objects there are, each of which keeps a frame."""
    gc.collect()
    return sum(isinstance(each, TracebackType) for each in gc.get_objects())


async def test_an_interpreter_that_fails_by_itself_is_an_error_each_time() -> None:
    """Each error is a new one: one that is raised again and again keeps all frames."""
    nowhere = {"env_vars": {"PYTHONHOME": "/nonexistent"}}
    broken = tasks.add.options(runtime_env=nowhere, max_retries=0)

    async def fail() -> int:
        with pytest.raises(aiogpu.WorkerDiedError, match="the zygote ended with st"):
            await broken.remote(1)
        return tracebacks()

    async with aiogpu.init(num_cpus=1, num_gpus=0):
        kept = [await fail() for _ in range(12)]
        assert kept[-1] <= kept[2], kept
        assert await tasks.add.remote(1) == 2


async def test_a_worker_waits_for_as_long_as_its_zygote_imports(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import has a limit of its own, which is longer than that of a start."""
    limit = 0.2
    monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", limit)
    held = tasks.add.options(runtime_env={"env_vars": {"HOLD": gate.path}})
    preload = ["tests.contract.preloaded_trouble"]
    async with aiogpu.init(num_cpus=1, num_gpus=0, preload=preload):
        waiting = held.remote(1)
        await gate.entered("import")
        done, _ = await asyncio.wait({waiting}, timeout=5 * limit)
        assert not done
        monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", 60.0)
        gate.release("import")
        assert await waiting == 2
