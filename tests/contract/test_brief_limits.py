"""Time limits below the resolution of a loop's timers, on both loops."""

from __future__ import annotations

import pytest

import aiogpu
from aiogpu.types import Node
from tests.contract import option_tasks
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.aiogpu(num_cpus=2),
]


@pytest.mark.whole
@pytest.mark.needs("run times")
async def test_a_call_is_stopped(node: Node, gate: Gate) -> None:
    """The same as for a call whose begin is reported late: no time is left to it."""
    actor = await aiogpu.remote(option_tasks.TimedCoroutines).remote()
    for _ in range(20):
        with pytest.raises(aiogpu.TaskTimeoutError, match="brief did not end within"):
            await actor.brief.remote(gate.path, "mine")


@pytest.mark.whole
@pytest.mark.needs("run times")
async def test_a_task_is_stopped(node: Node, gate: Gate) -> None:
    brief = option_tasks.tasks.gated_coroutine.options(run_timeout=1e-4)
    with pytest.raises(aiogpu.TaskTimeoutError, match="did not end within"):
        await brief.remote(gate.path, "mine")
