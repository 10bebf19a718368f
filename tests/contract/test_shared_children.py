"""[B16] Handles of children in results, where a child ends as its handle is handed on.

The test blocks the loop of its own node while the child answers and its parent shares
the handle. The node reads the answer first and the handle after it, as in the race.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import shared_child_tasks
from tests.contract.shared_child_tasks import Parent, Points

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
async def points(tmp_path: Path) -> AsyncIterator[Points]:
    points = Points(tmp_path)
    points.add("child runs", "child goes on", "child has answered")
    points.add("parent runs", "parent goes on", "shared")
    async with aiogpu.init(address="local", num_cpus=4):
        yield points


async def race(points: Points) -> None:
    """Have the child answer before the node hears that its handle is shared."""
    await asyncio.to_thread(points.meet, "parent runs")
    await asyncio.to_thread(points.meet, "child runs")
    for name in (
        *("child goes on", "child has answered"),
        *("parent goes on", "shared"),
    ):
        points.meet(name)


@pytest.mark.parametrize(
    "task", [shared_child_tasks.hand_on, shared_child_tasks.hand_on_softly]
)
async def test_of_a_task_whose_process_ends(task: Any, points: Points) -> None:
    parent = task.remote(points)
    await race(points)
    handle, _ = await parent
    async with asyncio.timeout(20):
        assert await handle == "a result"


async def test_of_an_actor_that_ends(points: Points) -> None:
    actor = await Parent.remote()
    stream = actor.hand_on_and_leave.remote(points)
    await race(points)
    handle, _ = await anext(stream)
    async with asyncio.timeout(20):
        assert await handle == "a result"


async def test_of_a_task_that_dies(points: Points) -> None:
    """The answer went to a process that nobody can ask any more."""
    stream = shared_child_tasks.hand_on_and_die.remote(points)
    await race(points)
    handle, _ = await anext(stream)
    async with asyncio.timeout(20):
        with pytest.raises(aiogpu.WorkerDiedError, match="the result is lost"):
            await handle
    with pytest.raises(aiogpu.WorkerDiedError, match="signal 9"):
        await anext(stream)
