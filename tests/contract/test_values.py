"""Results as arguments of calls: resolved, handed on, failed or cancelled."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, Final

import pytest

import aiogpu
from aiogpu.errors import MisuseError, NodeClosedError, SerializationError
from aiogpu.types import Node
from tests.contract import chain_tasks as c
from tests.contract import value_tasks as v
from tests.contract.node_here import node_here
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=4),
]


async def test_a_handle_given_twice_arrives_as_two_copies(node: Node) -> None:
    """Arguments share nothing, as if both had been given as lists."""
    handle = v.give.remote([1])
    assert not await v.are_same.remote(handle, handle)


async def test_put_gives_a_handle_in_plain_code(node: Node) -> None:
    """There is nothing to await, and the value of `get(put(x))` is `x`."""
    expected = ["value", [[1], [2]], (2, 0), [3], [1], True]
    assert await v.put_and_use_in_plain_code.remote() == expected
    assert await v.Putting.remote().put_and_use.remote() == expected


async def test_falsy_values_are_passed(node: Node) -> None:
    for value in (None, (), {}, "", 0, False, [None], ((), {})):
        assert await v.give.remote(v.give.remote(value)) == value


async def test_a_handle_in_a_container_stays_a_handle(node: Node) -> None:
    done, pending = v.give.remote(1), v.add.remote(1)
    await done
    kinds = await v.kinds.remote(done, [done], {"a": pending}, (pending,))
    assert kinds == ["int", "list", "dict", "tuple"]
    back = await v.give_boxed.remote({"handle": pending, "again": pending})
    assert isinstance(back["handle"], asyncio.Future)
    assert await back["handle"] == await back["again"] == 2


@pytest.mark.needs("interrupts")
async def test_a_handle_of_a_running_task_is_awaited(node: Node, gate: Gate) -> None:
    slow = v.gated.remote(gate.path, "slow", 3)
    await gate.entered("slow")
    tasks = (v.get_nested, v.get_nested, v.await_nested, v.hand_on)
    readers = [task.remote({"handle": slow}) for task in tasks]
    then = v.tell.remote(gate.path, "then", slow)
    gate.release("slow")
    assert await asyncio.gather(*readers, then) == [3, 3, 3, 13, "then"]


async def test_a_handle_passes_through_tasks_and_actors(node: Node) -> None:
    """The value is the same after five tasks and two actors."""
    box: Any = {"handle": v.give.remote([1, 2])}
    for _ in range(5):
        box = await v.give_boxed.remote(box)
    for kind in (v.Serial, v.Soft):
        async with kind.remote() as actor:
            assert await actor.keep.remote(box) == 2
            box = await actor.last.remote()
    assert await box["handle"] == [1, 2]


@pytest.mark.needs("interrupts")
async def test_calls_of_one_caller_keep_their_order(node: Node, gate: Gate) -> None:
    """They wait behind a call with a pending argument; calls of others go ahead."""
    async with v.Serial.remote("made") as actor:
        pending = v.gated.remote(gate.path, "slow", "first")
        mine = [actor.keep.remote(argument) for argument in (pending, *range(3))]
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


async def test_an_actor_outlives_a_call_that_waits(node: Node, gate: Gate) -> None:
    actor = v.Serial.remote()
    await actor
    slow = v.gated.remote(gate.path, "slow", 1)
    last = actor.add.remote(slow)
    del actor
    await gate.entered("slow")
    gate.release("slow")
    assert await last == 2


async def test_a_closure_may_not_hold_a_handle(node: Node) -> None:
    """A function is sent to holder worker once: no event would release the handle."""
    handle = v.give.remote(1)

    @aiogpu.remote
    def closure() -> Any:
        return handle

    with pytest.raises(SerializationError, match="give"):
        closure.remote()
    assert await handle == 1


@pytest.fixture
async def complaints() -> AsyncIterator[list[str]]:
    """Fail if asyncio complains of an exception that was never retrieved."""
    messages: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: messages.append(context["message"]))
    yield messages
    gc.collect()
    await asyncio.sleep(0)
    assert messages == []


BOTH = pytest.mark.parametrize("way", ["plain", "coroutine"])


@BOTH
async def test_a_handle_arrives_as_its_value(way: str, node: Node) -> None:
    """The handle may be pending or done, given by position or name, once or twice."""
    task: Any = v.add if way == "plain" else v.add_softly
    first = handle = task.remote(0)
    assert await task.remote(first) == 2
    assert await task.remote(a=first, b=first) == 2
    assert await task.remote(first, b=task.remote(first)) == 3
    assert await first == 1
    assert await task.remote(first, b=5) == 6
    for _ in range(50):
        handle = task.remote(handle)
    handles = [task.remote(i) for i in range(20)]
    named = {f"k{i}": task.remote(i) for i in range(20)}
    assert await v.total.remote(handle, *handles, 7, **named, also=3) == 51 + 430
    assert await first == 1


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        *((v.get_nested, 2), (v.await_nested, 2)),
        *((v.hand_on, 12), (v.hand_on_softly, 12)),
        *((v.hand_on_boxed, 2), (v.hand_on_boxed_softly, 2)),
    ],
)
async def test_tasks_use_nested_handles(task: Any, expected: int, node: Node) -> None:
    """The task gets the handle's value, or its error."""
    handle = v.add.remote(1)
    for _ in range(2):
        assert await task.remote({"handle": handle}) == expected
        assert await handle == 2
    failing = v.fail.remote("in a box")
    with pytest.raises(v.LoudError, match="in a box"):
        await task.remote({"handle": failing})
    with pytest.raises(v.LoudError):
        await failing


