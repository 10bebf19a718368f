"""[B16] Results that are arguments of other calls: resolved, or handed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from tests.contract import keepers, odd_pickles
from tests.contract import value_tasks as v
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

ACTORS = [
    keepers.Serial,
    pytest.param(keepers.Threaded, marks=pytest.mark.needs("threads")),
    keepers.Soft,
]


@pytest.fixture
async def node(address: str) -> AsyncIterator[aiogpu.types.Node]:
    """Four CPUs."""
    async with (
        asyncio.timeout(60),
        aiogpu.init(address=address, num_cpus=4) as session,
    ):
        yield session


@pytest.mark.parametrize("task", [v.add, v.add_softly])
async def test_a_handle_arrives_as_its_value(
    task: Any, node: aiogpu.types.Node
) -> None:
    """Pending or done, by position or by name, once or twice."""
    one = task.remote(0)
    assert await task.remote(one) == 2
    assert await task.remote(one, one) == 2
    assert await task.remote(a=one, b=one) == 2
    assert await task.remote(one, b=task.remote(one)) == 3
    assert await one == 1
    assert await task.remote(one, b=5) == 6
    assert await one == 1


async def test_many_places_at_once(node: aiogpu.types.Node) -> None:
    handles = [v.add.remote(i) for i in range(20)]
    named = {f"k{i}": v.add.remote(i) for i in range(20)}
    assert await v.total.remote(*handles, 7, **named, also=3) == 2 * 210 + 10


async def test_a_long_chain_of_pending_tasks(node: aiogpu.types.Node) -> None:
    handle: Any = v.give.remote(0)
    for i in range(100):
        handle = (v.add if i % 2 else v.add_softly).remote(handle)
    assert await handle == 100


async def test_a_fan_out_and_back(node: aiogpu.types.Node) -> None:
    root = v.give.remote(5)
    assert await v.total.remote(*[v.add.remote(root, i) for i in range(30)]) == 585


async def test_twice_in_one_call_is_two_copies(node: aiogpu.types.Node) -> None:
    """As if both had been given as lists: there is no sharing between arguments."""
    handle = v.give.remote([1])
    assert not await v.are_same.remote(handle, handle)


async def test_none_and_other_odd_values(node: aiogpu.types.Node) -> None:
    for value in (None, (), {}, "", 0, False, [None], ((), {})):
        assert await v.give.remote(v.give.remote(value)) == value


async def test_nested_in_a_container_it_stays_a_handle(node: aiogpu.types.Node) -> None:
    done, pending = v.give.remote(1), v.add.remote(1)
    await done
    found = await v.kinds.remote(done, [done], {"a": pending}, (pending,))
    assert found == ["int", "list", "dict", "tuple"]
    back = await v.give_boxed.remote({"handle": pending, "again": pending})
    assert isinstance(back["handle"], asyncio.Future)
    assert await back["handle"] == await back["again"] == 2


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        *((v.get_nested, 2), (v.await_nested, 2)),
        *((v.hand_on, 12), (v.hand_on_softly, 12)),
        *((v.hand_on_boxed, 2), (v.hand_on_boxed_softly, 2)),
    ],
)
@pytest.mark.parametrize("state", ["done", "pending"])
async def test_what_a_task_does_with_a_handle(
    state: str, task: Any, expected: int, node: aiogpu.types.Node
) -> None:
    handle = v.add.remote(1)
    if state == "done":
        await handle
    assert await task.remote({"handle": handle}) == expected
    assert await handle == 2


@pytest.mark.needs("interrupts")
async def test_a_handle_of_a_task_that_still_runs(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.remote(gate.path, "slow", 3)
    await gate.entered("slow")
    readers = [v.get_nested.remote({"handle": slow}) for _ in range(2)]
    readers += [
        v.await_nested.remote({"handle": slow}),
        v.hand_on.remote({"handle": slow}),
    ]
    told = v.tell.remote(gate.path, "needs it", slow)
    gate.release("slow")
    assert await asyncio.gather(*readers, told) == [3, 3, 3, 13, "needs it"]


async def test_a_handle_goes_round_and_comes_back(node: aiogpu.types.Node) -> None:
    """Through five tasks and two actors, and is still the same value."""
    box: Any = {"handle": v.give.remote([1, 2])}
    for _ in range(5):
        box = await v.give_boxed.remote(box)
    for kind in (keepers.Serial, keepers.Soft):
        async with kind.remote() as actor:
            assert await actor.keep.remote(box) == 2
            box = await actor.last.remote()
    assert await box["handle"] == [1, 2]


@pytest.mark.parametrize("depth", [1, 2, 30])
@pytest.mark.parametrize("task", [v.chain, v.chain_softly, v.chain_of_ended])
async def test_chains_in_a_task(task: Any, depth: int, node: aiogpu.types.Node) -> None:
    assert await task.remote(depth) == depth


@pytest.mark.parametrize("kind", ACTORS)
async def test_actors_take_handles(kind: Any, node: aiogpu.types.Node) -> None:
    """In the constructor, in methods, and from one actor to another."""
    first = v.give.remote([1])
    async with kind.remote(first) as actor, kind.remote(first=v.add.remote(1)) as other:
        assert await actor.last.remote() == [1]
        assert await other.last.remote() == 2
        pending = actor.add.remote(1)
        assert await other.add.remote(pending, b=pending) == 4
        assert await v.add.remote(actor.add.remote(other.add.remote(1))) == 4


@pytest.mark.parametrize("kind", ACTORS)
async def test_an_actor_keeps_a_handle(kind: Any, node: aiogpu.types.Node) -> None:
    """And reads it when its program has forgotten it."""
    async with kind.remote() as actor:
        await actor.keep.remote({"handle": v.give.remote("kept")})
        assert await actor.read_last.remote() == "kept"
        assert await actor.read_last.remote() == "kept"


@pytest.mark.parametrize("kind", ACTORS)
async def test_a_constructor_keeps_a_handle(kind: Any, node: aiogpu.types.Node) -> None:
    """It has no event loop; the methods of some have one."""
    async with kind.remote({"handle": v.give.remote([1])}) as actor:
        assert await actor.read_last.remote() == [1]
        assert await actor.read_last.remote() == [1]


@pytest.mark.parametrize("task", [v.gather_nested, v.wait_for_nested])
async def test_a_coroutine_gets_true_futures(
    task: Any, node: aiogpu.types.Node
) -> None:
    pending = v.add.remote(2)
    assert await task.remote([v.add.remote(1), pending, pending]) == [2, 3, 3]


@pytest.mark.needs("interrupts")
async def test_the_order_of_one_caller_is_kept(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    """Behind a call whose argument is pending; others' calls go ahead."""
    async with keepers.Serial.remote("made") as actor:
        pending = v.gated.remote(gate.path, "slow", "first")
        mine = [actor.keep.remote(pending)]
        mine += [actor.keep.remote(i) for i in range(3)]
        await gate.entered("slow")
        assert await v.train.remote(actor, 4) == 5
        others = v.call_in_order.remote(actor, gate.path, "theirs")
        await gate.entered("theirs")
        gate.release("theirs")
        assert await others == ["made", "first", 0, 1, 2]
        assert not any(handle.done() for handle in mine)
        gate.release("slow")
        await asyncio.gather(*mine)
        assert (await actor.all.remote())[5:] == ["first", 0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "train"),
    [
        (keepers.Serial, v.train),
        (keepers.Serial, v.train_softly),
        pytest.param(keepers.Threaded, v.train, marks=pytest.mark.needs("threads")),
        (keepers.Soft, v.train_softly),
    ],
)
async def test_an_argument_that_depends_on_the_actor(
    kind: Any, train: Any, node: aiogpu.types.Node
) -> None:
    """`actor.update.remote(train.remote(actor))`, where train calls the actor."""
    async with kind.remote() as actor:
        assert await actor.add.remote(train.remote(actor, 1)) == 3
        assert await actor.add.remote(1) == 2


