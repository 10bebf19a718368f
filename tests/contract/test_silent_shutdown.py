"""[B6] A node that is shut down fails what nobody waits for, and asyncio is silent."""

from __future__ import annotations

from typing import Any

import pytest

import aiogpu
from tests.contract import stream_tasks, tasks, value_tasks
from tests.contract.actor_classes import Async
from tests.support.gate import Gate
from tests.support.turns import no_complaints

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


async def test_nothing_is_said_of_errors_that_were_never_retrieved(gate: Gate) -> None:
    """Of a task that runs, of others that wait, of results, calls and items."""
    async with no_complaints():
        async with aiogpu.init(num_cpus=1):
            running = tasks.gated_coroutine.remote(gate.path, "running")
            await gate.entered("running")
            actor = Async.remote()
            split = value_tasks.split.options(num_returns=2)
            left: list[Any] = [
                running,
                *(tasks.add.remote(number) for number in range(3)),
                *split.remote([1, 2]),
                actor.add.remote(),
                stream_tasks.numbers.remote(3),
            ]
            awaited = tasks.add.remote(running)
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await awaited
        del actor, running, left
