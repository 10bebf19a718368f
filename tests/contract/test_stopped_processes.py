"""[B15] A keeper or a zygote that is stopped holds up neither a GPU nor the node's end.

Somebody else stops them: SIGSTOP, a debugger, or the freezer of their cgroup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.alive import is_alive
from tests.support.cgroups import PLACE, groups_of, needs_cgroup
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def stop_keeper(worker: psutil.Process) -> None:
    keeper = worker.parent()
    assert keeper is not None
    keeper.suspend()


def stop_keeper_and_zygote(worker: psutil.Process) -> None:
    keeper = worker.parent()
    assert keeper is not None
    zygote = keeper.parent()
    assert zygote is not None
    keeper.suspend()
    zygote.suspend()


def freeze_slot(worker: psutil.Process) -> None:
    """Its keeper, itself and all that it has started."""
    assert PLACE.directory is not None
    (node,) = groups_of(psutil.Process().pid)
    (group,) = (
        procs.parent
        for procs in Path(PLACE.directory, node).glob("*/cgroup.procs")
        if str(worker.pid) in procs.read_text().split()
    )
    (group / "cgroup.freeze").write_text("1")


WAYS = [stop_keeper, pytest.param(freeze_slot, marks=needs_cgroup)]
Stop = Callable[[psutil.Process], None]


@pytest.mark.parametrize("stop", WAYS)
async def test_the_gpu_of_a_task_that_is_cancelled(stop: Stop, gate: Gate) -> None:
    """It is free when all that the task has started is gone, and not for ever taken."""
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.1):
        task = tasks.leave_daemon_and_wait.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path)
        await gate.entered("daemon", "task")
        daemon = psutil.Process(gate.pids["daemon"])
        stop(psutil.Process(gate.pids["task"]))
        handle.cancel()
        async with asyncio.timeout(60):
            assert await tasks.add.options(num_gpus=1).remote(1) == 2
        assert not is_alive(daemon)


async def test_the_gpu_of_a_task_that_has_ended(gate: Gate) -> None:
    """The worker leaves by itself then, and its keeper is the one to say so."""
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        handle = tasks.gated.options(num_gpus=1).remote(gate.path, "in")
        await gate.entered("in")
        stop_keeper(psutil.Process(gate.pids["in"]))
        gate.release("in")
        assert await handle == "in"
        async with asyncio.timeout(60):
            assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_its_zygote_is_stopped_as_well(gate: Gate) -> None:
    """Nobody is left to say that the worker has ended; its group is empty."""
    async with aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.1):
        # The CPU worker serves afterwards: a stopped zygote starts no other.
        assert await tasks.add.remote(1) == 2
        handle = tasks.gated.options(num_gpus=1, max_retries=0).remote(gate.path, "in")
        await gate.entered("in")
        stop_keeper_and_zygote(psutil.Process(gate.pids["in"]))
        handle.cancel()
        async with asyncio.timeout(60):
            while (await aiogpu.available_resources())["GPU"] != 1:
                await tasks.add.remote(1)


@pytest.mark.parametrize("stop", [*WAYS, stop_keeper_and_zygote])
async def test_closing(stop: Stop, gate: Gate) -> None:
    """It once took 13 seconds; with a zygote that was stopped as well, 18."""
    node = await aiogpu.init(num_cpus=2, num_gpus=1, cancel_grace=0.1)
    handle = tasks.gated.options(num_gpus=1, max_retries=0).remote(gate.path, "in")
    await gate.entered("in")
    stop(psutil.Process(gate.pids["in"]))
    async with asyncio.timeout(11):
        await node.shutdown()
    with pytest.raises((aiogpu.AiogpuError, asyncio.CancelledError)):
        await handle
