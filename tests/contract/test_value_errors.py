"""[B16] What becomes of a call whose argument fails, is cancelled or comes too late."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from tests.contract import keepers, odd_pickles
from tests.contract import value_tasks as v
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
async def node(address: str) -> AsyncIterator[aiogpu.types.Node]:
    """Four CPUs."""
    async with (
        asyncio.timeout(60),
        aiogpu.init(address=address, num_cpus=4) as session,
    ):
        yield session


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
    async with keepers.Serial.remote() as actor:
        called = actor.keep.remote(first)
        if state == "pending":
            gate.release("first")
        for handle in (then, named, called, v.add.remote(v.add.remote(then))):
            with pytest.raises(odd_pickles.LoudError, match="first") as caught:
                await handle
            assert "gated_fail" in str(caught.value.__cause__)
        assert await actor.all.remote() == [None]
    assert "then" not in gate.inside


async def test_nobody_need_look_at_what_its_dependent_tells(
    node: aiogpu.types.Node, complaints: list[str]
) -> None:
    with pytest.raises(odd_pickles.LoudError, match="once"):
        await v.add.remote(v.add.remote(v.fail.remote("once")))


async def test_an_error_that_cannot_be_pickled(node: aiogpu.types.Node) -> None:
    failing = v.fail.remote("stubborn", odd_pickles.StubbornError)
    for handle in (v.give.remote(failing), v.add_softly.remote(1, failing), failing):
        with pytest.raises(aiogpu.TaskError, match="stubborn"):
            await handle


async def test_an_error_comes_to_a_task_that_holds_the_handle(
    node: aiogpu.types.Node,
) -> None:
    for task in (v.get_nested, v.await_nested, v.hand_on, v.hand_on_softly):
        failing = v.fail.remote("in a box")
        with pytest.raises(odd_pickles.LoudError, match="in a box"):
            await task.remote({"handle": failing})
        with pytest.raises(odd_pickles.LoudError):
            await failing


@pytest.mark.parametrize("how", ["pending", "ended"])
@pytest.mark.parametrize("task", [v.pass_failing, v.pass_failing_softly])
async def test_failures_among_children(
    task: Any, how: str, node: aiogpu.types.Node
) -> None:
    assert await task.remote(how) == "of a child"


async def test_the_constructor_of_an_actor_never_runs(node: aiogpu.types.Node) -> None:
    actor = keepers.Serial.remote(v.fail.remote("no model"))
    with pytest.raises(aiogpu.ActorDiedError, match="no model") as caught:
        await actor
    assert isinstance(caught.value.__cause__, odd_pickles.LoudError)


@pytest.mark.needs("processes")
async def test_an_argument_whose_worker_has_died(node: aiogpu.types.Node) -> None:
    dead = v.die.remote()
    with pytest.raises(aiogpu.WorkerDiedError):
        await v.give.remote(dead)
    with pytest.raises(aiogpu.WorkerDiedError):
        await dead


async def test_an_argument_that_came_too_late(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.options(timeout=0.05).remote(gate.path, "slow")
    with pytest.raises(aiogpu.TaskTimeoutError):
        await v.give.remote(slow)
    with pytest.raises(aiogpu.TaskTimeoutError):
        await slow


async def test_its_own_time_counts_while_it_waits(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.remote(gate.path, "slow", 5)
    with pytest.raises(aiogpu.TaskTimeoutError):
        await v.give.options(timeout=0.05).remote(slow)
    await gate.entered("slow")
    gate.release("slow")
    assert await slow == 5


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
    async with keepers.Serial.remote() as actor:
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


@pytest.mark.needs("interrupts")
@pytest.mark.parametrize(
    "task", [v.cancel_what_is_needed, v.cancel_what_is_needed_softly]
)
async def test_a_task_cancels_what_its_other_child_needs(
    task: Any, node: aiogpu.types.Node, gate: Gate
) -> None:
    assert "cancelled" in await task.remote(gate.path, "needed")


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


@pytest.mark.needs("at once")
async def test_cancelling_a_handle_that_has_come_back_stops_the_work(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.remote(gate.path, "slow", 5)
    await gate.entered("slow")
    other = (await v.give_boxed.remote({"handle": slow}))["handle"]
    assert other.cancel()
    await gate.entered("slow-cancelled")
    with pytest.raises(asyncio.CancelledError):
        await slow


@pytest.mark.needs("at once")
@pytest.mark.parametrize(
    "task", [v.cancel_what_came_back, v.cancel_what_came_back_plainly]
)
async def test_a_child_is_cancelled_by_a_handle_that_has_come_back(
    task: Any, node: aiogpu.types.Node, gate: Gate
) -> None:
    assert await task.remote(gate.path) == "cancelled"


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
