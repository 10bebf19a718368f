"""What a program may have at once: said at the start, seen by who waits."""

from __future__ import annotations

import asyncio

import pytest

import aiogpu
from tests.cli.box import Box
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = pytest.mark.either_loop

START = ("start", "--head", "--num-cpus=4", "--num-gpus=1")
LIMITS = ("--max-waiting=2", "--max-share", '{"GPU": 0.5}')
TOLD = "for its program's own limit: it holds 0.5 of at most 0.5 GPU"


async def test_limits_are_seen_by_those_who_wait(here: Box, gate: Gate) -> None:
    await asyncio.to_thread(here.run, *START, *LIMITS)
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.options(num_gpus=0.5).remote(gate.path, "a")
        await gate.entered("a")
        waiting = tasks.add.options(num_gpus=0.5).remote(1, 2)
        why = await waiting.why()
        assert TOLD in str(why)
        where = f"--address={here.place.socket}"
        (task,) = (await aiogpu.status()).waiting
        told, _ = await asyncio.to_thread(here.run, "why", str(task.id), where)
        assert TOLD in " ".join(told.split())
        with pytest.raises(
            aiogpu.errors.LimitError, match=r"has 2 tasks .* \(max_waiting\)"
        ):
            await tasks.add.remote(1)
        gate.release("a")
        assert await asyncio.gather(running, waiting) == ["a", 3]
        assert await tasks.add.remote(1) == 2
        with pytest.raises(aiogpu.InfeasibleError, match="lets this program hold"):
            await tasks.add.options(num_gpus=1).remote(1)
