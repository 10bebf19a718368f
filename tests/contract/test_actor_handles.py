"""[B33] Handles in tasks, in other actors and in results; actors made there."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

import aiogpu
from tests.contract import handed_on
from tests.contract.actor_classes import Counter
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


def has_gone(pid: int) -> bool:
    """An actor of an inline node has no process of its own that could be left."""
    return pid == os.getpid() or not os.path.exists(f"/proc/{pid}")


def lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


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


async def test_a_task_under_way_is_a_holder() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote(5)
        pid = await counter.pid.remote()
        calls = [handed_on.add_to.remote(counter, 1) for _ in range(3)]
        del counter
        gc.collect()
        assert await asyncio.gather(*calls) == [6, 7, 8]
        await until(lambda: has_gone(pid))


async def test_a_task_with_several_results_is_a_holder() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote(5)
        pid = await counter.pid.remote()
        add_twice = handed_on.add_twice.options(num_returns=2)
        calls = [add_twice.remote(counter, 1) for _ in range(2)]
        del counter
        gc.collect()
        told = [await asyncio.gather(*pair) for pair in calls]
        assert told == [[6, 7], [8, 9]]
        await until(lambda: has_gone(pid))


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
        assert lives(pid)
        if holder == "Holder":
            await keeper.drop.remote()
        else:
            aiogpu.kill(keeper)
        await until(lambda: has_gone(pid))


async def test_an_actor_of_a_task_ends_with_it() -> None:
    async with aiogpu.init(num_cpus=1):
        assert await handed_on.make_and_use.remote(10) == [11, 12]
        await until_idle()


async def until_idle() -> None:
    async with asyncio.timeout(20):
        while (await aiogpu.status()).tasks:
            await asyncio.sleep(0)


@pytest.mark.parametrize("giver", [handed_on.make_one, handed_on.pass_on])
async def test_out_of_a_task(giver: Any) -> None:
    async with aiogpu.init(num_cpus=2):
        counter = await giver.remote(20)
        pid = await counter.pid.remote()
        assert await counter.add.remote() == 21
        assert await handed_on.add_to.remote(counter, 1) == 22
        del counter
        gc.collect()
        if giver is handed_on.make_one:
            await until(lambda: has_gone(pid))


async def test_made_by_an_actor_and_given_away() -> None:
    async with aiogpu.init(num_cpus=2):
        holder = await handed_on.Holder.remote()
        await holder.make.remote(7)
        counter = await holder.give.remote()
        assert await asyncio.gather(holder.add.remote(1), counter.add.remote(1))
        pid = await counter.pid.remote()
        await holder.drop.remote()
        assert await counter.add.remote() == 10
        assert lives(pid)


@pytest.mark.needs("orphans")
async def test_one_outlives_the_actor_that_has_made_it() -> None:
    async with aiogpu.init(num_cpus=2):
        holder = await handed_on.Holder.remote()
        await holder.make.remote(7)
        counter = await holder.give.remote()
        pid = await counter.pid.remote()
        aiogpu.kill(holder)
        assert await counter.add.remote() == 8
        assert lives(pid)


async def test_names() -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.options(name="bob").remote(1)
        assert await handed_on.add_to_named.remote("bob", 100) == 101
        with pytest.raises(aiogpu.errors.ActorNameError, match="'alice'"):
            await handed_on.add_to_named.remote("alice", 1)
        assert await counter.add.remote() == 102


async def test_what_can_never_be_placed() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        with pytest.raises(aiogpu.InfeasibleError, match="64"):
            await handed_on.make_too_large.remote()


async def call_until_dead(counter: Any) -> None:
    while True:
        await counter.add.remote()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_ended_by_a_task(is_killed: bool) -> None:
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote()
        await handed_on.end.remote(counter, is_killed)
        with pytest.raises(aiogpu.ActorDiedError):
            await call_until_dead(counter)


@pytest.mark.needs("deadlocks")
async def test_one_that_waits_for_itself(address: str) -> None:
    told = "max_concurrency=2" if address == "local" else "directly, by self"
    async with aiogpu.init(num_cpus=1):
        holder = await handed_on.Holder.remote()
        with pytest.raises(aiogpu.errors.DeadlockError, match=told):
            await holder.add_by_myself.remote(holder)
        await holder.take.remote(5)
        assert await holder.give.remote() == 5


async def test_before_the_node_is_open() -> None:
    counter = Counter.remote()
    with pytest.raises(aiogpu.errors.SerializationError, match="await it first"):
        handed_on.add_to.remote(counter, 1)
    assert await counter.add.remote() == 1
    await aiogpu.shutdown()


async def test_a_handle_of_a_closed_node_is_no_actor_of_the_next() -> None:
    """Their numbers may be the same."""
    async with aiogpu.init(num_cpus=2):
        before = await Counter.remote(5)
    async with aiogpu.init(num_cpus=2):
        counter = await Counter.remote(100)
        with pytest.raises(
            aiogpu.errors.SerializationError, match="belongs to another"
        ):
            handed_on.add_to.remote(before, 1)
        with pytest.raises(
            aiogpu.errors.SerializationError, match="belongs to another"
        ):
            handed_on.Holder.remote(before)
        assert await counter.add.remote(1) == 101


@pytest.mark.needs("holders")
async def test_a_function_that_holds_a_handle_of_a_closed_node_does_not_start() -> None:
    async with aiogpu.init(num_cpus=2):
        before = await Counter.remote(5)
        add: Any = aiogpu.remote(lambda: aiogpu.get(before.add.remote(1)))
        assert await add.remote() == 6
    async with aiogpu.init(num_cpus=2):
        counter = await Counter.remote(100)
        with pytest.raises((aiogpu.errors.DeserializationError, aiogpu.ActorDiedError)):
            await add.remote()
        assert await counter.add.remote(1) == 101


async def test_a_handle_of_another_loops_node_is_none_of_this_ones(
    address: str,
) -> None:
    async def elsewhere(handle: aiogpu.ActorHandle[Any]) -> None:
        async with aiogpu.init(num_cpus=2):
            counter = await Counter.remote(100)
            with pytest.raises(
                aiogpu.errors.SerializationError, match="belongs to another"
            ):
                handed_on.add_to.remote(handle, 1)
            assert await counter.add.remote(1) == 101

    async with aiogpu.init(num_cpus=2):
        counter = await Counter.remote(5)
        await asyncio.to_thread(asyncio.run, elsewhere(counter))
        assert await handed_on.add_to.remote(counter, 1) == 6
