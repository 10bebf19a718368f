"""Many waiting tasks with as many different requests cost no more than equal ones."""

import asyncio
import time

import pytest

import aiogpu
from tests.contract.tasks import echo


async def cost_of(count: int, what: str) -> float:
    """Return the processor time of the program for each of many tasks, in seconds."""

    async def run(number: int) -> None:
        part = (number + 4_001) / 10_000
        if what == "placement":
            async with aiogpu.placement([{"GPU": part}]):
                return
        options = {
            "memory": {"memory": (number + 64) << 16, "num_cpus": 1},
            "custom": {"resources": {"slot": part}, "num_cpus": 0},
        }
        assert await echo.options(**options[what]).remote(number) == number

    async with aiogpu.init(num_cpus=2, num_gpus=1, resources={"slot": 1}):
        began = time.process_time()
        await asyncio.gather(*map(run, range(count)))
        return (time.process_time() - began) / count


@pytest.mark.parametrize("what", ["memory", "custom", "placement"])
def test_cost_of_a_task_does_not_grow_with_different_requests(what):
    few, many = (aiogpu.run(cost_of(count, what)) for count in (250, 1_500))
    assert many < 2.5 * few
