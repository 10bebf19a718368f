"""[B33] Actors whose process dies: what is made anew, what is lost, what is retried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.actor_classes import Async, Counter, Slow, Threads
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]

ALWAYS = {"max_restarts": -1}
AGAIN = {"max_restarts": -1, "max_task_retries": -1}


async def test_its_constructor_runs_again_on_the_same_gpu() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=2, log_to_driver=False):
        counter = Counter.options(num_gpus=0.5, max_restarts=1, name="bob").remote(5)
        assert await counter.add.remote() == 6
        before = await asyncio.gather(counter.pid.remote(), counter.where.remote())
        with pytest.raises(aiogpu.ActorDiedError, match="max_task_retries") as caught:
            await counter.exit.remote(3)
        assert caught.value.is_restarting
        assert isinstance(caught.value.__cause__, aiogpu.WorkerDiedError)
        assert caught.value.__cause__.exitcode == 3
        again = aiogpu.get_actor("bob")
        assert await again.add.remote() == 6, "its state is lost"
        after = await asyncio.gather(counter.pid.remote(), counter.where.remote())
        assert before[0] != after[0]
        assert before[1] == after[1]
        assert (await aiogpu.available_resources())["GPU"] == 1.5
        with pytest.raises(aiogpu.ActorDiedError, match="code 4") as caught:
            await counter.exit.remote(4)
        assert not caught.value.is_restarting
        with pytest.raises(aiogpu.ActorDiedError, match=r"is dead.*code 4"):
            await counter.add.remote()


async def test_only_the_call_that_had_begun_is_lost(gate: Gate) -> None:
    """More than are sent ahead wait behind it; all keep their order."""
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        counter = Counter.options(**ALWAYS).remote()
        first = counter.gated.remote(gate.path, "a")
        dying = counter.exit.remote(3)
        calls = [counter.add.remote() for _ in range(400)]
        await gate.entered("a")
        calls[7].cancel()
        calls.append(counter.add.remote())
        gate.release("a")
        assert await first == "a"
        with pytest.raises(aiogpu.ActorDiedError, match="code 3"):
            await dying
        del calls[7]
        assert await asyncio.gather(*calls) == [*range(1, 401)]


async def test_calls_made_while_it_restarts_wait(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        slow = Slow.options(**ALWAYS).remote(gate.path)
        await gate.entered("constructor")
        gate.release("constructor")
        await slow
        gate.forget("constructor")
        with pytest.raises(aiogpu.ActorDiedError):
            await slow.exit.remote(3)
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


async def test_calls_are_tried_again_as_often_as_they_may(tmp_path: Path) -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        for number, (restarts, retries, deaths) in enumerate(
            ((2, 2, 2), (-1, 1, 1), (1, -1, 1), (-1, -1, 2))
        ):
            options = {"max_restarts": restarts, "max_task_retries": retries}
            counter = Counter.options(**options).remote()
            path = str(tmp_path / f"enough{number}")
            poison = counter.die_until.remote(path, deaths)
            behind = [counter.note.remote(n) for n in range(3)]
            assert await poison == deaths + 1
            assert await asyncio.gather(*behind) == [1, 2, 3]
        few = Counter.options(max_restarts=-1, max_task_retries=1).remote()
        with pytest.raises(aiogpu.ActorDiedError) as caught:
            await few.die_until.remote(str(tmp_path / "few"), 2)
        assert caught.value.is_restarting
        assert await few.add.remote() == 1
        dead = Counter.options(max_restarts=1, max_task_retries=-1).remote()
        with pytest.raises(aiogpu.ActorDiedError, match="is dead") as caught:
            await dead.die_until.remote(str(tmp_path / "dead"), 2)
        assert not caught.value.is_restarting
        # What a method raises is an answer, and no reason to try again.
        with pytest.raises(ValueError, match="once"):
            await few.fail.remote(ValueError, "once")


async def test_a_call_that_had_not_begun_has_all_its_retries(tmp_path: Path) -> None:
    """It was sent, and loses its process twice, by the call before it."""
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        counter = Counter.options(max_restarts=-1, max_task_retries=1).remote()
        dying = counter.exit.remote(3)
        once_more = counter.die_until.remote(str(tmp_path / "once"), 1)
        with pytest.raises(aiogpu.ActorDiedError, match="code 3"):
            await dying
        assert await once_more == 2


@pytest.mark.usefixtures("each_engine")
@pytest.mark.parametrize(
    "kind", [Async, pytest.param(Threads, marks=pytest.mark.needs("threads"))]
)
async def test_all_that_run_at_once_are_hit(kind: Any, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        for options in (ALWAYS, AGAIN):
            actor = await kind.options(**options, max_concurrency=2).remote()
            wait = actor.wait if kind is Async else actor.gated
            running = [wait.remote(gate.path, name) for name in "ab"]
            waiting = actor.add.remote()
            await gate.entered("a", "b")
            gate.forget("a", "b")
            aiogpu.kill(actor, no_restart=False)
            if options is ALWAYS:
                for call in running:
                    with pytest.raises(aiogpu.ActorDiedError, match="killed") as caught:
                        await call
                    assert caught.value.is_restarting
            else:
                await gate.entered("a", "b")
                gate.release("a", "b")
                assert await asyncio.gather(*running) == ["a", "b"]
            assert await waiting == 1


async def test_a_cancelled_call_is_not_tried_again(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        for actor in (
            Counter.options(**AGAIN).remote(),
            Async.options(**AGAIN).remote(),
        ):
            running = actor.swallow.remote(gate.path, "a")
            await gate.entered("a")
            running.cancel()
            aiogpu.kill(actor, no_restart=False)
            assert await actor.notes.remote() == []
            gate.forget("a")


async def test_kill_and_let_it_restart(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        counter = Counter.options(max_restarts=1).remote()
        pid = await counter.pid.remote()
        running = counter.gated.remote(gate.path, "a")
        await gate.entered("a")
        aiogpu.kill(counter, no_restart=False)
        with pytest.raises(aiogpu.ActorDiedError, match="was killed") as caught:
            await running
        assert caught.value.is_restarting
        assert await counter.pid.remote() != pid
        aiogpu.kill(counter, no_restart=False)
        with pytest.raises(aiogpu.ActorDiedError, match="no restarts left"):
            await counter.pid.remote()
        # One that has no process yet has nothing to be killed.
        busy = tasks.gated.remote(gate.path, "busy")
        await gate.entered("busy")
        waiting = Counter.remote()
        aiogpu.kill(waiting, no_restart=False)
        gate.release("busy")
        await busy
        assert await waiting.add.remote() == 1


async def test_a_constructor_that_fails_the_second_time(tmp_path: Path) -> None:
    path = str(tmp_path / "lives")

    @aiogpu.remote(max_restarts=-1)
    class Once:
        def __init__(self) -> None:
            with open(path, "x"):
                pass

        def die(self) -> None:
            import os

            os._exit(3)

    async with aiogpu.init(num_cpus=1):
        once = Once.remote()
        dying, behind = once.die.remote(), once.die.remote()
        with pytest.raises(aiogpu.ActorDiedError, match="code 3") as caught:
            await dying
        for late in (behind, once):
            with pytest.raises(
                aiogpu.ActorDiedError, match="FileExistsError"
            ) as caught:
                await late
            assert isinstance(caught.value.__cause__, FileExistsError)


async def test_one_that_restarts_for_nobody_ends(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for with_call in (False, True):
            slow = Slow.options(**ALWAYS, num_gpus=1, name="slow").remote(gate.path)
            await gate.entered("constructor")
            gate.release("constructor")
            await slow
            gate.forget("constructor")
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


async def test_a_node_that_closes_restarts_nobody(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        slow = Slow.options(**ALWAYS).remote(gate.path)
        await gate.entered("constructor")
        gate.release("constructor")
        await slow
        gate.forget("constructor")
        aiogpu.kill(slow, no_restart=False)
        call = slow.add.remote()
        await gate.entered("constructor")
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await call
