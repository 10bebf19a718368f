"""Old generations, and zygotes of other environments, that die with workers left."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

import aiogpu
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.wire.messages import Stale
from tests.contract import tasks
from tests.contract.zygote_tasks import flags
from tests.contract.zygote_watch import next_generation, zygotes_of
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


def pid_of(zygote: Zygote) -> int:
    assert zygote._child is not None
    return zygote._child.pid


async def renew(session: aiogpu.types.Node) -> tuple[Zygote, Zygote]:
    """Have another generation serve; gives the old one and the new one."""
    plain = zygotes_of(session).plain
    old = plain.current
    old._events.on_message(old, Stale("a module"))
    await next_generation(plain, old.generation)
    return old, plain.current


async def end_of(zygote: Zygote) -> None:
    async with asyncio.timeout(60):
        while not zygote.is_over:
            await asyncio.sleep(0)


async def test_an_old_generation_ends_with_its_last_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        isolated = tasks.gated.options(num_gpus=0.5)
        running = isolated.remote(gate.path, "running")
        await gate.entered("running")
        old, new = await renew(session)
        fresh = isolated.remote(gate.path, "fresh")
        await gate.entered("fresh")
        assert _zygote_above(gate.pids["fresh"]) == pid_of(new)
        assert _zygote_above(gate.pids["running"]) == pid_of(old)
        assert not old.is_over
        gate.release("running", "fresh")
        assert await asyncio.gather(running, fresh) == ["running", "fresh"]
        await end_of(old)
        assert old.status == 0
        assert repr(zygotes_of(session)).startswith("<Zygotes ")


def _zygote_above(worker: int) -> int:
    return psutil.Process(worker).parents()[1].pid


async def test_an_old_generation_that_dies_harms_no_worker(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        isolated = tasks.gated.options(num_gpus=1)
        running = isolated.remote(gate.path, "running")
        await gate.entered("running")
        old, new = await renew(session)
        os.kill(pid_of(old), signal.SIGKILL)
        await end_of(old)
        gate.release("running")
        assert await running == "running"
        assert zygotes_of(session).plain.current is new
        assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_a_keeper_of_an_old_generation_that_dies(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1, preload=()) as session:
        task = tasks.gated.options(num_gpus=1, max_retries=0)
        handle = task.remote(gate.path, "a")
        await gate.entered("a")
        old, _ = await renew(session)
        os.kill(psutil.Process(gate.pids["a"]).ppid(), signal.SIGKILL)
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper"):
            await handle
        await end_of(old)
        assert not os.path.exists(f"/proc/{gate.pids['a']}")


async def test_a_zygote_of_another_environment_that_dies(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {"env_vars": {"PYTHONHASHSEED": "3"}}
    async with aiogpu.init(num_cpus=2, preload=()) as session:
        zygotes = zygotes_of(session)
        task = tasks.gated.options(runtime_env=variables)
        running = task.remote(gate.path, "running")
        await gate.entered("running")
        lineage = zygotes._environments[("PYTHONHASHSEED", "3"),]
        first = lineage.current
        os.kill(pid_of(first), signal.SIGKILL)
        await end_of(first)
        assert "status -9; starting another" in caplog.text
        assert zygotes.plain.current.generation == 0
        other = await flags.options(runtime_env=variables).remote()
        assert other["zygote"] == pid_of(lineage.current)
        gate.release("running")
        assert await running == "running"


async def test_closing_while_everything_is_under_way(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old generation with a worker, one that imports, and another environment."""
    (tmp_path / "once_only.py").write_text(
        "import os, threading\n"
        "if os.path.exists(__file__ + '.seen'):\n"
        "    threading.Event().wait()\n"
        "open(__file__ + '.seen', 'w').close()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with aiogpu.init(num_cpus=2, preload=["once_only"]) as session:
        running = tasks.gated.remote(gate.path, "running")
        await gate.entered("running")
        plain = zygotes_of(session).plain
        plain.on_message(plain.current, Stale("once_only"))
        waiting = tasks.add.options(
            runtime_env={"env_vars": {"PYTHONHASHSEED": "3"}}
        ).remote(1)
        async with asyncio.timeout(60):
            while plain._next is None or len(zygotes_of(session)._environments) < 2:
                await asyncio.sleep(0)
    for handle in (running, waiting):
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await handle
