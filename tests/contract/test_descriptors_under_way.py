"""More large values at a time than the kernel lets be under way between two processes.

Their descriptors go ahead of what names them, and are read when that is heard of.
"""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from aiogpu.serialization.references import SHARED_FROM as LARGE
from tests.contract import shared_tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

MANY = 400
"""A Unix socket takes 278 messages that nobody reads."""


async def test_results_of_one_task() -> None:
    """One message names them all, and comes after the last one's descriptor."""
    async with asyncio.timeout(60), aiogpu.init(num_cpus=1):
        task = shared_tasks.make_many.options(num_returns=MANY)
        views = await asyncio.gather(*task.remote(MANY, LARGE))
        found = [int.from_bytes(view[:4], "little") for view in views]
        assert found == [*range(MANY)]


async def test_arguments_of_tasks_that_are_started_in_one_turn(served: None) -> None:
    """What names them waits for the loop, as it is more than the socket takes."""
    text = "-" * LARGE
    async with aiogpu.init(address="node", num_cpus=4):
        handles = [
            shared_tasks.number_in.remote(
                text, memoryview(i.to_bytes(4, "little") + bytes(LARGE - 4))
            )
            for i in range(MANY)
        ]
        assert await asyncio.gather(*handles) == [*range(MANY)]
