"""[B15] [B31] Cancelling a call, wherever it is; the actor lives on."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import aiogpu
from tests.contract.actor_classes import Async, Closing, Counter, Threads
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


async def cancelled(*handles: Any) -> bool:
    """Whether all of these tell that they were cancelled, at once."""
    for handle in handles:
        with pytest.raises(asyncio.CancelledError):
            await handle
    return all(handle.cancelled() for handle in handles)


async def test_a_coroutine_that_has_not_begun_never_does(gate: Gate) -> None:
    """It is dropped in the turn in which it was sent; the actor's limit is kept.

    The two that are sent in that very moment may have begun.
    """
    async with aiogpu.init(num_cpus=1):
        actor = await Async.options(max_concurrency=2).remote()
        for what in ["sent"] + 20 * ["never"]:
            calls = [actor.note.remote(what) for _ in range(4)]
            for call in calls:
                call.cancel()
        notes = await actor.notes.remote()
        assert notes in ([], ["sent"], ["sent", "sent"])
        running = [actor.wait.remote(gate.path, name) for name in "ab"]
        await gate.entered("a", "b")
        for call in running:
            call.cancel()
        await gate.entered("a-cancelled", "b-cancelled")
        assert await actor.later.remote() == 1


async def test_a_coroutine_gets_cancelled_error_where_it_waits(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Async.remote()
        others = [actor.wait.remote(gate.path, name) for name in "xyz"]
        running = actor.wait.remote(gate.path, "a")
        await gate.entered(*"axyz")
        running.cancel()
        await gate.entered("a-cancelled")
        assert await actor.later.remote() == 1
        for name in "xyz":
            gate.release(name)
        assert await asyncio.gather(*others) == [*"xyz"]
        assert set(await actor.notes.remote()) == set("xyz")


@pytest.mark.needs("threads", "plain cancels")
async def test_a_thread_goes_on(gate: Gate) -> None:
    """No thread can be stopped safely: what it does is lost, and its place is taken."""
    async with aiogpu.init(num_cpus=1):
        actor = await Threads.remote()
        running = [actor.gated.remote(gate.path, name) for name in "ab"]
        await gate.entered("a", "b")
        behind = [actor.gated.remote(gate.path, name) for name in "cd"]
        behind[0].cancel()
        running[0].cancel()
        assert await cancelled(running[0], behind[0])
        gate.release("a")
        await gate.entered("d")
        gate.release("b", "d")
        assert [await running[1], await behind[1]] == [*"bd"]
        assert sorted(await actor.notes.remote()) == [*"abd"]


async def test_timeouts_cancel_calls(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Closing.remote(gate.path, "it")
        # Who is cancelled before he is at the gate says nothing there.
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
        pytest.param(Threads, marks=pytest.mark.needs("threads")),
    ],
)
async def test_a_flood_of_cancels(kind: Any, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await kind.remote()
        busy = None
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
        # A node of another process hears of them a turn of the loop later.
        await aiogpu.status()
        if busy is not None:
            gate.release("busy")
            await busy
            # None of the others has run.
            assert await cancelled(*set(flood) - set(kept))
            assert await asyncio.gather(*kept) == [*range(1, 21)]
        assert len(await asyncio.gather(*kept)) == 20
        assert await actor.pid.remote()


@pytest.mark.parametrize(
    "kind", [Counter, Async, pytest.param(Threads, marks=pytest.mark.needs("threads"))]
)
async def test_cancelling_at_the_moment_of_completion(kind: Any) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await kind.remote()
        outcomes = set()
        for delay in range(120):
            handles = [actor.add.remote() for _ in range(2)]
            for _ in range(delay % 12):
                await asyncio.sleep(0)
            handles[0].cancel()
            for outcome in await asyncio.gather(*handles, return_exceptions=True):
                outcomes.add(type(outcome))
        assert outcomes <= {int, asyncio.CancelledError}
        assert int in outcomes
        assert await actor.add.remote()
        inside = actor._link._actor
        if not hasattr(inside, "calls"):
            return  # it lives in another process
        assert not inside.calls
        assert inside._unwanted == 0
        assert not any(len(mailbox) for mailbox in inside.mailboxes.values())


@pytest.mark.needs("blocking", "plain cancels")
async def test_a_call_of_an_actor_that_has_no_place_never_runs() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        holder = await Counter.options(num_gpus=1).remote()
        waits = Counter.options(num_gpus=1).remote()
        calls = [waits.note.remote(n) for n in range(4)]
        given_up = calls.pop(1)
        assert given_up.cancel()
        assert not given_up.cancel()
        aiogpu.kill(holder)
        await asyncio.gather(*calls)
        assert await waits.notes.remote() == [0, 2, 3]


@pytest.mark.needs("blocking", "plain cancels")
async def test_a_plain_method_is_interrupted_and_its_actor_lives_on(gate: Gate) -> None:
    """Python code, and a call that blocks."""
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote()
        for name, method in (("a", counter.spin), ("b", counter.gated)):
            running = method.remote(gate.path, name)
            behind = counter.add.remote()
            await gate.entered(name)
            running.cancel()
            assert await cancelled(running)
            await behind
        await gate.entered("a-interrupted")
        assert await counter.add.remote() == 3
        assert await counter.pid.remote() == gate.pids["a"]


@pytest.mark.needs("blocking", "plain cancels")
async def test_results_and_cancels_pass_between_plain_methods_on_a_loop(
    gate: Gate,
) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Async.remote()
        first, second, dropped, last = (
            actor.gated.remote(gate.path, name) for name in "abcd"
        )
        await gate.entered("a")
        dropped.cancel()
        assert (await aiogpu.wait([first], timeout=0.01))[0] == []
        gate.release("a")
        assert await first == "a"
        await gate.entered("b")
        gate.release("b")
        await second
        await gate.entered("d")
        gate.release("d")
        await last
        assert "c" not in gate.pids


@pytest.mark.needs("blocking", "plain cancels")
@pytest.mark.parametrize("how", ["swallow", "block_in_c"])
async def test_a_method_that_goes_on_holds_up_those_behind(
    how: str, gate: Gate
) -> None:
    """The caller is told at once; nobody is killed."""
    async with aiogpu.init(num_cpus=1, cancel_grace=0.1):
        counter = await Counter.remote()
        running = getattr(counter, how).remote(gate.path, "a")
        await gate.entered("a")
        running.cancel()
        assert await cancelled(running)
        behind = counter.add.remote()
        if how == "swallow":
            await gate.entered("a-swallowed")
        # Once heard, it is left alone.
        await asyncio.wait([behind], timeout=0.3)
        assert not behind.done()
        assert os.path.exists(f"/proc/{gate.pids['a']}")
        if how == "swallow":
            gate.release("a-swallowed")
            assert await behind == 1
            assert await counter.pid.remote() == gate.pids["a"]
        else:
            aiogpu.kill(counter)
            with pytest.raises(aiogpu.ActorDiedError):
                await behind
