"""[B16] Results as arguments of calls: resolved, handed on, failed or cancelled."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from tests.contract import chain_tasks as c
from tests.contract import value_tasks as v
from tests.contract.node_here import node_here
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=4),
]


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
    for kind in (v.Serial, v.Soft):
        async with kind.remote() as actor:
            assert await actor.keep.remote(box) == 2
            box = await actor.last.remote()
    assert await box["handle"] == [1, 2]


@pytest.mark.needs("interrupts")
async def test_the_order_of_one_caller_is_kept(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    """Behind a call whose argument is pending; others' calls go ahead."""
    async with v.Serial.remote("made") as actor:
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


async def test_an_actor_ends_after_a_call_that_waits_for_its_argument(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    actor = v.Serial.remote()
    await actor
    slow = v.gated.remote(gate.path, "slow", 1)
    last = actor.add.remote(slow)
    del actor
    await gate.entered("slow")
    gate.release("slow")
    assert await last == 2


async def test_a_closure_cannot_hold_a_handle(node: aiogpu.types.Node) -> None:
    """A function is sent once to each worker, and nobody could say when it is freed."""
    handle = v.give.remote(1)

    @aiogpu.remote
    def closure() -> Any:
        return handle

    with pytest.raises(aiogpu.errors.SerializationError, match="give"):
        closure.remote()
    assert await handle == 1


@pytest.fixture
async def complaints() -> AsyncIterator[list[str]]:
    """What asyncio says that nobody has looked at; there shall be nothing."""
    said: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: said.append(context["message"]))
    yield said
    gc.collect()
    await asyncio.sleep(0)
    assert said == []


BOTH = pytest.mark.parametrize("way", ["plain", "coroutine"])


@BOTH
async def test_a_handle_arrives_as_its_value(way: str, node: aiogpu.types.Node) -> None:
    """Pending or done, by position or by name, once or twice."""
    task: Any = v.add if way == "plain" else v.add_softly
    one = task.remote(0)
    assert await task.remote(one) == 2
    assert await task.remote(a=one, b=one) == 2
    assert await task.remote(one, b=task.remote(one)) == 3
    assert await one == 1
    assert await task.remote(one, b=5) == 6
    handle: Any = one
    for _ in range(50):
        handle = task.remote(handle)
    handles = [task.remote(i) for i in range(20)]
    named = {f"k{i}": task.remote(i) for i in range(20)}
    assert await v.total.remote(handle, *handles, 7, **named, also=3) == 51 + 430
    assert await one == 1


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        *((v.get_nested, 2), (v.await_nested, 2)),
        *((v.hand_on, 12), (v.hand_on_softly, 12)),
        *((v.hand_on_boxed, 2), (v.hand_on_boxed_softly, 2)),
    ],
)
async def test_what_a_task_does_with_a_handle(
    task: Any, expected: int, node: aiogpu.types.Node
) -> None:
    """Its value, and its error."""
    handle = v.add.remote(1)
    assert await task.remote({"handle": handle}) == expected
    assert await handle == 2
    assert await task.remote({"handle": handle}) == expected
    failing = v.fail.remote("in a box")
    with pytest.raises(v.LoudError, match="in a box"):
        await task.remote({"handle": failing})
    with pytest.raises(v.LoudError):
        await failing


@pytest.mark.parametrize("task", [v.chain, v.chain_softly, v.chain_of_ended])
async def test_chains_in_a_task(task: Any, node: aiogpu.types.Node) -> None:
    for depth in (1, 2, 30):
        assert await task.remote(depth) == depth


@pytest.mark.parametrize(
    "kind",
    [
        v.Serial,
        pytest.param(v.Threaded, marks=pytest.mark.needs("threads")),
        v.Soft,
    ],
)
async def test_actors_take_and_keep_handles(kind: Any, node: aiogpu.types.Node) -> None:
    """In constructors, which have no loop, in methods, and from one to another."""
    boxed = {"handle": v.give.remote("kept")}
    async with kind.remote(boxed) as actor, kind.remote(first=v.add.remote(1)) as other:
        assert await other.last.remote() == 2
        await other.keep.remote(boxed)
        del boxed
        for each in (actor, other, other):
            assert await each.read_last.remote() == "kept"
        pending = actor.add.remote(1)
        assert await other.add.remote(pending, b=pending) == 4
        assert await v.add.remote(actor.add.remote(other.add.remote(1))) == 4
        # Where a task calls the actor whose method waits for the task's result.
        for train in (v.train_softly, *[v.train] * (kind is not v.Soft)):
            assert await actor.add.remote(train.remote(actor, 1)) == 3


