"""Pools whose actors restart or are killed: which actor gets the calls."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract.actor_classes import Slow
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2, log_to_driver=False),
    pytest.mark.needs("processes"),
]
GIVEN = pytest.mark.parametrize("is_given", [False, True], ids=["own", "given"])


class Pooled:
    """A pool of two actors whose constructors have passed their gates."""

    def __init__(self, actors: list[Any], pool: Any, pids: list[int]) -> None:
        self.actors = actors
        self.pool = pool
        self.pids = pids

    async def callees(self, count: int = 6) -> set[int]:
        """Make calls at once; return the processes that have run them."""
        calls = [self.pool.pid.remote() for _ in range(count)]
        return set(await asyncio.gather(*calls))


async def pooled(gate: Gate, is_given: bool, **options: Any) -> Pooled:
    names, actors = iter("abc"), []
    options = {"max_restarts": -1, **options}

    def make() -> Any:
        actors.append(Slow.options(**options).remote(gate.path, next(names)))
        return actors[-1]

    if is_given:
        pool: Any = aiogpu.ActorPool([make(), make()])
    else:
        pool = aiogpu.ActorPool(make, 2)
    await gate.let_pass("a", "b")
    await pool
    gate.forget("a", "b")
    pids = [await actor.pid.remote() for actor in actors]
    result = Pooled(actors, pool, pids)
    assert await result.callees() == set(pids)
    return result


@GIVEN
@pytest.mark.parametrize("by", ["kill", "idle death", "call"])
async def test_a_restarting_actor_gets_no_calls(
    by: str, is_given: bool, gate: Gate
) -> None:
    """All calls go to the other actor until it is back; then both get calls again."""
    this = await pooled(gate, is_given)
    first, other = this.pids
    if by == "kill":
        aiogpu.kill(this.actors[0], no_restart=False)
    elif by == "idle death":
        os.kill(first, signal.SIGKILL)
        await gate.entered("a")
    else:
        await raises(errors.ActorDiedError, this.actors[0].exit.remote(3))
    assert await this.callees() == {other}
    await gate.entered("a")
    assert await this.callees() == {other}
    assert len(this.pool) == 2
    gate.release("a")
    await this.actors[0]
    await until(lambda: "2 ready" in repr(this.pool))
    again = await this.actors[0].pid.remote()
    assert again not in this.pids
    assert await this.callees() == {again, other}


@GIVEN
async def test_calls_wait_if_all_actors_restart(is_given: bool, gate: Gate) -> None:
    this = await pooled(gate, is_given)
    for actor in this.actors:
        aiogpu.kill(actor, no_restart=False)
    calls = [this.pool.add.remote() for _ in range(2)]
    await gate.let_pass("a", "b")
    assert await asyncio.gather(*calls) == [1, 1]


@pytest.mark.parametrize("way", ["kill", "last restart", "block"])
@GIVEN
async def test_an_end_that_the_program_wants_is_no_loss(
    way: str, is_given: bool, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not logged, and the next calls go to other actors at once."""
    this = await pooled(gate, is_given, max_restarts=0)
    _, other = this.pids
    with caplog.at_level(logging.WARNING):
        if way == "kill":
            aiogpu.kill(this.actors[0])
        elif way == "block":
            await this.actors[0].__aexit__(None, None, None)
        else:
            aiogpu.kill(this.actors[0], no_restart=False)
        await until(lambda: "1 died" in repr(this.pool))
        if is_given:
            assert await this.callees() == {other}
            assert len(this.pool) == 1
        else:
            assert len(this.pool) == 2, "it is not replaced"
    losses = [text for text in caplog.messages if "has lost its actor" in text]
    assert bool(losses) == (way == "last restart")


async def test_a_loss_is_logged(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    this = await pooled(gate, is_given=True, max_restarts=0)
    with caplog.at_level(logging.WARNING):
        await raises(errors.ActorDiedError, this.actors[0].exit.remote(3))
        await until(lambda: len(this.pool) == 1)
    assert "a pool has lost its actor 0: Slow is dead" in caplog.text


async def test_a_given_actor_ends_with_its_last_handle(gate: Gate) -> None:
    """A pool that was dropped keeps nothing."""
    this = await pooled(gate, is_given=True)
    pids = this.pids
    del this
    gc.collect()
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
