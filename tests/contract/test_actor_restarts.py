"""Actors whose process dies: what restarts, what is lost, what is retried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import tasks
from tests.contract.actor_classes import Async, Counter, Slow
from tests.support.errors import raises
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "gate", "local_node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1, num_gpus=0, log_to_driver=False),
]

ALWAYS = {"max_restarts": -1}
AGAIN = {"max_restarts": -1, "max_task_retries": -1}


async def slow_actor(gate: Gate, **options: Any) -> Any:
    """Return an actor that has passed its constructor's gate once."""
    slow = Slow.options(**ALWAYS, **options).remote(gate.path)
    await gate.let_pass("constructor")
    await slow
    gate.forget("constructor")
    return slow


@pytest.mark.aiogpu(num_gpus=2)
async def test_the_constructor_runs_again_on_the_same_gpu() -> None:
    counter = Counter.options(num_gpus=0.5, max_restarts=1, name="bob").remote(5)
    assert await counter.add.remote() == 6
    before = await asyncio.gather(counter.pid.remote(), counter.where.remote())
    call = counter.exit.remote(3)
    error = await raises(errors.ActorDiedError, call, match="max_task_retries")
    assert error.is_restarting
    assert isinstance(error.__cause__, errors.WorkerDiedError)
    assert error.__cause__.exitcode == 3
    again = aiogpu.get_actor("bob")
    assert await again.add.remote() == 6, "its state is lost"
    after = await asyncio.gather(counter.pid.remote(), counter.where.remote())
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert (await aiogpu.available_resources())["GPU"] == 1.5
    error = await raises(errors.ActorDiedError, counter.exit.remote(4), match="code 4")
    assert not error.is_restarting
    call = counter.add.remote()
    await raises(errors.ActorDiedError, call, match=r"is dead.*code 4")


async def test_only_the_call_that_had_begun_is_lost(gate: Gate) -> None:
    """More calls than are sent ahead wait behind it; all keep their order."""
    counter = Counter.options(**ALWAYS).remote()
    first = counter.gated.remote(gate.path, "a")
    dying = counter.exit.remote(3)
    calls = [counter.add.remote() for _ in range(400)]
    await gate.entered("a")
    calls[7].cancel()
    calls.append(counter.add.remote())
    gate.release("a")
    assert await first == "a"
    await raises(errors.ActorDiedError, dying, match="code 3")
    del calls[7]
    assert await asyncio.gather(*calls) == [*range(1, 401)]


async def test_calls_during_a_restart_wait(gate: Gate) -> None:
    slow = await slow_actor(gate)
    await raises(errors.ActorDiedError, slow.exit.remote(3))
    await gate.entered("constructor")
    calls = [slow.add.remote() for _ in range(3)]
    ready = asyncio.ensure_future(slow.__aenter__())
    await asyncio.wait([*calls, ready], timeout=0.02)
    assert not any(waits.done() for waits in (*calls, ready))
    why = await calls[0].why()
    assert (why.state, why.actor) == ("sent", "Slow")
    gate.release("constructor")
    assert await asyncio.gather(*calls) == [1, 2, 3]
    assert await ready is slow


@pytest.mark.parametrize(
    ("restarts", "retries", "deaths"), [(2, 2, 2), (-1, 1, 1), (1, -1, 1), (-1, -1, 2)]
)
async def test_a_call_is_retried(
    restarts: int, retries: int, deaths: int, tmp_path: Path
) -> None:
    options = {"max_restarts": restarts, "max_task_retries": retries}
    counter = Counter.options(**options).remote()
    poison = counter.die_until.remote(str(tmp_path / "enough"), deaths)
    behind = [counter.note.remote(n) for n in range(3)]
    assert await poison == deaths + 1
    assert await asyncio.gather(*behind) == [1, 2, 3]


async def test_retries_and_restarts_end(tmp_path: Path) -> None:
    few = Counter.options(max_restarts=-1, max_task_retries=1).remote()
    call = few.die_until.remote(str(tmp_path / "few"), 2)
    error = await raises(errors.ActorDiedError, call)
    assert error.is_restarting
    assert await few.add.remote() == 1
    dead = Counter.options(max_restarts=1, max_task_retries=-1).remote()
    call = dead.die_until.remote(str(tmp_path / "dead"), 2)
    error = await raises(errors.ActorDiedError, call, match="is dead")
    assert not error.is_restarting
    # An error that a method raises is an answer, and no reason to try again.
    await raises(ValueError, few.fail.remote(ValueError, "once"), match="once")


async def test_a_call_that_had_not_begun_has_all_its_retries(tmp_path: Path) -> None:
    """The call before it kills its process twice after it was sent."""
    counter = Counter.options(max_restarts=-1, max_task_retries=1).remote()
    dying = counter.exit.remote(3)
    once_more = counter.die_until.remote(str(tmp_path / "once"), 1)
    await raises(errors.ActorDiedError, dying, match="code 3")
    assert await once_more == 2


@pytest.mark.parametrize("kind", [Counter, Async])
async def test_a_cancelled_call_is_not_retried(kind: Any, gate: Gate) -> None:
    actor = kind.options(**AGAIN).remote()
    running = actor.swallow.remote(gate.path, "a")
    await gate.entered("a")
    running.cancel()
    aiogpu.kill(actor, no_restart=False)
    assert await actor.notes.remote() == []


async def test_a_killed_actor_may_restart(gate: Gate) -> None:
    counter = Counter.options(max_restarts=1).remote()
    pid = await counter.pid.remote()
    running = counter.gated.remote(gate.path, "a")
    await gate.entered("a")
    aiogpu.kill(counter, no_restart=False)
    error = await raises(errors.ActorDiedError, running, match="was killed")
    assert error.is_restarting
    assert await counter.pid.remote() != pid
    aiogpu.kill(counter, no_restart=False)
    call = counter.pid.remote()
    await raises(errors.ActorDiedError, call, match="no restarts left")


async def test_a_constructor_that_fails_again_ends_the_actor(tmp_path: Path) -> None:
    path = str(tmp_path / "lives")

    @aiogpu.remote(max_restarts=-1)
    class Once:
        def __init__(self) -> None:
            with open(path, "x"):
                pass

        def die(self) -> None:
            import os

            os._exit(3)

    once = Once.remote()
    dying, behind = once.die.remote(), once.die.remote()
    await raises(errors.ActorDiedError, dying, match="code 3")
    for late in (behind, once):
        error = await raises(errors.ActorDiedError, late, match="FileExistsError")
        assert isinstance(error.__cause__, FileExistsError)


@pytest.mark.aiogpu(num_gpus=1)
async def test_a_restart_without_handles_ends(gate: Gate) -> None:
    for with_call in (False, True):
        slow = await slow_actor(gate, num_gpus=1, name="slow")
        aiogpu.kill(slow, no_restart=False)
        await gate.entered("constructor")
        handles = [slow.add.remote()] if with_call else []
        del slow
        for handle in handles:
            gate.release("constructor")
            assert await handle == 1
        assert await tasks.where.options(num_gpus=1).remote()
        gate.forget("constructor")
    while (await aiogpu.status()).tasks:
        await asyncio.sleep(0)


@pytest.mark.aiogpu(num_gpus=1)
async def test_a_closing_node_restarts_no_actor(gate: Gate) -> None:
    slow = await slow_actor(gate)
    aiogpu.kill(slow, no_restart=False)
    call = slow.add.remote()
    await gate.entered("constructor")
    await aiogpu.shutdown()
    await raises(errors.NodeClosedError, call)