async def test_a_coroutine_gets_true_futures(node: aiogpu.types.Node) -> None:
    for task in (v.gather_nested, v.wait_for_nested):
        pending = v.add.remote(2)
        assert await task.remote([v.add.remote(1), pending, pending]) == [2, 3, 3]


async def test_calls_behind_one_that_never_runs(node: aiogpu.types.Node) -> None:
    """Its argument fails, or it is cancelled."""
    async with v.Serial.remote() as actor:
        lost = actor.keep.remote(v.fail.remote("lost"))
        given_up = actor.keep.remote(v.give.remote("given up"))
        last = actor.keep.remote("last")
        given_up.cancel()
        with pytest.raises(v.LoudError):
            await lost
        assert await last == 2
        assert await actor.all.remote() == [None, "last"]


@BOTH
async def test_failures_among_children(way: str, node: aiogpu.types.Node) -> None:
    """An error is passed on by way of the node, or by the task that has seen it."""
    task = v.pass_failing if way == "plain" else v.pass_failing_softly
    for how in ("pending", "ended"):
        assert await task.remote(how) == "of a child"


@BOTH
@pytest.mark.needs("interrupts", "at once")
async def test_a_task_cancels_what_its_other_child_needs(
    way: str, node: aiogpu.types.Node, gate: Gate
) -> None:
    plain = v.cancel_what_is_needed, v.cancel_what_came_back_plainly
    soft = v.cancel_what_is_needed_softly, v.cancel_what_came_back
    needed, came_back = plain if way == "plain" else soft
    assert "cancelled" in await needed.remote(gate.path, "needed")
    assert await came_back.remote(gate.path) == "cancelled"


async def test_arguments_that_fail_in_other_ways(
    node: aiogpu.types.Node, complaints: list[str]
) -> None:
    """Nobody need look at a failure that its dependent tells."""
    with pytest.raises(v.LoudError, match="once"):
        await v.add.remote(v.add.remote(v.fail.remote("once")))
    failing = v.fail.remote("stubborn", v.StubbornError)
    for handle in (v.give.remote(failing), v.add_softly.remote(1, failing), failing):
        with pytest.raises(aiogpu.TaskError, match="stubborn"):
            await handle
    actor = v.Serial.remote(v.fail.remote("no model"))
    with pytest.raises(aiogpu.ActorDiedError, match="no model") as caught:
        await actor
    assert isinstance(caught.value.__cause__, v.LoudError)


@pytest.mark.needs("processes")
async def test_an_argument_whose_worker_has_died(node: aiogpu.types.Node) -> None:
    dead = v.die.remote()
    for handle in (v.give.remote(dead), dead):
        with pytest.raises(aiogpu.WorkerDiedError):
            await handle


