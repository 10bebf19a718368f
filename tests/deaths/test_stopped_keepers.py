"""A stopped keeper (SIGSTOP) holds up neither its GPU nor the end of the node."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

import aiogpu
from aiogpu.runtime import pool
from tests.engines import tasks
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Escalate after moments, so that the tests need not wait."""
    monkeypatch.setattr(pool, "DEAF", 0.2)
    monkeypatch.setattr(pool, "CLOSE_LIMIT", 0.2)


async def stop_keeper(gate: Gate, name: str) -> int:
    await gate.entered(name)
    keeper = psutil.Process(gate.pids[name]).ppid()
    os.kill(keeper, signal.SIGSTOP)
    return keeper


async def test_its_gpu_serves_the_next_task(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        held = tasks.gated.options(num_gpus=1, cancel_grace=0)
        handle = held.remote(gate.path, "held")
        keeper = await stop_keeper(gate, "held")
        handle.cancel()
        async with asyncio.timeout(60):
            assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert "does not end it within" in caplog.text
        assert not psutil.pid_exists(keeper)
        assert not psutil.pid_exists(gate.pids["held"])


async def test_nor_does_a_stopped_zygote_hold_it_up(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        running = tasks.gated.remote(gate.path, "other")
        handle = tasks.gated.options(num_gpus=1, cancel_grace=0).remote(
            gate.path, "held"
        )
        keeper = await stop_keeper(gate, "held")
        zygote = psutil.Process(keeper).ppid()
        os.kill(zygote, signal.SIGSTOP)
        await gate.entered("other")
        handle.cancel()
        async with asyncio.timeout(60):
            while psutil.pid_exists(gate.pids["held"]) and not is_zombie(gate, "held"):
                await asyncio.sleep(0)
        os.kill(zygote, signal.SIGCONT)
        gate.release("other")
        assert await running == "other"


def is_zombie(gate: Gate, name: str) -> bool:
    return bool(psutil.Process(gate.pids[name]).status() == psutil.STATUS_ZOMBIE)


async def test_it_does_not_hold_up_the_end_of_the_node(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        handle = tasks.gated.options(cancel_grace=0).remote(gate.path, "a")
        keeper = await stop_keeper(gate, "a")
    assert not psutil.pid_exists(keeper)
    assert not psutil.pid_exists(gate.pids["a"])
    with pytest.raises(aiogpu.NodeClosedError):
        await handle
