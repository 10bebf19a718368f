"""[B33] Handles in tasks, in other actors and in results; actors made there."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

import aiogpu
from tests.contract import handed_on, tasks
from tests.contract.actor_classes import Counter
from tests.contract.handed_on import Pair, Player, Soft
from tests.support.gate import Gate
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


def has_gone(pid: int) -> bool:
    """An actor of an inline node has no process of its own that could be left."""
    return pid == os.getpid() or not os.path.exists(f"/proc/{pid}")


async def test_into_tasks_on_one_cpu() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = Counter.remote(5)
        await counter
        assert await handed_on.add_to.remote(counter, 1) == 6
        assert await handed_on.add_soon.remote(counter, 2) == 8
        told = await asyncio.gather(
            *(handed_on.add_to.remote(counter, 1) for _ in range(5)),
            *(handed_on.add_soon.remote(counter, 1) for _ in range(5)),
        )
        assert sorted(told) == list(range(9, 19))


@pytest.mark.parametrize("holder", ["Holder", "AsyncHolder"])
async def test_an_actor_that_keeps_a_handle(holder: str) -> None:
    async with aiogpu.init(num_cpus=2):
        counter = await Counter.remote(0)
        pid = await counter.pid.remote()
        keeper: Any = getattr(handed_on, holder).remote(counter)
        await keeper
        del counter
        gc.collect()
        calls = (keeper.add.remote(1) for _ in range(50))
        assert await asyncio.gather(*calls) == list(range(1, 51))
        assert os.path.exists(f"/proc/{pid}")
        if holder == "Holder":
            await keeper.drop.remote()
        else:
            aiogpu.kill(keeper)
        await until(lambda: has_gone(pid))


@pytest.mark.needs("deadlocks")
async def test_one_that_waits_for_itself(address: str) -> None:
    told = "max_concurrency=2" if address == "local" else "directly, by self"
    async with aiogpu.init(num_cpus=1):
        holder = await handed_on.Holder.remote()
        with pytest.raises(aiogpu.errors.DeadlockError, match=told):
            await holder.add_by_myself.remote(holder)
        await holder.take.remote(5)
        assert await holder.give.remote() == 5


async def test_calls_under_way_are_holders() -> None:
    """Of tasks with several results too."""
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote(5)
        pid = await counter.pid.remote()
        calls = [handed_on.add_to.remote(counter, 1) for _ in range(2)]
        pair = handed_on.add_twice.options(num_returns=2).remote(counter, 1)
        del counter
        gc.collect()
        assert await asyncio.gather(*calls, *pair) == [6, 7, 8, 9]
        await until(lambda: has_gone(pid))


async def test_made_in_tasks_and_given_away() -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        assert await handed_on.make_and_use.remote(10) == [11, 12]
        for giver in (handed_on.make_one, handed_on.pass_on):
            counter = await giver.remote(20)
            pid = await counter.pid.remote()
            assert await counter.add.remote() == 21
            assert await handed_on.add_to.remote(counter, 1) == 22
            with pytest.raises(handed_on.CarryingError) as caught:
                await handed_on.raise_with.remote(counter)
            del counter
            (again,) = caught.value.args
            assert await again.add.remote() == 23
            del again, caught
            gc.collect()
            await until(lambda pid=pid: has_gone(pid))
        with pytest.raises(aiogpu.InfeasibleError, match="64"):
            await handed_on.make_too_large.remote()
        async with asyncio.timeout(20):
            while (await aiogpu.status()).tasks:
                await asyncio.sleep(0)


async def test_made_by_an_actor_and_given_away(address: str) -> None:
    async with aiogpu.init(num_cpus=2):
        holder = await handed_on.Holder.remote()
        await holder.make.remote(7)
        counter = await holder.give.remote()
        assert await asyncio.gather(holder.add.remote(1), counter.add.remote(1))
        await holder.drop.remote()
        assert await counter.add.remote() == 10
        if address != "ray":  # an actor on Ray ends with the process that has made it
            aiogpu.kill(holder)
            assert await counter.add.remote() == 11


async def test_found_by_name_in_tasks() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.options(name="bob").remote(1)
        assert await handed_on.add_to_named.remote("bob", 100) == 101
        assert await handed_on.find_soon.remote("bob") == 102 + 103
        for find in (handed_on.add_to_named, handed_on.find_soon):
            with pytest.raises(aiogpu.errors.ActorNameError, match="'alice'"):
                await find.remote("alice", *[1] * (find is handed_on.add_to_named))
        assert await counter.add.remote() == 104


async def call_until_dead(counter: Any) -> None:
    while True:
        await counter.add.remote()


async def test_ended_by_a_task() -> None:
    async with aiogpu.init(num_cpus=1):
        for is_killed in (True, False):
            counter = await Counter.remote()
            await handed_on.end.remote(counter, is_killed)
            with pytest.raises(aiogpu.ActorDiedError):
                await call_until_dead(counter)


async def test_handles_that_are_of_no_use_here(address: str) -> None:
    """Before the node is open, of another loop's node, and of a closed one.

    Their numbers may be the same.
    """
    early = Counter.remote()
    with pytest.raises(aiogpu.errors.SerializationError, match="await it first"):
        handed_on.add_to.remote(early, 1)
    assert await early.add.remote() == 1
    await aiogpu.shutdown()

    async def is_refused(handle: aiogpu.ActorHandle[Any]) -> None:
        async with aiogpu.init(num_cpus=2):
            counter = await Counter.remote(100)
            for task in (handed_on.add_to, handed_on.Holder):
                with pytest.raises(
                    aiogpu.errors.SerializationError, match="belongs to another"
                ):
                    task.remote(handle, *[1] * (task is handed_on.add_to))
            assert await counter.add.remote(1) == 101

    async with aiogpu.init(num_cpus=2):
        before = await Counter.remote(5)
        await asyncio.to_thread(asyncio.run, is_refused(before))
        assert await handed_on.add_to.remote(before, 1) == 6
        add: Any = aiogpu.remote(lambda: aiogpu.get(before.add.remote(1)))
        if address != "ray":
            assert await add.remote() == 7
    await is_refused(before)
    if address != "ray":
        async with aiogpu.init(num_cpus=2):
            errors = aiogpu.errors.DeserializationError, aiogpu.ActorDiedError
            with pytest.raises(errors):
                await add.remote()


# Handles of a task's own calls, which the task gives away and then ends; the race of
# the call's end with the task's is in test_shared_values.py.


@pytest.mark.parametrize("giver", [handed_on.gives, handed_on.gives_softly])
async def test_calls_that_are_given_away(giver: Any) -> None:
    """[B16] Also of an actor that has no process yet when its caller ends."""
    async with aiogpu.init(num_cpus=3, num_gpus=1), asyncio.timeout(60):
        for _ in range(3):
            (handle,) = await giver.remote(handed_on.add_up)
            assert await handle == 1
        (handle,) = await giver.remote(handed_on.large)
        assert len(await handle) == 1 << 20
        (handle,) = await giver.remote(handed_on.failing)
        with pytest.raises(KeyError):
            await handle
        first = await Counter.options(num_gpus=1).remote()
        waiting = Counter.options(num_gpus=1).remote()
        (handle,) = await handed_on.gives_call.remote(waiting)
        aiogpu.kill(first)
        assert await handle == 1


@pytest.mark.needs("processes")
async def test_whoever_gives_a_call_away_may_be_killed() -> None:
    """The result comes all the same, or an error says that it is lost."""
    async with aiogpu.init(num_cpus=3), asyncio.timeout(60):
        box = handed_on.Holder.remote()
        for _ in range(5):
            with pytest.raises(aiogpu.WorkerDiedError):
                await handed_on.gives_and_is_killed.remote(box)
            (handle,) = await box.give.remote()
            (outcome,) = await asyncio.gather(handle, return_exceptions=True)
            lost = isinstance(outcome, aiogpu.WorkerDiedError)
            cancelled = isinstance(outcome, aiogpu.TaskCancelledError)
            assert outcome == 1 or lost or cancelled, outcome
            if lost:
                assert "is lost" in str(outcome)


@pytest.fixture
def without_the_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.needs("processes")
@pytest.mark.usefixtures("without_the_collector")
async def test_whoever_has_failed_with_an_actor_lets_go_of_it() -> None:
    """[B32] Tasks, in a worker that lives on, and the program."""
    is_free = tasks.add.options(num_gpus=1)
    async with aiogpu.init(num_cpus=1, num_gpus=1), asyncio.timeout(60):
        for holder in handed_on.HOLDERS:
            actor = handed_on.Failing.remote()
            with suppress(ValueError):
                await holder.remote(actor)
            del actor
            assert await is_free.remote(1) == 2
        actor = handed_on.Failing.remote()
        with pytest.raises(ValueError, match="told"):
            await actor.fail.remote()
        with pytest.raises(ValueError, match="told"):
            async for _ in actor.fail_amid.remote():
                pass
        del actor
        assert await is_free.remote(1) == 2


# [B12] Actors that wait for each other without end: one of them gets an error.


WITHIN = 20


@pytest.mark.needs("deadlocks")
@pytest.mark.parametrize("count", [2, 3])
async def test_a_ring_of_actors(count: int, address: str) -> None:
    async with aiogpu.init(num_cpus=1), asyncio.timeout(WITHIN):
        ring = [Player.options(name=str(i)).remote(str(i)) for i in range(count)]
        with pytest.raises(aiogpu.errors.DeadlockError) as it:
            await ring[0].relay.remote([*ring[1:], ring[0]])
        if address != "inline":
            names = [f"Player '{i % count}'.relay" for i in range(count + 1)]
            waits = [f"{a} waits for {b}" for a, b in pairwise(names)]
            for told in waits:
                assert told in str(it.value)
            assert f"{waits[-1]}, which comes after {names[0]}" in str(it.value)
        # The others go on.
        assert await ring[-1].relay.remote(ring[:-1]) == "".join(
            str(i) for i in (count - 1, *range(count - 1))
        )


@pytest.mark.needs("deadlocks", "blocking", "at once")
async def test_two_that_are_called_at_once(gate: Gate) -> None:
    """Each call is queued behind the one that waits; one of them is given up."""
    async with aiogpu.init(num_cpus=1), asyncio.timeout(WITHIN):
        a, b = Player.remote("a"), Player.remote("b")
        calls = [
            a.meet_and_ask.remote([b], gate.path),
            b.meet_and_ask.remote([a], gate.path),
        ]
        await gate.entered("a", "b")
        gate.release("a", "b")
        ended = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one for one in ended if isinstance(one, aiogpu.errors.DeadlockError)]
        assert len(errors) == 1
        assert "answer, which comes after Player.meet_and_ask" in str(errors[0])
        assert {one for one in ended if isinstance(one, str)} <= {"a", "b"}
        assert await a.answer.remote() == "a"


@pytest.mark.needs("deadlocks")
@pytest.mark.parametrize("way", ["ask_by_task", "ask_by_maker"])
async def test_an_actor_that_a_task_or_a_constructor_calls_back(way: str) -> None:
    async with aiogpu.init(num_cpus=2), asyncio.timeout(WITHIN):
        player = Player.remote("p")
        with pytest.raises(aiogpu.AiogpuError) as it:
            await getattr(player, way).remote([player])
        # Of a constructor, the error of the actor that is dead quotes it.
        assert "DeadlockError" in repr(it.value)
        assert await player.answer.remote() == "p"


@pytest.mark.needs("deadlocks", "blocking", "threads")
@pytest.mark.parametrize("kind", [Pair, Soft])
async def test_no_wait_that_ends_is_given_up(kind: Any) -> None:
    async with aiogpu.init(num_cpus=2), asyncio.timeout(WITHIN):
        player, other = (
            Player.remote("p"),
            kind.remote(*("p" * (kind is Pair))),
        )
        assert len(await other.relay.remote([player, other])) == 3
        assert await player.ask_for_a_while.remote([other, player]) == "too late"
