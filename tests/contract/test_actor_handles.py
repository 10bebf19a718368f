"""Handles in tasks, in other actors and in results; actors made there."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import handed_on, tasks
from tests.contract import value_tasks as v
from tests.contract.actor_classes import Counter
from tests.contract.handed_on import Pair, Player, Soft
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]


async def process_ends(pid: int) -> None:
    """Wait until the process ends. An inline actor has no process of its own."""
    await until(lambda: pid == os.getpid() or not os.path.exists(f"/proc/{pid}"))


async def test_tasks_call_an_actor_by_its_handle() -> None:
    """On one CPU."""
    counter = Counter.remote(5)
    await counter
    assert await handed_on.add_to.remote(counter, 1) == 6
    assert await handed_on.add_soon.remote(counter, 2) == 8
    counts = await asyncio.gather(
        *(handed_on.add_to.remote(counter, 1) for _ in range(5)),
        *(handed_on.add_soon.remote(counter, 1) for _ in range(5)),
    )
    assert sorted(counts) == list(range(9, 19))


async def test_handles_of_one_actor_are_equal() -> None:
    counter = await Counter.options(name="equal").remote(0)
    other = await Counter.remote(0)
    found, again = [await aiogpu.get_actor("equal") for _ in range(2)]
    sent = (await v.give.remote([counter]))[0]
    copies = [copy.copy(counter), copy.deepcopy([counter])[0]]
    handles = [counter, found, again, sent, *copies]
    assert all(handle == counter for handle in handles)
    assert set(handles) == {counter}
    assert other != counter
    assert len({*handles, other}) == 2
    assert counter != "equal"
    for handle in handles:
        await handle.add.remote(1)
    assert await found.add.remote(0) == len(handles)
    are_equal = await handed_on.are_equal.remote([counter, found, other])
    assert are_equal == (True, False, 2)


@pytest.mark.parametrize("holder", ["Holder", "AsyncHolder"])
@pytest.mark.aiogpu(num_cpus=2)
async def test_an_actor_with_a_handle_keeps_the_other_actor(holder: str) -> None:
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
    await process_ends(pid)


@pytest.mark.needs("deadlocks")
async def test_an_actor_that_waits_for_itself_gets_an_error(address: str) -> None:
    advice = "max_concurrency=2" if address == "local" else "directly, by self"
    holder = await handed_on.Holder.remote()
    call = holder.add_by_myself.remote(holder)
    await raises(errors.DeadlockError, call, match=advice)
    await holder.take.remote(5)
    assert await holder.give.remote() == 5


async def test_calls_that_run_keep_the_actors_of_their_arguments() -> None:
    """Of tasks with several results too."""
    counter = await Counter.remote(5)
    pid = await counter.pid.remote()
    calls = [handed_on.add_to.remote(counter, 1) for _ in range(2)]
    pair = handed_on.add_twice.options(num_returns=2).remote(counter, 1)
    del counter
    gc.collect()
    assert await asyncio.gather(*calls, *pair) == [6, 7, 8, 9]
    await process_ends(pid)


@pytest.mark.aiogpu(num_cpus=2, num_gpus=1)
async def test_tasks_make_actors_and_give_them_away() -> None:
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
        await process_ends(pid)
    await raises(errors.InfeasibleError, handed_on.make_too_large.remote(), match="64")
    async with asyncio.timeout(20):
        while (await aiogpu.status()).tasks:
            await asyncio.sleep(0)


@pytest.mark.aiogpu(num_cpus=2)
async def test_an_actor_makes_an_actor_and_gives_it_away(address: str) -> None:
    holder = await handed_on.Holder.remote()
    await holder.make.remote(7)
    counter = await holder.give.remote()
    assert await asyncio.gather(holder.add.remote(1), counter.add.remote(1))
    await holder.drop.remote()
    assert await counter.add.remote() == 10
    if address != "ray":  # an actor on Ray ends with the process that has made it
        aiogpu.kill(holder)
        assert await counter.add.remote() == 11


async def test_tasks_find_actors_by_name() -> None:
    counter = await Counter.options(name="bob").remote(1)
    find = handed_on.find_soon
    assert await handed_on.add_to_named.remote("bob", 100) == 101
    assert await find.remote("bob") == 102 + 103
    calls = (
        handed_on.add_to_named.remote("alice", 1),
        handed_on.find_soon.remote("alice"),
    )
    await raises(errors.ActorNameError, *calls, match="'alice'")
    assert await counter.add.remote() == 104


async def call_without_end(counter: Any) -> None:
    while True:
        await counter.add.remote()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_task_ends_an_actor(is_killed: bool) -> None:
    counter = await Counter.remote()
    await handed_on.end.remote(counter, is_killed)
    await raises(errors.ActorDiedError, lambda: call_without_end(counter))


@pytest.mark.own_node
async def test_handles_of_other_nodes_are_refused(address: str) -> None:
    """Of another loop's node, and of a closed one. Their numbers may be the same."""

    async def is_refused(handle: aiogpu.ActorHandle[Any]) -> None:
        async with aiogpu.init(num_cpus=2):
            counter = await Counter.remote(100)
            for task in (handed_on.add_to, handed_on.Holder):
                with pytest.raises(errors.SerializationError, match="belongs to anoth"):
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
            kinds = errors.DeserializationError, errors.ActorDiedError
            await raises(kinds, lambda: add.remote())


