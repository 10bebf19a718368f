"""A worker, a keeper or the zygote dies after message 1, 2, 3 … of a scenario.

Deaths are enumerated, not random: `kill_at_message.py` counts the messages, and each of
them in turn is followed by a kill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest
import uvloop

import aiogpu
from tests.contract import tasks
from tests.faults.kill_at_message import MessageKiller
from tests.faults.task_scenarios import SCENARIOS

pytestmark = pytest.mark.usefixtures("no_leaks")

VICTIMS = "worker", "keeper", "zygote"
DEATHS = aiogpu.WorkerDiedError, aiogpu.ActorDiedError
QUICK = {
    ("isolated", "worker", 0),
    ("isolated", "keeper", 1),
    ("reused", "worker", 1),
    ("reused", "keeper", 0),
    ("nested", "worker", 1),
    ("nested", "zygote", 1),
    ("actor-lossy", "keeper", 1),
    ("actor-lossy", "zygote", 1),
}
"""Scenario, victim and retries that every change runs; the others are slow."""


@asynccontextmanager
async def node(spare_workers: int) -> AsyncIterator[Any]:
    async with aiogpu.init(
        num_cpus=1, num_gpus=1, spare_workers=spare_workers, log_to_driver=False
    ) as session:
        yield session._session._engine._open_driver.scheduler  # type: ignore[attr-defined]


async def wait_until_idle(scheduler: Any) -> None:
    """Wait until the node has no task and no lease."""
    async with asyncio.timeout(60):
        while scheduler.tasks or scheduler.ledger.leases:
            await asyncio.sleep(0)


async def run_with_kill(
    scheduler: Any,
    messages: MessageKiller,
    scenario: str,
    victim: str,
    at: int,
    retries: int,
) -> bool:
    """Run a scenario with one kill; return False if there was no message `at`."""
    for _ in range(2):
        await tasks.add.remote(1)  # the node then has a worker to reuse
    await wait_until_idle(scheduler)
    messages.begin(victim, at)
    try:
        async with asyncio.timeout(60):
            end: object = await SCENARIOS[scenario](retries)
    except DEATHS as error:
        end = error.with_traceback(None)  # the frames hold the scenario's handles
    await wait_until_idle(scheduler)
    has_message = messages.end()
    where = f"{victim} after {at}: {', '.join(messages.passed[:at])}; gave {end!r}"
    scheduler.check()
    if messages.killed and victim != "zygote" and not retries:
        assert end == 2 or isinstance(end, DEATHS), where
    else:
        assert end == 2, where
    assert await tasks.add.remote(1) == 2, where
    return has_message


async def kill_at_each_message(
    scenario: str, victim: str, retries: int, spares: int, kills_a_node: int
) -> int:
    """Run the scenario with a kill at each message; return the number of kills."""
    at, has_more = 0, True
    with MessageKiller() as messages:
        while has_more:
            async with node(spares) as scheduler:
                for _ in range(kills_a_node):
                    at += 1
                    row = scenario, victim, at, retries
                    has_more = await run_with_kill(scheduler, messages, *row)
                    if not has_more:
                        break
    return at - 1


def table() -> list[Any]:
    """All combinations; slow ones have a new node for each kill."""
    rows = []
    for scenario, victim, retries, spares in product(
        SCENARIOS, VICTIMS, (0, 1), (0, 2)
    ):
        is_quick = not spares and (scenario, victim, retries) in QUICK
        marks = [] if is_quick else [pytest.mark.slow]
        name = f"{scenario}-{victim}-{retries}-{spares}"
        # A node restarts its zygote three times in a while, and no more.
        kills_a_node = 1 + is_quick * (2 if victim == "zygote" else 99)
        row = (scenario, victim, retries, spares, kills_a_node)
        rows.append(pytest.param(*row, marks=marks, id=name))
    return rows


@pytest.mark.parametrize(
    ("scenario", "victim", "retries", "spares", "kills_a_node"), table()
)
def test_a_node_survives_a_kill_at_any_message(
    scenario: str, victim: str, retries: int, spares: int, kills_a_node: int
) -> None:
    """Handles end legally, the scheduler's state is sound, the next task works."""
    kills = kill_at_each_message(scenario, victim, retries, spares, kills_a_node)
    assert asyncio.run(kills), "no process has died"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_node_on_uvloop_survives_a_kill_at_any_message(
    scenario: str, victim: str
) -> None:
    assert uvloop.run(kill_at_each_message(scenario, victim, 1, 2, 1))
