"""[B38] The death of a worker, a keeper or the zygote after message 1, 2, 3 …

The steps are enumerated, not drawn: `steps.py` counts the messages of a task's life
and kills after each of them in turn, until there is none left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

import aiogpu
from tests.contract import tasks
from tests.faults.lives import LIVES
from tests.faults.steps import Steps

pytestmark = pytest.mark.usefixtures("no_leaks")

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
"""Of each of these lives two, of each victim two or three; the rest is slow."""


@asynccontextmanager
async def node(spare_workers: int) -> AsyncIterator[Any]:
    async with aiogpu.init(
        num_cpus=1, num_gpus=1, spare_workers=spare_workers, log_to_driver=False
    ) as session:
        yield session._session._engine._open_driver.scheduler  # type: ignore[attr-defined]


async def all_free(scheduler: Any) -> None:
    """Until nothing is held any more."""
    async with asyncio.timeout(60):
        while scheduler.tasks or scheduler.ledger.leases:
            await asyncio.sleep(0)


async def step(
    scheduler: Any, steps: Steps, life: str, victim: str, at: int, retries: int
) -> bool:
    """One death; False if the life had not that many messages."""
    for _ in range(2):
        await tasks.add.remote(1)  # it has a worker that is reused
    await all_free(scheduler)
    steps.begin(victim, at)
    try:
        async with asyncio.timeout(60):
            end: object = await LIVES[life](retries)
    except DEATHS as error:
        end = error.with_traceback(None)  # its frames hold the life's handles
    await all_free(scheduler)
    was_reached = steps.end()
    where = f"{victim} after {at}: {', '.join(steps.passed[:at])}; gave {end!r}"
    scheduler.check()
    if steps.killed and victim != "zygote" and not retries:
        assert end == 2 or isinstance(end, DEATHS), where
    else:
        assert end == 2, where
    assert await tasks.add.remote(1) == 2, where
    return was_reached


async def enumerate_steps(
    life: str, victim: str, retries: int, spares: int, steps_a_node: int
) -> int:
    at, has_more = 0, True
    with Steps() as steps:
        while has_more:
            async with node(spares) as scheduler:
                for _ in range(steps_a_node):
                    at += 1
                    has_more = await step(scheduler, steps, life, victim, at, retries)
                    if not has_more:
                        break
    return at - 1


def table() -> list[Any]:
    """Life by victim by retries by spares; the slow ones with a node for each step."""
    rows = []
    for life in LIVES:
        for victim in ("worker", "keeper", "zygote"):
            for retries in (0, 1):
                for spares in (0, 2):
                    is_quick = not spares and (life, victim, retries) in QUICK
                    marks = [] if is_quick else [pytest.mark.slow]
                    name = f"{life}-{victim}-{retries}-{spares}"
                    # A node starts three zygotes anew in a while, and no more.
                    steps_a_node = 1 + is_quick * (2 if victim == "zygote" else 99)
                    row = (life, victim, retries, spares, steps_a_node)
                    rows.append(pytest.param(*row, marks=marks, id=name))
    return rows


ROW = ("life", "victim", "retries", "spares", "steps_a_node")


@pytest.mark.parametrize(ROW, table())
def test_each_step(
    life: str, victim: str, retries: int, spares: int, steps_a_node: int
) -> None:
    """Every handle ends rightly, the books balance, what follows works."""
    steps = enumerate_steps(life, victim, retries, spares, steps_a_node)
    assert asyncio.run(steps), "nobody has died"


@pytest.mark.slow
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("victim", ["worker", "keeper", "zygote"])
def test_each_step_on_uvloop(life: str, victim: str) -> None:
    assert uvloop.run(enumerate_steps(life, victim, 1, 2, 1))