@pytest.mark.own_node
async def test_an_actor_is_passed_on_before_its_node_is_open(address: str) -> None:
    """Without `init`: what is sent with the handle waits for the node, too."""
    first, early = Soft.remote(), Counter.remote(5)
    if address == "ray":
        with pytest.raises(errors.SerializationError, match="`await actor`, or"):
            handed_on.add_to.remote(early, 1)
        await asyncio.gather(first, early)
        await aiogpu.shutdown()
        return
    relayed = first.relay.remote([Soft.remote(), Soft.remote()])
    added = handed_on.add_soon.remote(early, 1)
    stored = aiogpu.put([early])
    keeper = handed_on.AsyncHolder.remote(early)
    give_back: Any = aiogpu.remote(lambda found: found)
    returned = give_back.remote({"counter": [early]})
    named = Counter.options(name="early").remote(20)
    assert await handed_on.add_soon.remote(named, 1) == 21
    assert await relayed == "sss"
    assert await added == 6
    del early
    assert await keeper.add.remote(1) == 7
    assert await (await returned)["counter"][0].add.remote(1) == 8
    assert await (await stored)[0].add.remote(1) == 9
    await aiogpu.shutdown()


@pytest.mark.own_node
async def test_an_actor_that_cannot_be_made_fails_what_has_its_handle(
    address: str,
) -> None:
    """The handle was passed on before the node was open."""
    if address == "ray":
        pytest.skip("Ray chooses the ids of actors")
    greedy = Counter.options(num_gpus=64).remote()
    with_it = handed_on.add_soon.remote(greedy, 1)
    await raises(errors.InfeasibleError, lambda: greedy.add.remote())
    kinds = errors.InfeasibleError, errors.ActorDiedError, errors.DeserializationError
    await raises(kinds, lambda: with_it)
    assert await handed_on.add_soon.remote(Counter.remote(1), 1) == 2
    await aiogpu.shutdown()


@pytest.mark.own_node
async def test_a_function_does_not_keep_a_handle_of_a_node_that_opens(
    address: str,
) -> None:
    """It may outlive the node, and another node may have an actor of the same id."""
    early = Counter.remote()
    with pytest.raises(errors.SerializationError, match="before its node is open"):
        aiogpu.remote(lambda: early).remote()
    assert await early.add.remote() == 1
    await aiogpu.shutdown()


# Tasks give handles of their own calls away and then end. test_shared_values.py has the
# race of the call's end with the task's.


@pytest.mark.parametrize("giver", [handed_on.gives, handed_on.gives_softly])
@pytest.mark.aiogpu(num_cpus=3, num_gpus=1)
async def test_a_call_outlives_the_task_that_gives_it_away(giver: Any) -> None:
    """Also a call of an actor that has no process yet when its caller ends."""
    for _ in range(3):
        (handle,) = await giver.remote(handed_on.add_up)
        assert await handle == 1
    (handle,) = await giver.remote(handed_on.large)
    assert len(await handle) == 1 << 20
    (handle,) = await giver.remote(handed_on.failing)
    await raises(KeyError, handle)
    first = await Counter.options(num_gpus=1).remote()
    waiting = Counter.options(num_gpus=1).remote()
    (handle,) = await handed_on.gives_call.remote(waiting)
    aiogpu.kill(first)
    assert await handle == 1


