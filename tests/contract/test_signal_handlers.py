"""Handlers of user code that raise between calls end no actor and no idle worker."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import pytest

import aiogpu
from tests.contract import signal_tasks
from tests.contract.signal_tasks import HandlerError
from tests.support.gate import Gate

pytestmark = pytest.mark.usefixtures("no_leaks")

SIGNALS = 50


ACTORS: list[Any] = [signal_tasks.Serial, signal_tasks.Threaded]


@pytest.mark.parametrize("cls", [*ACTORS, signal_tasks.Soft])
async def test_handler_that_raises_between_calls_ends_no_actor(
    cls: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(num_cpus=2):
        actor = cls.remote()
        pid = await actor.pid.remote()
        lives = 0
        for _ in range(SIGNALS):
            os.kill(pid, signal.SIGUSR1)
            try:
                assert await actor.pid.remote() == pid
                lives += 1
            except HandlerError:
                pass  # it hit the method
        assert lives
        os.kill(pid, signal.SIGUSR1)
        while "HandlerError: " not in capfd.readouterr().err:
            await asyncio.sleep(0)


async def test_end_of_a_child_between_calls_ends_no_actor() -> None:
    async with aiogpu.init(num_cpus=2):
        actor = signal_tasks.Serial.remote()
        pid = await actor.pid.remote()
        await actor.leave_child.remote()
        while True:
            try:
                if await actor.child_has_ended.remote():
                    break
            except HandlerError:
                pass  # it hit the method
        assert await actor.pid.remote() == pid


async def test_handler_raises_in_a_running_method() -> None:
    async with aiogpu.init(num_cpus=2):
        for cls in (signal_tasks.Serial, signal_tasks.Soft):
            actor = cls.remote()
            pid = await actor.pid.remote()
            with pytest.raises(HandlerError):
                await actor.run_into_alarm.remote()
            assert await actor.pid.remote() == pid


async def test_handler_raises_at_the_await_of_a_task() -> None:
    async with aiogpu.init(num_cpus=1):
        pid = await signal_tasks.pid.remote()
        for _ in range(2):
            with pytest.raises(HandlerError):
                await signal_tasks.await_alarm.remote()
        assert await signal_tasks.pid.remote() == pid


async def test_handler_that_raises_amid_an_await_ends_no_call(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = signal_tasks.Soft.remote()
        pid = await actor.pid.remote()
        waiting = actor.wait.remote(gate.path)
        await gate.entered("inside")
        for _ in range(SIGNALS):
            # After a turn of the loop, which has begun to wait.
            with suppress(HandlerError):  # it hit this method
                assert await actor.pid.remote() == pid
            os.kill(pid, signal.SIGUSR1)
        with suppress(HandlerError):
            await actor.pid.remote()
        gate.release("inside")
        assert await waiting == pid


async def test_exit_in_an_asyncio_task_ends_no_actor() -> None:
    async with aiogpu.init(num_cpus=1):
        actor = signal_tasks.Soft.remote()
        pid = await actor.pid.remote()
        for _ in range(3):
            await actor.exit_in_background.remote()
            assert await actor.pid.remote() == pid


async def test_handlers_of_a_task_end_with_it() -> None:
    async with aiogpu.init(num_cpus=1):
        pid = await signal_tasks.set_handler.remote()
        assert await signal_tasks.pid.remote() == pid


async def test_exceptions_of_other_threads_end_no_idle_process(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = signal_tasks.Serial.remote()
        ways = [
            (signal_tasks.raise_amid_tasks, signal_tasks.pid),
            (actor.raise_amid_calls, actor.pid),
        ]
        for leave_thread, ask in ways:
            pid = await leave_thread.remote(gate.path)
            await gate.entered("thread")
            gate.release("thread")
            await gate.entered("raised")
            assert await ask.remote() == pid
            gate.forget("thread", "raised")


async def test_handler_may_print_amid_a_print(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It would wait for the connection that it has interrupted."""
    async with aiogpu.init(num_cpus=1):
        actor = signal_tasks.Serial.remote()
        assert await actor.print_in_handler.remote() >= 100
        assert "tick" in capfd.readouterr().out


async def test_killed_worker_of_a_data_loader_ends_no_actor() -> None:
    pytest.importorskip("torch")
    async with aiogpu.init(num_cpus=2):
        actor = signal_tasks.Loading.remote()
        pid, (first, *_) = await actor.load.remote()
        os.kill(first, signal.SIGKILL)
        for _ in range(3):
            assert await actor.pid.remote() == pid
        task = aiogpu.remote(signal_tasks.load_with_workers)
        pid, (first, *_) = await task.remote()
        os.kill(first, signal.SIGKILL)
        assert await signal_tasks.pid.remote() == pid
