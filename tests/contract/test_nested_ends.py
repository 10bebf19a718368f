"""[B12] What ends with whom: children with their parents, all with the node."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

import aiogpu
from tests.contract import nested_tasks, tasks
from tests.contract.nested_tasks import run_here
from tests.support.gate import Gate, pass_gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    async with aiogpu.init(num_cpus=3, num_gpus=1) as session:
        yield session


async def all_free() -> None:
    """Until nothing of any task runs any more."""
    async with asyncio.timeout(60):
        while await aiogpu.available_resources() != await aiogpu.cluster_resources():
            await asyncio.sleep(0)


@pytest.mark.parametrize("soft", [False, True], ids=["plain", "coroutine"])
async def test_children_end_with_their_parent(
    soft: bool, node: aiogpu.types.Node, gate: Gate
) -> None:
    leave = nested_tasks.leave_child_softly if soft else nested_tasks.leave_child
    handle = leave.remote(gate.path, "parent", "child")
    await gate.entered("parent", "child")
    gate.release("parent")
    await handle
    await all_free()
    assert "child" in gate.inside, "it was stopped, not let pass"


async def test_a_waiting_child_ends_with_its_parent(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        await nested_tasks.leave_many.remote(gate.path, 100)
        status = await aiogpu.status()
        assert status.waiting == ()
        await all_free()
        assert gate.inside == set()


async def test_children_end_with_a_cancelled_parent(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    handle = nested_tasks.tree.remote(gate.path, "t", 3)
    await gate.entered("t3", "t2", "t1", "t0", "t")
    handle.cancel()
    await all_free()
    assert "t" in gate.inside


async def test_children_end_with_a_parent_whose_time_is_up(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    tree = nested_tasks.tree.options(timeout=0.5)
    handle = tree.remote(gate.path, "t", 2)
    with pytest.raises(aiogpu.TaskTimeoutError):
        await handle
    await all_free()


async def test_children_end_with_a_killed_parent(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    path = gate.path

    def sibling(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    tree = nested_tasks.tree.options(max_retries=0)
    handle = tree.remote(path, "t", 2)
    await gate.entered("t")
    await aiogpu.remote(sibling).remote(gate.pids["t2"])
    with pytest.raises(aiogpu.WorkerDiedError, match=r"tree .* signal 9"):
        await handle
    await all_free()
    assert "t" in gate.inside


async def test_a_retried_parent_starts_its_children_anew(
    node: aiogpu.types.Node, gate: Gate, tmp_path: Path
) -> None:
    task = nested_tasks.start_anew.options(max_retries=1)
    handle = task.remote(str(tmp_path / "count"), gate.path)
    await gate.entered("parent1", "child1")
    gate.release("parent1")
    await gate.entered("parent2", "child2")
    gate.release("parent2", "child2")
    assert await handle == 2 + len("child2")
    await all_free()
    assert "child1" in gate.inside, "the first one was stopped"


@pytest.mark.parametrize("how", ["returns", "dies", "cancelled"])
async def test_a_detached_child_outlives_its_parent(
    how: str, node: aiogpu.types.Node, gate: Gate
) -> None:
    path = gate.path

    def work() -> None:
        tasks.gated.options(lifetime="detached").remote(path, "detached")
        tasks.gated.remote(path, "child")
        pass_gate(path, "parent")
        if how == "dies":
            os._exit(1)

    handle = run_here.options(max_retries=0, num_gpus=1).remote(work)
    await gate.entered("parent", "detached", "child")
    if how == "cancelled":
        handle.cancel()
    else:
        gate.release("parent")
        await asyncio.wait([handle])
        handle.exception()
    async with asyncio.timeout(60):
        while (await aiogpu.available_resources())["CPU"] != 2:
            await asyncio.sleep(0)
    detached = psutil.Process(gate.pids["detached"])
    assert detached.is_running()
    (running,) = (await aiogpu.status()).tasks
    assert running.name == "gated"
    gate.release("detached")
    await all_free()


async def test_a_detached_child_can_be_waited_for_and_cancelled(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    path = gate.path

    def work() -> int:
        add = tasks.add.options(lifetime="detached")
        child = tasks.gated_coroutine.options(lifetime="detached").remote(path, "a")
        pass_gate(path, "parent")
        child.cancel()
        return aiogpu.get(add.remote(1))

    handle = run_here.remote(work)
    await gate.entered("a", "parent")
    gate.release("parent")
    assert await handle == 2
    await gate.entered("a-cancelled")
    await all_free()


@pytest.mark.parametrize("lifetime", [None, "detached"])
async def test_the_end_of_the_node_ends_a_deep_tree(
    lifetime: str | None, gate: Gate
) -> None:
    async with aiogpu.init(num_cpus=2):
        tree = nested_tasks.tree.options(lifetime=lifetime)  # type: ignore[typeddict-item]
        handle = tree.remote(gate.path, "t", 8)
        await gate.entered("t")
        pids = set(gate.pids.values())
        assert len(pids) == 9
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await handle
    assert not any(map(psutil.pid_exists, pids))


async def test_what_is_printed_below_comes_before_the_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=2):
        await nested_tasks.said_below.remote("a")
        out = capsys.readouterr().out
        said = re.findall(r"\((\w+) pid=\d+\) (.*)", out)
        assert said == [
            ("said_below", "a begins"),
            *(("output", f"a {number}") for number in range(3)),
            ("said_below", "a ends"),
        ]
        handles = [nested_tasks.said_below.remote(name) for name in "bcdefg"]
        for name, handle in zip("bcdefg", handles, strict=True):
            await handle
            out += capsys.readouterr().out
            assert len(re.findall(rf"\) {name} ", out)) == 5