@pytest.mark.parametrize("task", [v.chain, v.chain_softly, v.chain_of_ended])
async def test_a_task_chains_its_children(task: Any, node: Node) -> None:
    for depth in (1, 2, 30):
        assert await task.remote(depth) == depth


@pytest.mark.parametrize(
    "kind",
    [v.Serial, pytest.param(v.Threaded, marks=pytest.mark.needs("threads")), v.Soft],
)
async def test_actors_take_and_keep_handles(kind: Any, node: Node) -> None:
    """Constructors, which have no loop, and methods do; actors pass handles on."""
    boxed = {"handle": v.give.remote("kept")}
    async with kind.remote(boxed) as actor, kind.remote(first=v.add.remote(1)) as other:
        assert await other.last.remote() == 2
        await other.keep.remote(boxed)
        del boxed
        for holder in (actor, other, other):
            assert await holder.read_last.remote() == "kept"
        pending = actor.add.remote(1)
        assert await other.add.remote(pending, b=pending) == 4
        assert await v.add.remote(actor.add.remote(other.add.remote(1))) == 4
        # Here the task calls the actor whose method waits for the task's result.
        for train in (v.train_softly, *[v.train] * (kind is not v.Soft)):
            assert await actor.add.remote(train.remote(actor, 1)) == 3


async def test_handles_in_a_coroutine_are_asyncio_futures(node: Node) -> None:
    for task in (v.gather_nested, v.wait_for_nested):
        pending = v.add.remote(2)
        assert await task.remote([v.add.remote(1), pending, pending]) == [2, 3, 3]


async def test_calls_behind_a_failed_call_run(node: Node) -> None:
    """A call fails if its argument fails, or if it is cancelled."""
    async with v.Serial.remote() as actor:
        failed = actor.keep.remote(v.fail.remote("lost"))
        cancelled = actor.keep.remote(v.give.remote("cancelled"))
        last = actor.keep.remote("last")
        cancelled.cancel()
        with pytest.raises(v.LoudError):
            await failed
        assert await last == 2
        assert await actor.all.remote() == [None, "last"]


@BOTH
async def test_a_childs_failure_fails_its_dependents(way: str, node: Node) -> None:
    """The node passes the error on, or the task that has read it."""
    task = v.pass_failing if way == "plain" else v.pass_failing_softly
    for how in ("pending", "ended"):
        assert await task.remote(how) == "of a child"


