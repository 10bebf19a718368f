"""What a task leaves behind has ended when its share is free, whatever it tried."""

from __future__ import annotations

import os

import psutil
import pytest

import aiogpu
from tests.contract import escape_tasks, tasks
from tests.contract.alive import is_alive
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.mark.parametrize("way", escape_tasks.WAYS)
async def test_nothing_outlives_the_share(way: str, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1) as session:
        scheduler = session._session._engine._open_driver.scheduler  # type: ignore[attr-defined]
        # Some of them keep their worker from ending until it is made to.
        scheduler.config = scheduler.config._replace(exit_grace=0.3)
        handle = escape_tasks.leave.remote(way, gate.path)
        await gate.entered("left")
        worker = psutil.Process(gate.pids["left"])
        keeper = worker.parent()
        assert keeper is not None
        family = keeper.children(recursive=True)
        gate.release("left")
        left = await handle
        assert {worker.pid, *left} <= {process.pid for process in family}
        # There is one GPU: this task has it when the first one's share is free.
        successor = await tasks.pid.options(num_gpus=1).remote()
        assert [process for process in family if is_alive(process)] == []
        assert successor != worker.pid
        assert await tasks.add.remote(1) == 2


async def test_a_worker_that_becomes_another_program() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        with pytest.raises(aiogpu.WorkerDiedError) as caught:
            await escape_tasks.become_another_program.remote()
        assert caught.value.cause == "disconnected"
        assert not os.path.exists(f"/proc/{caught.value.pid}")
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_one_that_ignores_signals_is_ended_after_its_grace(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.05):
        handle = escape_tasks.never_return_deaf.remote(gate.path)
        await gate.entered("daemon", "deaf")
        family = [psutil.Process(pid) for pid in gate.pids.values()]
        handle.cancel()
        assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert [process for process in family if is_alive(process)] == []