@pytest.mark.needs("processes")
@pytest.mark.aiogpu(num_cpus=3)
async def test_a_call_of_a_killed_task_ends_or_is_reported_lost() -> None:
    box = handed_on.Holder.remote()
    for _ in range(5):
        await raises(errors.WorkerDiedError, handed_on.gives_and_is_killed.remote(box))
        (handle,) = await box.give.remote()
        (outcome,) = await asyncio.gather(handle, return_exceptions=True)
        lost = isinstance(outcome, errors.WorkerDiedError)
        cancelled = isinstance(outcome, errors.TaskCancelledError)
        assert outcome == 1 or lost or cancelled, outcome
        assert not lost or "is lost" in str(outcome)


@pytest.fixture
def without_the_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.needs("processes")
@pytest.mark.usefixtures("without_the_collector")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_an_error_of_an_actor_does_not_keep_it() -> None:
    """Tasks, in a worker that lives on, and the program."""
    is_free = tasks.add.options(num_gpus=1)
    async with asyncio.timeout(60):
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


# Actors that wait for each other without end: one of them gets an error.


WITHIN = 20


@pytest.mark.needs("deadlocks")
@pytest.mark.parametrize("count", [2, 3])
async def test_a_ring_of_waiting_actors_gets_an_error(count: int, address: str) -> None:
    async with asyncio.timeout(WITHIN):
        ring = [Player.options(name=str(i)).remote(str(i)) for i in range(count)]
        call = ring[0].relay.remote([*ring[1:], ring[0]])
        error = await raises(errors.DeadlockError, call)
        if address != "inline":
            names = [f"Player '{i % count}'.relay" for i in range(count + 1)]
            waits = [f"{a} waits for {b}" for a, b in pairwise(names)]
            assert all(wait in str(error) for wait in waits)
            assert f"{waits[-1]}, which comes after {names[0]}" in str(error)
        # The others go on.
        order = "".join(map(str, (count - 1, *range(count - 1))))
        assert await ring[-1].relay.remote(ring[:-1]) == order


@pytest.mark.needs("deadlocks", "blocking", "at once")
async def test_two_actors_that_call_each_other_get_an_error(gate: Gate) -> None:
    """Each call is queued behind the call that waits; one of them is given up."""
    async with asyncio.timeout(WITHIN):
        a, b = Player.remote("a"), Player.remote("b")
        calls = [
            a.meet_and_ask.remote([b], gate.path),
            b.meet_and_ask.remote([a], gate.path),
        ]
        await gate.let_pass("a", "b")
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        (error,) = (each for each in outcomes if isinstance(each, errors.DeadlockError))
        assert "answer, which comes after Player.meet_and_ask" in str(error)
        assert {each for each in outcomes if isinstance(each, str)} <= {"a", "b"}
        assert await a.answer.remote() == "a"


@pytest.mark.needs("deadlocks")
@pytest.mark.parametrize("way", ["ask_by_task", "ask_by_maker"])
@pytest.mark.aiogpu(num_cpus=2)
async def test_a_call_back_to_a_waiting_actor_gets_an_error(way: str) -> None:
    """A task that the actor starts calls back, or a constructor does."""
    async with asyncio.timeout(WITHIN):
        player = Player.remote("p")
        error = await raises(errors.AiogpuError, getattr(player, way).remote([player]))
        # Of a constructor, the error of the actor that is dead quotes it.
        assert "DeadlockError" in repr(error)
        assert await player.answer.remote() == "p"


@pytest.mark.needs("deadlocks", "blocking", "threads")
@pytest.mark.parametrize("kind", [Pair, Soft])
@pytest.mark.aiogpu(num_cpus=2)
async def test_a_wait_that_ends_gets_no_error(kind: Any) -> None:
    async with asyncio.timeout(WITHIN):
        player, other = Player.remote("p"), kind.remote(*("p" * (kind is Pair)))
        assert len(await other.relay.remote([player, other])) == 3
        assert await player.ask_for_a_while.remote([other, player]) == "too late"