@BOTH
@pytest.mark.needs("interrupts", "at once")
async def test_a_task_cancels_an_argument(way: str, node: Node, gate: Gate) -> None:
    soft = "" if way == "plain" else "_softly"
    argument: Any = getattr(v, f"cancel_an_argument{soft}")
    copy: Any = getattr(v, f"cancel_a_copy{soft}")
    assert "cancelled" in await argument.remote(gate.path, "needed")
    assert await copy.remote(gate.path) == "cancelled"


async def test_failed_arguments_fail_calls(node: Node, complaints: list[str]) -> None:
    """A failure counts as retrieved if a dependent has told it."""
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
async def test_a_dead_workers_result_fails_its_dependents(node: Node) -> None:
    dead = v.die.remote()
    for handle in (v.give.remote(dead), dead):
        with pytest.raises(aiogpu.WorkerDiedError):
            await handle


async def test_timeouts_count_for_arguments_and_calls(node: Node, gate: Gate) -> None:
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


async def test_map_takes_handles_and_large_items(node: Node) -> None:
    async with v.Serial.remote() as actor:
        for chunk in (None, 3, "auto"):
            handles = [v.add.remote(number) for number in range(10)]
            sums = v.add.map(handles, chunk=chunk)
            assert [total async for total in sums] == list(range(2, 12))
            arrays = [array async for array in v.full.map(range(4), chunk=chunk)]
            assert [int(array[0]) for array in arrays] == list(range(4))
            items = [*arrays, *(v.full.remote(number) for number in range(4, 6))]
            for method in (v.give_sum, actor.sum_of):
                sums = method.map(items, chunk=chunk)
                totals = [total async for total in sums]
                assert totals == [200_000 * number for number in range(6)]
            with pytest.raises(MisuseError, match="has num_returns=2"):
                v.split.options(num_returns=2).map([(1, 2)], chunk=chunk)


async def test_wait_and_as_completed_take_handles(node: Node) -> None:
    handles = [v.add.remote(number) for number in range(3)]
    assert await v.wait_for_two.remote(handles) == [1, 2, 3]
    value: Any = aiogpu.put(5)
    assert await aiogpu.wait([value]) == ([value], [])
    assert [handle async for handle in aiogpu.as_completed([value])] == [value]


@pytest.mark.needs("processes")
async def test_why_names_the_arguments_a_task_waits_for(node: Node, gate: Gate) -> None:
    slow = v.gated.options(name="load").remote(gate.path, "slow", 1)
    then = v.add.options(name="train").remote(slow)
    await gate.entered("slow")
    assert "waits for its arguments: the result of load" in str(await then.why())
    (waiting,) = (await aiogpu.status()).waiting
    assert (waiting.name, waiting.state) == ("train", "expecting")
    gate.release("slow")
    assert await then == 2


@pytest.mark.parametrize("state", ["failed", "pending"])
async def test_a_dependent_fails_alike_and_never_runs(
    state: str, node: Node, gate: Gate, complaints: list[str]
) -> None:
    """The error has the same type, and the traceback of the task that failed."""
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


async def test_cancel_leaves_the_argument_alone(node: Node, gate: Gate) -> None:
    slow = v.gated.remote(gate.path, "slow", 5)
    then, other = v.tell.remote(gate.path, "then", slow), v.give.remote(slow)
    await gate.entered("slow")
    assert then.cancel()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(v.give.remote(slow), 0.01)
    gate.release("slow")
    assert [await slow, await other] == [5, 5]
    assert "then" not in gate.inside


async def test_cancelled_arguments_fail_dependents(node: Node, gate: Gate) -> None:
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


async def test_a_dropped_dependent_still_runs(node: Node, gate: Gate) -> None:
    """Dropping a handle does not cancel it."""
    slow = v.gated.remote(gate.path, "slow", 5)
    v.tell.remote(gate.path, "then", slow)
    await gate.entered("slow")
    del slow
    gc.collect()
    gate.release("slow")
    await gate.entered("then")


