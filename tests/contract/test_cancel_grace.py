"""[B15] How long code may take to stop: the node's grace, and a task's own."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

import aiogpu
from tests.contract import phase_tasks, tasks
from tests.contract.backlog_tasks import clean_up
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

LONG, SHORT = 30.0, 0.05


async def all_free() -> None:
    async with asyncio.timeout(60):
        while await aiogpu.available_resources() != await aiogpu.cluster_resources():
            await asyncio.sleep(0)


@pytest.mark.parametrize("grace", [0, SHORT])
async def test_a_short_one_of_its_own(grace: float, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, cancel_grace=LONG):
        swallow = tasks.swallow.options(cancel_grace=grace)
        handle = swallow.remote(gate.path, "in")
        await gate.entered("in")
        handle.cancel()
        await all_free()
        assert not os.path.exists(f"/proc/{gate.pids['in']}")


async def test_a_long_one_of_its_own(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, cancel_grace=SHORT):
        handle = clean_up.options(cancel_grace=LONG).remote(gate.path, 6 * SHORT)
        await gate.entered("in")
        handle.cancel()
        await gate.entered("out")
        assert await tasks.pid.remote() == gate.pids["out"] == gate.pids["in"]


async def test_that_of_the_node(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, cancel_grace=SHORT):
        handle = clean_up.remote(gate.path, LONG)
        await gate.entered("in")
        handle.cancel()
        await all_free()
        assert "out" not in gate.pids


async def test_after_a_timeout_too(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, cancel_grace=LONG):
        task = tasks.swallow.options(cancel_grace=0, timeout=0.5)
        with pytest.raises(aiogpu.TaskTimeoutError):
            await task.remote(gate.path, "in")
        await all_free()


async def test_a_childs_own(gate: Gate) -> None:
    """It travels with what a task asks of its children."""
    async with aiogpu.init(num_cpus=1, cancel_grace=LONG):
        args = [gate.path, "in", "/dev/null"]
        handle = phase_tasks.relay.remote(0, "swallowing", {"cancel_grace": 0}, args)
        await gate.entered("in")
        handle.cancel()
        await all_free()


async def test_a_closing_node_waits_for_the_longest(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own patience with a shutdown would end before."""
    monkeypatch.setattr("aiogpu.runtime.node.SLACK", -5.0)
    async with aiogpu.init(num_cpus=1, cancel_grace=SHORT):
        handle = clean_up.options(cancel_grace=LONG).remote(gate.path, 1.0)
        await gate.entered("in")
    await gate.entered("out")
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await handle


seen: list[str] = []


@aiogpu.remote(cancel_grace=SHORT)
async def stubborn() -> None:
    seen.append("begun")
    while "free" not in seen:
        with phase_tasks.swallowed():
            await asyncio.sleep(0.001)


async def test_without_processes_it_is_left_behind_after_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen.clear()
    async with aiogpu.init(address="inline", num_cpus=1, cancel_grace=LONG):
        with caplog.at_level(logging.WARNING):
            handle = stubborn.remote()
            while not seen:
                await asyncio.sleep(0)
            handle.cancel()
            await all_free()
        assert f"cancelled {SHORT:g} s ago and runs on" in caplog.text
        seen.append("free")
