"""Calls that are cancelled as soon as they are sent, and what needs their results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from tests.engines import value_tasks as v
from tests.gate import Gate

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("rayed")]


async def test_a_program_outlives_what_it_cancels_at_once(gate: Gate) -> None:
    """Ray alone would end it, as soon as the argument comes."""
    async with aiogpu.init(address="ray", num_cpus=4):
        for number in range(10):
            slow = v.gated.remote(gate.path, f"slow-{number}", number)
            for _ in range(10):
                v.give.remote(slow).cancel()
            await gate.entered(f"slow-{number}")
            gate.release(f"slow-{number}")
            assert await slow == number


async def test_a_long_line_of_calls_is_told_of_one_that_came_too_late(
    gate: Gate,
) -> None:
    async with aiogpu.init(address="ray", num_cpus=4):
        last: Any = v.gated.options(timeout=1.0).remote(gate.path, "slow", 1)
        line = [last]
        for _ in range(1500):
            last = v.add.remote(last)
            line.append(last)
        for handle in (last, v.give.remote(line[0])):
            with pytest.raises(aiogpu.TaskTimeoutError, match="gated"):
                await handle
        await asyncio.wait(line)