@pytest.mark.needs("at once")
async def test_giving_up_cancels_only_unshared_work(node: Node, gate: Gate) -> None:
    """A handle that a task returns is a second handle to the same work."""

    async def copies(name: str) -> tuple[Any, Any]:
        slow = v.gated.remote(gate.path, name, 5)
        await gate.entered(name)
        return slow, (await v.give_boxed.remote({"handle": slow}))["handle"]

    slow, other = await copies("slow")
    for handle in (other, slow):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.coro(), 0.01)
    gate.release("slow")
    assert [await slow, await other] == [5, 5]
    slow, other = await copies("again")
    assert other.cancel()
    await gate.entered("again-cancelled")
    with pytest.raises(asyncio.CancelledError):
        await slow


async def test_a_handle_of_another_loop_is_refused(node: Node) -> None:
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


async def test_a_closing_node_fails_waiting_calls(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        slow = v.gated.remote(gate.path, "slow")
        waiting = [v.give.remote(slow), v.add.remote(v.give.remote(slow))]
        await gate.entered("slow")
    for handle in (slow, *waiting):
        assert handle.done()
        with pytest.raises((NodeClosedError, asyncio.CancelledError)):
            await handle


async def test_each_node_has_values_of_its_own(address: str) -> None:
    """Workers of two nodes give their values the same ids; handles of both are kept."""
    kept = []
    for value in ("first", "second"):
        async with aiogpu.init(address=address, num_cpus=1):
            kept.append((await v.put_and_give.remote(value))["handle"])
            assert await kept[-1] == value
            assert await v.give.remote(kept[-1]) == value


# Thousands of calls in a row, holder of which needs the result of the previous call


LENGTH: Final = 3_000
ENDS: Final = {
    "fails": KeyError,
    "is cancelled": aiogpu.TaskCancelledError,
    "is late": aiogpu.TaskTimeoutError,
    "gives": int,
}
"""How the head of a chain may end, and the type of holder link's result or error."""


@pytest.fixture(params=["local", "joined", "inline"])
async def long_node(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[str]:
    """Open a node with two CPUs; check that it logs nothing. Returns its kind."""
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
async def test_links_end_like_their_head(
    how: str, has_actor: bool, long_node: str
) -> None:
    """The node goes on and serves other calls."""
    adder = c.Adder.remote() if has_actor else None
    first = c.head(how)
    chain = c.links(first, LENGTH, adder)
    if how == "is cancelled":
        first.cancel()
    ended = await asyncio.gather(*chain, return_exceptions=True)
    assert {type(end) for end in ended} == {ENDS[how]}
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
async def test_links_in_a_task_end_like_their_head(
    code: Any, how: str, has_actor: bool, long_node: str
) -> None:
    if long_node == "joined":
        pytest.skip("the node runs the task as a local node does")
    kinds = await code.remote(how, LENGTH, has_actor)
    assert kinds == [ENDS[how].__name__]
    assert await c.increase.remote(1) == 2


@pytest.mark.parametrize("authkey", [None, b"own"])
async def test_proxies_of_a_manager_travel(node: Node, authkey: bytes | None) -> None:
    manager = SyncManager(authkey=authkey)
    manager.start()
    try:
        shared, items = manager.dict(), manager.Queue()
        returned = await v.fill.remote(shared, [items])
        assert dict(shared) == dict(returned) == {"filled": 1}
        assert items.get() == 2
    finally:
        manager.shutdown()


async def test_a_proxy_out_of_a_proxy_knows_the_managers_key(node: Node) -> None:
    with SyncManager() as manager:
        outer = manager.dict(inner=manager.dict())
        inner = await v.fill_inner.remote(outer)
        assert dict(inner) == {"filled": 1}
        assert dict(outer["inner"]) == {"filled": 1}