async def test_arguments_and_calls_whose_time_is_up(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    late = v.gated.options(timeout=0.05).remote(gate.path, "late")
    for handle in (v.give.remote(late), late):
        with pytest.raises(aiogpu.TaskTimeoutError):
            await handle
    slow = v.gated.remote(gate.path, "slow", 5)
    with pytest.raises(aiogpu.TaskTimeoutError):
        await v.give.options(timeout=0.05).remote(slow)
    await gate.entered("slow")
    gate.release("slow")
    assert await slow == 5


async def test_maps_over_handles_and_large_items(node: aiogpu.types.Node) -> None:
    """[B18]"""
    async with v.Serial.remote() as actor:
        for chunk in (None, 3, "auto"):
            handles = [v.add.remote(number) for number in range(10)]
            sums = v.add.map(handles, chunk=chunk)
            assert [each async for each in sums] == list(range(2, 12))
            arrays = [each async for each in v.full.map(range(4), chunk=chunk)]
            assert [int(array[0]) for array in arrays] == list(range(4))
            items = [*arrays, *(v.full.remote(number) for number in range(4, 6))]
            for method in (v.give_sum, actor.sum_of):
                sums = method.map(items, chunk=chunk)
                found = [each async for each in sums]
                assert found == [200_000 * number for number in range(6)]
            with pytest.raises(aiogpu.errors.MisuseError, match="has num_returns=2"):
                v.split.options(num_returns=2).map([(1, 2)], chunk=chunk)


async def test_wait_and_as_completed_of_handles(node: aiogpu.types.Node) -> None:
    handles = [v.add.remote(number) for number in range(3)]
    assert await v.wait_for_two.remote(handles) == [1, 2, 3]
    value: Any = await aiogpu.put(5)
    assert await aiogpu.wait([value]) == ([value], [])
    assert [each async for each in aiogpu.as_completed([value])] == [value]


@pytest.mark.needs("processes")
async def test_a_task_that_waits_for_arguments_says_so(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.options(name="load").remote(gate.path, "slow", 1)
    then = v.add.options(name="train").remote(slow)
    await gate.entered("slow")
    assert "waits for its arguments: the result of load" in str(await then.why())
    (waiting,) = (await aiogpu.status()).waiting
    assert (waiting.name, waiting.state) == ("train", "expecting")
    gate.release("slow")
    assert await then == 2


@pytest.mark.parametrize("state", ["failed", "pending"])
async def test_the_dependent_fails_alike_and_never_runs(
    state: str, node: aiogpu.types.Node, gate: Gate, complaints: list[str]
) -> None:
    """Of the same type, with the traceback of the task that has failed."""
    first = v.gated_fail.remote(gate.path, "first")
    await gate.entered("first")
    if state == "failed":
        gate.release("first")
        await asyncio.wait([first])
    then = v.tell.remote(gate.path, "then", first)
    named = v.add.remote(1, b=first)
    async with v.Serial.remote() as actor:
        called = actor.keep.remote(first)
        if state == "pending":
            gate.release("first")
        for handle in (then, named, called, v.add.remote(v.add.remote(then))):
            with pytest.raises(v.LoudError, match="first") as caught:
                await handle
            assert "gated_fail" in str(caught.value.__cause__)
        assert await actor.all.remote() == [None]
    assert "then" not in gate.inside


async def test_cancelling_a_dependent_leaves_its_argument_alone(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.remote(gate.path, "slow", 5)
    then, other = v.tell.remote(gate.path, "then", slow), v.give.remote(slow)
    await gate.entered("slow")
    assert then.cancel()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(v.give.remote(slow), 0.01)
    gate.release("slow")
    assert [await slow, await other] == [5, 5]
    assert "then" not in gate.inside


async def test_cancelling_an_argument_fails_its_dependents(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.remote(gate.path, "slow", 5)
    await gate.entered("slow")
    async with v.Serial.remote() as actor:
        waiting = [v.give.remote(slow), v.add.remote(v.add.remote(slow))]
        waiting.append(actor.keep.remote(slow))
        slow.cancel()
        waiting.append(v.give.remote(slow))
        for handle in waiting:
            with pytest.raises(aiogpu.TaskCancelledError, match="gated"):
                await handle
        assert await actor.all.remote() == [None]
    with pytest.raises(asyncio.CancelledError):
        await slow
    await gate.entered("slow-cancelled")


async def test_a_dependent_is_kept_by_nobody_and_runs(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    """[B14] Who drops a handle has not cancelled it."""
    slow = v.gated.remote(gate.path, "slow", 5)
    v.tell.remote(gate.path, "then", slow)
    await gate.entered("slow")
    del slow
    gc.collect()
    gate.release("slow")
    await gate.entered("then")


@pytest.mark.needs("at once")
async def test_a_waiter_that_gives_up_stops_only_what_nobody_else_wants(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    """[B15] A handle that has come back is one of several to the same work."""
    slow = v.gated.remote(gate.path, "slow", 5)
    await gate.entered("slow")
    other = (await v.give_boxed.remote({"handle": slow}))["handle"]
    for handle in (other, slow):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.coro(), 0.01)
    gate.release("slow")
    assert [await slow, await other] == [5, 5]
    slow = v.gated.remote(gate.path, "again", 5)
    await gate.entered("again")
    other = (await v.give_boxed.remote({"handle": slow}))["handle"]
    assert other.cancel()
    await gate.entered("again-cancelled")
    with pytest.raises(asyncio.CancelledError):
        await slow


async def test_a_handle_of_another_loop_is_refused(node: aiogpu.types.Node) -> None:
    handle = v.give.remote(1)

    async def elsewhere() -> None:
        async with aiogpu.init(address="inline", num_cpus=1):
            for call in (
                lambda: v.give.remote(handle),
                lambda: v.give.remote(value=handle),
                lambda: v.give.remote([handle]),
                lambda: aiogpu.put([handle]),
            ):
                with pytest.raises(aiogpu.AiogpuError, match="another event loop"):
                    call()

    await asyncio.to_thread(asyncio.run, elsewhere())
    assert await handle == 1


async def test_what_a_node_leaves_when_it_closes(address: str, gate: Gate) -> None:
    """Whoever waits is told."""
    async with aiogpu.init(address=address, num_cpus=2):
        slow = v.gated.remote(gate.path, "slow")
        waiting = [v.give.remote(slow), v.add.remote(v.give.remote(slow))]
        await gate.entered("slow")
    for handle in (slow, *waiting):
        assert handle.done()
        with pytest.raises((aiogpu.errors.NodeClosedError, asyncio.CancelledError)):
            await handle


async def test_each_node_has_values_of_its_own(address: str) -> None:
    """Workers of two nodes number what they put alike; handles of both are kept."""
    kept = []
    async with aiogpu.init(address=address, num_cpus=1):
        given = await v.put_and_give.remote("first")
        kept.append(given["handle"])
        assert await given["handle"] == "first"
    async with aiogpu.init(address=address, num_cpus=1):
        given = await v.put_and_give.remote("second")
        assert await given["handle"] == "second"
        assert await v.give.remote(given["handle"]) == "second"


# Thousands of calls in a row, each of which needs the result before it


LENGTH: Final = 3_000
ENDS: Final = {
    "fails": KeyError,
    "is cancelled": aiogpu.TaskCancelledError,
    "is late": aiogpu.TaskTimeoutError,
    "gives": int,
}
"""How the head of a chain may end, and of what type all links are then."""


@pytest.fixture(params=["local", "joined", "inline"])
async def long_node(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[str]:
    """Two CPUs; nothing is logged, since nothing goes wrong on the long_node."""
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(120):
            if request.param == "joined":
                async with node_here(tmp_path) as here, here.join():
                    yield request.param
            else:
                async with aiogpu.init(address=request.param, num_cpus=2):
                    yield request.param
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("has_actor", [False, True], ids=["tasks", "actor"])
@pytest.mark.parametrize("how", ENDS)
async def test_all_links_end_as_the_head_does(
    how: str, has_actor: bool, long_node: str
) -> None:
    """And the long_node goes on: a call that needs nothing of it is served."""
    adder = c.Adder.remote() if has_actor else None
    first = c.head(how)
    chain = c.links(first, LENGTH, adder)
    if how == "is cancelled":
        first.cancel()
    ended = await asyncio.gather(*chain, return_exceptions=True)
    assert {type(one) for one in ended} == {ENDS[how]}
    if how == "fails":
        assert str(ended[-1]) == str(ended[0]) == "'the head'"
    if how == "gives":
        assert ended == list(range(1, LENGTH + 1))
    assert await c.increase.remote(1) == 2
    if adder is not None:
        assert await adder.increase.remote(1) == 2


@pytest.mark.parametrize("has_actor", [False, True], ids=["tasks", "actor"])
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(
    "code", [c.end_softly, c.end_plainly], ids=["softly", "plainly"]
)
async def test_so_they_do_where_a_task_has_made_them(
    code: Any, how: str, has_actor: bool, long_node: str
) -> None:
    if long_node == "joined":
        pytest.skip("the task is the long_node's own, as where it is local")
    kinds = await code.remote(how, LENGTH, has_actor)
    assert kinds == [ENDS[how].__name__]
    assert await c.increase.remote(1) == 2
