"""Zygotes and keepers of a real node that are killed, and a node that is given up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

import aiogpu
from aiogpu.runtime.node import Supervisor
from aiogpu.runtime.zygote.generations import ZygoteGenerations
from aiogpu.wire.messages import READ_DESCRIPTORS
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = pytest.mark.usefixtures("no_leaks")


def zygote_of(session: aiogpu.types.Node) -> ZygoteGenerations:
    parts = session._session._engine._supervisor._parts  # type: ignore[attr-defined]
    plain = parts.driver.pool.zygotes.plain
    assert isinstance(plain, ZygoteGenerations)
    return plain


def pid_of(plain: ZygoteGenerations) -> int:
    process = plain.current._child
    assert process is not None
    return process.pid


async def _open(*preload: str) -> None:
    await aiogpu.init(preload=preload, num_cpus=1, num_gpus=0)


async def kill_and_wait(plain: ZygoteGenerations) -> None:
    """Kill the one that serves, and wait until the driver has seen that."""
    life = plain.current
    os.kill(pid_of(plain), signal.SIGKILL)
    async with asyncio.timeout(60):
        while not life.is_over:
            await asyncio.sleep(0)


async def test_tasks_wait_while_the_interpreter_is_gone() -> None:
    python = sys.executable
    with pytest.MonkeyPatch.context() as patch:
        async with aiogpu.init(num_cpus=1) as session:
            zygote = zygote_of(session)
            patch.setattr(sys, "executable", "/no/such/python")
            os.kill(pid_of(zygote), signal.SIGSTOP)
            starting = tasks.add.remote(1)
            await kill_and_wait(zygote)
            later = tasks.add.remote(2)
            async with asyncio.timeout(60):
                while not (there := (await session.status()).outages):
                    await asyncio.sleep(0)
            assert "/no/such/python" in there[0].reason
            assert "/no/such/python" in str(await later.why())
            patch.setattr(sys, "executable", python)
            async with asyncio.timeout(60):
                assert await asyncio.gather(starting, later) == [2, 3]


DAEMON = """
import sys, threading
from tests.support.gate import say
say(sys.argv[1], "daemon")
threading.Event().wait()
"""


async def test_a_killed_keeper_fails_its_task_and_leaves_nothing(gate: Gate) -> None:
    path, source = gate.path, DAEMON

    @aiogpu.remote(max_retries=0)
    def leave_and_wait() -> None:
        import subprocess
        import sys

        from tests.support.gate import pass_gate

        command = [sys.executable, "-c", source, path]
        subprocess.Popen(command, start_new_session=True)
        pass_gate(path, "task")

    async with aiogpu.init(num_cpus=2) as session:
        other = tasks.gated.remote(gate.path, "other")
        handle = leave_and_wait.remote()
        await gate.entered("task", "daemon", "other")
        keeper = psutil.Process(gate.pids["task"]).ppid()
        os.kill(keeper, signal.SIGKILL)
        with pytest.raises(aiogpu.WorkerDiedError, match="keeper process") as caught:
            await handle
        assert caught.value.signal == signal.SIGKILL
        assert caught.value.pid == gate.pids["task"]
        for pid in (keeper, gate.pids["task"], gate.pids["daemon"]):
            assert not os.path.exists(f"/proc/{pid}")
        assert zygote_of(session).current.generation == 0
        gate.release("other")
        assert await other == "other"


async def test_a_path_that_python_ignores_is_not_carried_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Text(str):
        __slots__ = ()

    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, Text("/elsewhere")])
    async with aiogpu.init(num_cpus=1):
        _, path = await tasks.surroundings.remote()
        assert "/elsewhere" in path
        assert str(tmp_path) not in path


async def test_stopping_does_not_wait_for_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endless.py").write_text(
        "import threading\nprint('importing', flush=True)\nthreading.Event().wait()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    opening = asyncio.ensure_future(_open("endless"))
    seen = ""
    async with asyncio.timeout(60):
        while "importing" not in seen:
            await asyncio.sleep(0)
            seen += capfd.readouterr().err
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening


async def test_a_node_that_has_only_a_zygote_is_stopped() -> None:
    supervisor = Supervisor(asyncio.get_running_loop())
    supervisor.start_zygote([])
    await supervisor.stop()
    await supervisor.stop()
    assert supervisor.pids == {}


async def test_a_node_that_is_given_up_leaves_no_directory(
    runtime_directory: Path,
) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=0) as session:
        supervisor: Supervisor = session._session._engine._supervisor  # type: ignore[attr-defined]
        parts = supervisor._parts
        assert parts is not None
        pool, memory = parts.driver.pool, parts.descriptor_server
        supervisor.close_now()
        supervisor.close_now()
        assert os.listdir(runtime_directory) == []
        await pool.close()
        await pool.zygotes.close()
        assert parts.server is not None
        parts.server.close()
        assert memory is not None
        memory.close()


async def test_a_first_request_that_comes_as_the_node_closes_is_handled() -> None:
    """The last values of a worker come back while the node's parts are closed."""
    async with aiogpu.init(num_cpus=1, num_gpus=0) as session:
        assert await tasks.add.remote(1) == 2
        supervisor: Supervisor = session._session._engine._supervisor  # type: ignore[attr-defined]
        driver = supervisor._open_parts.driver
        (worker,) = driver.workers.values()
    driver.requests.on_message(worker, READ_DESCRIPTORS)
