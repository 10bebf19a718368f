"""Cancelling a call in any state; the actor lives on."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract.actor_classes import Async, Closing, Counter, Threads
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]
with_threads = pytest.param(Threads, marks=pytest.mark.needs("threads"))


async def are_cancelled(*handles: Any) -> bool:
    """All of these handles report the cancel, at once."""
    await raises(asyncio.CancelledError, *handles)
    return all(handle.cancelled() for handle in handles)


async def test_a_cancelled_coroutine_that_has_not_begun_never_runs(gate: Gate) -> None:
    """A call cancelled in the turn of its `remote()` is dropped; the limit holds.

    The first two calls may have begun.
    """
    actor = await Async.options(max_concurrency=2).remote()
    for text in ["sent"] + 20 * ["never"]:
        calls = [actor.note.remote(text) for _ in range(4)]
        for call in calls:
            call.cancel()
    assert await actor.notes.remote() in ([], ["sent"], ["sent", "sent"])
    running = [actor.wait.remote(gate.path, name) for name in "ab"]
    await gate.entered("a", "b")
    for call in running:
        call.cancel()
    await gate.entered("a-cancelled", "b-cancelled")
    assert await actor.later.remote() == 1


async def test_cancel_raises_where_a_coroutine_waits(gate: Gate) -> None:
    actor = await Async.remote()
    others = [actor.wait.remote(gate.path, name) for name in "xyz"]
    running = actor.wait.remote(gate.path, "a")
    await gate.entered(*"axyz")
    running.cancel()
    await gate.entered("a-cancelled")
    assert await actor.later.remote() == 1
    gate.release(*"xyz")
    assert await asyncio.gather(*others) == [*"xyz"]
    assert set(await actor.notes.remote()) == set("xyz")


@pytest.mark.needs("threads", "plain cancels")
async def test_a_cancelled_thread_runs_on(gate: Gate) -> None:
    """No thread can be stopped safely: its result is lost, and its slot stays taken."""
    actor = await Threads.remote()
    running = [actor.gated.remote(gate.path, name) for name in "ab"]
    await gate.entered("a", "b")
    behind = [actor.gated.remote(gate.path, name) for name in "cd"]
    behind[0].cancel()
    running[0].cancel()
    assert await are_cancelled(running[0], behind[0])
    gate.release("a")
    await until(lambda: gate.inside & {"c", "d"})
    begun = gate.inside & {"c"}  # before its cancel came, if the node was slow
    gate.release(*begun)
    await gate.entered("d")
    gate.release("b", "d")
    assert [await running[1], await behind[1]] == [*"bd"]
    assert set(await actor.notes.remote()) == {*"abd"} | begun


async def test_timeouts_cancel_calls(gate: Gate) -> None:
    actor = await Closing.remote(gate.path, "it")
    # A call that is cancelled before it is at the gate says nothing there.
    alone = actor.wait.remote("a")
    await gate.entered("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(alone, 0.05)
    del alone
    await gate.entered("a-cancelled")
    both = [actor.wait.remote("b"), actor.wait.remote("c")]
    await gate.entered("b", "c")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.gather(*both)
    await gate.entered("b-cancelled", "c-cancelled")
    shielded = actor.wait.remote("d")
    await gate.entered("d")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(shielded), 0.05)
    assert not shielded.done()
    shielded.cancel()
    await gate.entered("d-cancelled")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Counter, marks=pytest.mark.needs("blocking", "plain cancels")),
        Async,
        with_threads,
    ],
)
async def test_many_cancels_leave_the_other_calls_alone(kind: Any, gate: Gate) -> None:
    actor = await kind.remote()
    if kind is Counter:
        busy = actor.gated.remote(gate.path, "busy")
        await gate.entered("busy")
    flood = [actor.add.remote() for _ in range(1000)]
    kept = flood[::50]
    for number, call in enumerate(flood):
        if number % 50:
            call.cancel()
            if not number % 10:
                await asyncio.sleep(0)
    # A node of another process receives the cancels a turn of the loop later.
    await aiogpu.status()
    if kind is Counter:
        gate.release("busy")
        await busy
        # No cancelled call has run.
        assert await are_cancelled(*set(flood) - set(kept))
        assert await asyncio.gather(*kept) == [*range(1, 21)]
    assert len(await asyncio.gather(*kept)) == 20
    assert await actor.pid.remote()


@pytest.mark.parametrize("kind", [Counter, Async, with_threads])
async def test_a_cancel_at_completion_gives_a_result_or_a_cancel(kind: Any) -> None:
    actor = await kind.remote()
    outcomes = set()
    for delay in range(120):
        handles = [actor.add.remote() for _ in range(2)]
        for _ in range(delay % 12):
            await asyncio.sleep(0)
        handles[0].cancel()
        outcomes |= {*map(type, await asyncio.gather(*handles, return_exceptions=True))}
    assert int in outcomes
    assert outcomes <= {int, asyncio.CancelledError}
    assert await actor.add.remote()
    inside = actor._link._actor
    if hasattr(inside, "calls"):  # else the actor lives in another process
        assert not inside.calls
        assert inside._unwanted == 0
        assert not any(len(mailbox) for mailbox in inside.mailboxes.values())


@pytest.mark.needs("blocking", "plain cancels")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_a_cancelled_call_of_an_actor_that_waits_never_runs() -> None:
    holder = await Counter.options(num_gpus=1).remote()
    waits = Counter.options(num_gpus=1).remote()
    calls = [waits.note.remote(n) for n in range(4)]
    cancelled = calls.pop(1)
    assert cancelled.cancel()
    assert not cancelled.cancel()
    aiogpu.kill(holder)
    await asyncio.gather(*calls)
    assert await waits.notes.remote() == [0, 2, 3]


@pytest.mark.needs("blocking", "plain cancels")
async def test_a_plain_method_is_interrupted_and_its_actor_lives_on(gate: Gate) -> None:
    """Python code, and a call that blocks."""
    counter = await Counter.remote()
    for name, method in (("a", counter.spin), ("b", counter.gated)):
        running = method.remote(gate.path, name)
        behind = counter.add.remote()
        await gate.entered(name)
        running.cancel()
        assert await are_cancelled(running)
        await behind
    await gate.entered("a-interrupted")
    assert await counter.add.remote() == 3
    assert await counter.pid.remote() == gate.pids["a"]


@pytest.mark.needs("blocking", "plain cancels")
async def test_a_loop_serves_cancels_between_plain_methods(gate: Gate) -> None:
    actor = await Async.remote()
    first, second, dropped, last = (actor.gated.remote(gate.path, n) for n in "abcd")
    await gate.entered("a")
    dropped.cancel()
    assert (await aiogpu.wait([first], timeout=0.01))[0] == []
    gate.release("a")
    assert await first == "a"
    await gate.let_pass("b")
    await second
    await gate.let_pass("d")
    await last
    assert "c" not in gate.pids


@pytest.mark.needs("blocking", "plain cancels")
@pytest.mark.parametrize("way", ["swallow", "block_in_c"])
@pytest.mark.aiogpu(num_cpus=1, cancel_grace=0.1)
async def test_a_cancelled_method_that_runs_on_blocks_later_calls(
    way: str, gate: Gate
) -> None:
    """The caller learns of the cancel at once; the actor is not killed."""
    counter = await Counter.remote()
    running = getattr(counter, way).remote(gate.path, "a")
    await gate.entered("a")
    running.cancel()
    assert await are_cancelled(running)
    behind = counter.add.remote()
    if way == "swallow":
        await gate.entered("a-swallowed")
    # The method is interrupted once and then left alone.
    await asyncio.wait([behind], timeout=0.3)
    assert not behind.done()
    assert os.path.exists(f"/proc/{gate.pids['a']}")
    if way == "swallow":
        gate.release("a-swallowed")
        assert await behind == 1
        assert await counter.pid.remote() == gate.pids["a"]
    else:
        aiogpu.kill(counter)
        await raises(errors.ActorDiedError, behind)