async def test_calls_behind_one_whose_argument_fails(node: aiogpu.types.Node) -> None:
    async with keepers.Serial.remote() as actor:
        lost = actor.keep.remote(v.fail.remote("lost"))
        last = actor.keep.remote("last")
        with pytest.raises(odd_pickles.LoudError):
            await lost
        assert await last == 2
        assert await actor.all.remote() == [None, "last"]


async def test_calls_behind_one_that_is_cancelled(node: aiogpu.types.Node) -> None:
    async with keepers.Serial.remote() as actor:
        given_up = actor.keep.remote(v.give.remote("given up"))
        last = actor.keep.remote("last")
        given_up.cancel()
        assert await last == 2
        assert await actor.all.remote() == [None, "last"]


async def test_an_actor_ends_after_a_call_that_waits_for_its_argument(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    actor = keepers.Serial.remote()
    await actor
    slow = v.gated.remote(gate.path, "slow", 1)
    last = actor.add.remote(slow)
    del actor
    await gate.entered("slow")
    gate.release("slow")
    assert await last == 2


async def test_map_and_pools(node: aiogpu.types.Node) -> None:
    handles = [v.add.remote(i) for i in range(10)]
    found = [x async for x in v.add.map(handles, limit=3)]
    assert found == list(range(2, 12))


async def test_a_closure_cannot_hold_a_handle(node: aiogpu.types.Node) -> None:
    """A function is sent once to each worker, and nobody could say when it is freed."""
    handle = v.give.remote(1)

    @aiogpu.remote
    def closure() -> Any:
        return handle

    with pytest.raises(aiogpu.errors.SerializationError, match="give"):
        closure.remote()
    assert await handle == 1
