"""[B32] How actors end: with their last handle, by order, with process or node."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.actor_classes import (
    Async,
    Broken,
    Closing,
    Counter,
    Leaving,
    LeavingSoftly,
    Mortal,
    MortalThreads,
    Slow,
    Threads,
)
from tests.support.gate import Gate
from tests.support.until import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine"),
    pytest.mark.either_loop,
]


def has_gone(pid: int) -> bool:
    """An actor of an inline node has no process of its own that could be left."""
    return pid == os.getpid() or not os.path.exists(f"/proc/{pid}")


@pytest.mark.needs("blocking")
async def test_the_last_handle(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        counter = Mortal.options(num_gpus=1).remote(gate.path, "last")
        first = counter.gated.remote(gate.path, "a")
        rest = [counter.add.remote() for _ in range(5)]
        pid = counter.pid.remote()
        del counter
        await gate.entered("a")
        gate.release("a")
        assert await first == "a"
        assert await asyncio.gather(*rest) == [1, 2, 3, 4, 5]
        await gate.entered("last-gone")
        # All results are kept here, and keep nothing alive.
        assert await tasks.where.options(num_gpus=1).remote()
        await until(lambda: has_gone(pid.result()))
        assert await Counter.remote(1).add.remote() == 2


async def test_what_counts_as_a_handle(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = Mortal.options(name="kept").remote(gate.path, "kept")
        method = actor.add
        again = aiogpu.get_actor("kept")
        del actor
        assert await method.remote() == 1
        del method
        assert await again.add.remote() == 2
        assert "kept-gone" not in gate.pids
        del again
        await gate.entered("kept-gone")


async def test_a_block_ends_its_actor_after_what_it_was_sent(gate: Gate) -> None:
    """[B29]"""
    async with aiogpu.init(num_cpus=1):
        async with Mortal.remote(gate.path, "block") as actor:
            pid = await actor.pid.remote()
            handles = [actor.add.remote() for _ in range(300)]
        assert has_gone(pid)
        await until(lambda: "block-gone" in gate.pids)
        assert await asyncio.gather(*handles) == [*range(1, 301)]
        for call in (actor.add.remote, actor.pid.remote):
            with pytest.raises(aiogpu.ActorDiedError, match="block was left"):
                await call()


@pytest.mark.needs("blocking")
async def test_an_error_in_its_block_ends_an_actor_at_once(gate: Gate) -> None:
    """[B29]"""
    async with aiogpu.init(num_cpus=1):
        with suppress(ZeroDivisionError):
            async with Counter.remote() as actor:
                running = actor.gated.remote(gate.path, "a")
                await gate.entered("a")
                raise ZeroDivisionError
        assert has_gone(gate.pids["a"])
        with pytest.raises(aiogpu.ActorDiedError, match="Counter was killed"):
            await running


@pytest.mark.needs("blocking")
async def test_kill(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        running = await Counter.options(num_gpus=1).remote()
        waiting = Counter.options(num_gpus=1).remote()
        handles = [
            running.gated.remote(gate.path, "a"),
            running.add.remote(),
            waiting.add.remote(),
        ]
        await gate.entered("a")
        aiogpu.kill(waiting)
        aiogpu.kill(running)
        aiogpu.kill(running)
        handles.append(running.add.remote())
        for handle in (*handles, waiting, running):
            with pytest.raises(aiogpu.ActorDiedError, match="Counter was killed"):
                await handle
        starting = Counter.options(num_gpus=1).remote()
        aiogpu.kill(starting)
        in_constructor = Slow.options(num_gpus=1).remote(gate.path)
        await gate.entered("constructor")
        assert has_gone(gate.pids["a"]), "the GPU was not free before"
        aiogpu.kill(in_constructor)
        with pytest.raises(aiogpu.ActorDiedError):
            await starting
        assert await tasks.where.options(num_gpus=1).remote()
        assert has_gone(gate.pids["constructor"])
        for wrong in (Counter, running.add, None):
            with pytest.raises(aiogpu.errors.MisuseError, match="kill"):
                aiogpu.kill(wrong)  # type: ignore[arg-type]


async def test_a_killed_actor_stays_dead_whatever_comes_late() -> None:
    """Its `Created` may be under way when it is killed."""
    async with aiogpu.init(num_cpus=2):
        for delay in range(0, 60, 3):
            actor = Counter.remote()
            call = actor.add.remote()
            for _ in range(delay):
                await asyncio.sleep(0)
            aiogpu.kill(actor)
            ended = actor._link.ended()
            outcome = (await asyncio.gather(call, return_exceptions=True))[0]
            assert outcome == 1 or isinstance(outcome, aiogpu.ActorDiedError)
            with pytest.raises(aiogpu.ActorDiedError, match="killed"):
                await actor
            await ended


@pytest.mark.parametrize(
    "kind",
    [Mortal, pytest.param(MortalThreads, marks=pytest.mark.needs("threads")), Closing],
)
async def test_exit_actor(kind: Any, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = kind.options(max_restarts=5).remote(gate.path, "it")
        pid = await actor.pid.remote()
        leave = actor.leave_later if kind is Closing else actor.leave
        leaving = leave.remote()
        late = [actor.add.remote() for _ in range(2)]
        with pytest.raises(aiogpu.ActorDiedError, match="ended it by exit_actor"):
            await leaving
        for outcome in await asyncio.gather(*late, return_exceptions=True):
            # Threads and coroutines may have run it before.
            assert isinstance(outcome, int | aiogpu.ActorDiedError)
        await until(lambda: has_gone(pid))
        with pytest.raises(aiogpu.ActorDiedError, match=r"exit_actor\(\)"):
            await actor.add.remote()
        if kind is not MortalThreads:
            await gate.entered("it-gone")
    with pytest.raises(aiogpu.errors.MisuseError, match="outside"):
        aiogpu.exit_actor()


async def test_calls_that_end_after_exit_actor_do_not_disturb_the_end(
    gate: Gate,
) -> None:
    """They may end in the turns of the loop in which the actor begins to close."""
    async with aiogpu.init(num_cpus=1):
        actor = await Closing.remote(gate.path, "it")
        leaving = actor.leave_later.remote()
        late = [actor.turns.remote(count) for count in range(6)]
        await asyncio.gather(leaving, *late, return_exceptions=True)
        await gate.entered("it-closed", "it-gone")


async def test_calls_that_run_when_another_ends_the_actor(gate: Gate) -> None:
    """They are cancelled in its process, and their callers are told why."""
    async with aiogpu.init(num_cpus=1):
        actor = Closing.remote(gate.path, "it")
        running = actor.wait.remote("running")
        await gate.entered("running")
        leaving = actor.leave_later.remote()
        for call in (leaving, running):
            with pytest.raises(aiogpu.ActorDiedError, match=r"by exit_actor\(\)"):
                await call
        await gate.entered("running-cancelled")


async def test_what_an_actor_does_at_its_end(
    address: str, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with aiogpu.init(num_cpus=1):
        async with Closing.remote(gate.path, "good") as actor:
            await actor.start.remote()
            waiting = actor.wait.remote("call")
            await gate.entered("call")
            waiting.cancel()
        order = ["call-cancelled", "good-closing", "good-closed", "good-rest-ended"]
        await until(lambda: set(order) <= set(gate.pids))
        assert [name for name in gate.pids if name in order] == order
        await until(lambda: "good-gone" in gate.pids)
        async with Closing.remote(gate.path, "bad", "raise") as actor:
            await actor
        await until(lambda: "bad-gone" in gate.pids)
        with pytest.raises(aiogpu.ActorDiedError, match="block was left"):
            await actor.add.remote()
    if address == "ray":
        return  # the clusters of the tests show no output
    shown = capsys.readouterr()
    assert "ValueError: cannot close" in shown.err
    assert "going" in shown.out


@pytest.mark.needs("processes")
@pytest.mark.parametrize("how", ["handle", "exit"])
async def test_an_endless_end_is_bounded(
    how: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.actors.registry.LEAVE_LIMIT", 0.1)
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        actor = Closing.options(num_gpus=1, name="a", max_restarts=3).remote(
            gate.path, "it", "endless"
        )
        pid = await actor.pid.remote()
        if how == "exit":
            with pytest.raises(aiogpu.ActorDiedError):
                await actor.leave_later.remote()
        else:
            del actor
        await gate.entered("it-closing")
        assert await tasks.where.options(num_gpus=1).remote()
        assert has_gone(pid)
        assert "it-closed" not in gate.pids
        with pytest.raises(aiogpu.errors.ActorNameError):
            await aiogpu.get_actor("a")


@pytest.mark.needs("interrupts", "blocked ends")
async def test_a_call_that_nobody_waits_for_keeps_no_actor(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.actors.registry.LEAVE_LIMIT", 0.1)
    async with aiogpu.init(num_cpus=1):
        for kind in (Counter, Threads):
            actor = kind.remote()
            call = actor.block_in_c.remote(gate.path, kind.__name__)
            await gate.entered(kind.__name__)
            call.cancel()
            del actor
            await until(lambda name=kind.__name__: has_gone(gate.pids[name]))


@pytest.mark.needs("blocking", "orderly close")
@pytest.mark.parametrize("kind", [Mortal, MortalThreads, Closing])
async def test_actors_end_in_order_with_their_node(kind: Any, gate: Gate) -> None:
    """[B6]"""
    async with aiogpu.init(num_cpus=1):
        actor = await kind.remote(gate.path, "it")
        holder = await Counter.options(num_cpus=1).remote()
        told = [holder.gated.remote(gate.path, "holder"), Counter.remote()]
        if kind is not MortalThreads:  # nothing but itself can end a thread's call
            wait = actor.spin_at_gate if kind is Mortal else actor.wait
            told.append(wait.remote("call"))
            await gate.entered("call")
        for number in range(5):
            actor.note.remote(number)
    for handle in told:
        with pytest.raises(aiogpu.errors.NodeClosedError, match="shut down"):
            await handle
    await gate.entered("it-gone")
    if kind is Mortal:
        await until(lambda: "call-interrupted" in gate.pids)
    elif kind is Closing:
        await until(lambda: {"call-cancelled", "it-closed"} <= set(gate.pids))


@pytest.mark.needs("processes")
@pytest.mark.parametrize("kind", [Counter, Async])
async def test_methods_that_end_the_process(kind: Any) -> None:
    """[B33] [B38]"""
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        for method, argument, told in (
            ("exit", 7, "exited with code 7"),
            ("kill_self", int(signal.SIGKILL), "SIGKILL"),
            ("kill_self", int(signal.SIGSEGV), "SIGSEGV"),
        ):
            actor = kind.remote()
            pid = await actor.pid.remote()
            call = getattr(actor, method).remote(argument)
            late = actor.add.remote()
            with pytest.raises(aiogpu.ActorDiedError, match=told) as caught:
                await call
            assert not caught.value.is_restarting
            cause = caught.value.__cause__
            assert isinstance(cause, aiogpu.WorkerDiedError)
            assert cause.pid == pid
            if method == "exit":
                assert cause.last_output == ("last words",)
            for after in (late, actor.add.remote(), actor):
                with pytest.raises(aiogpu.ActorDiedError, match=told):
                    await after


async def test_a_fork_of_the_program_leaves_its_actors_alone() -> None:
    """[B5]"""
    async with aiogpu.init(num_cpus=1):
        counter = await Counter.remote()
        child = os.fork()
        if child == 0:
            code = 0
            for use in (
                lambda: counter.add.remote(),
                lambda: aiogpu.kill(counter),
                lambda: Counter.remote(),
                lambda: aiogpu.get_actor("x"),
            ):
                try:
                    use()
                    code = 1
                except aiogpu.errors.NodeError:
                    continue
            del counter
            os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0
        assert await counter.add.remote() == 1


async def test_a_waiting_actor_without_handles_is_never_made(tmp_path: Path) -> None:
    """Unless it was sent calls before the last handle went."""
    runs = tmp_path / "runs"
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        holder = await Counter.options(num_gpus=1).remote()
        Broken.options(num_gpus=1).remote(OSError, str(runs))
        call = Counter.options(num_gpus=1).remote().add.remote()
        await holder.add.remote()
        aiogpu.kill(holder)
        assert await call == 1
        assert await tasks.where.options(num_gpus=1).remote()
    assert not runs.exists()


@pytest.mark.needs("blocking")
async def test_a_block_that_is_left_refuses_calls_meanwhile(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await Counter.remote()
        running = actor.gated.remote(gate.path, "a")
        await gate.entered("a")
        leaving = asyncio.ensure_future(actor.__aexit__(None, None, None))
        await asyncio.sleep(0)
        with pytest.raises(aiogpu.ActorDiedError, match="takes no more calls"):
            await actor.add.remote()
        gate.release("a")
        await leaving
        assert await running == "a"


async def test_exit_actor_elsewhere() -> None:
    @aiogpu.remote
    class Never:
        def __init__(self) -> None:
            aiogpu.exit_actor()

    @aiogpu.remote
    def task() -> None:
        aiogpu.exit_actor()

    async with aiogpu.init(num_cpus=1):
        with pytest.raises(aiogpu.ActorDiedError, match="constructor"):
            await Never.remote()
        with pytest.raises(aiogpu.errors.MisuseError, match="outside"):
            await task.remote()


@pytest.mark.whole
@pytest.mark.parametrize(
    "kind",
    [
        aiogpu.remote(Leaving),
        pytest.param(
            aiogpu.remote(max_concurrency=2)(Leaving),
            marks=pytest.mark.needs("threads"),
        ),
        aiogpu.remote(LeavingSoftly),
    ],
    ids=["serial", "threads", "coroutines"],
)
async def test_an_exit_that_is_swallowed_ends_the_actor(
    kind: Any, address: str
) -> None:
    async with aiogpu.init(num_cpus=1):
        for method in ("returned", "replaced"):
            actor = await kind.options(max_restarts=2).remote()
            with pytest.raises(aiogpu.ActorDiedError, match="exit_actor"):
                await getattr(actor, method).remote()
            with pytest.raises(aiogpu.ActorDiedError):
                await actor.add.remote(1)
        if address not in ("inline", "ray"):
            actor = await kind.remote()
            items = actor.items.remote()
            assert await anext(items) == 1
            with pytest.raises(aiogpu.ActorDiedError):
                _ = [item async for item in items]
            with pytest.raises(aiogpu.ActorDiedError):
                await actor.add.remote(1)


@pytest.mark.needs("processes")
async def test_a_node_waits_for_no_actor_beyond_its_grace(gate: Gate) -> None:
    """[B6] [B15]"""
    async with aiogpu.init(num_cpus=1, cancel_grace=0.2):
        counters = await Counter.remote(), await Counter.remote()
        lost = [
            counters[0].swallow.remote(gate.path, "swallow"),
            counters[1].block_in_c.remote(gate.path, "block"),
        ]
        closing = await Closing.remote(gate.path, "it", "endless")
        gate.pids["closing"] = await closing.pid.remote()
        lost.append(Slow.remote(gate.path))
        await gate.entered("swallow", "block", "constructor")
    for handle in lost:
        with pytest.raises(aiogpu.errors.NodeClosedError):
            await handle
    assert all(has_gone(pid) for pid in gate.pids.values())


@pytest.mark.needs("processes")
@pytest.mark.parametrize("kind", [Counter, Threads, Async])
async def test_a_fork_of_an_actor_does_not_speak_for_it(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    @aiogpu.remote
    class Forks:
        def __init__(self) -> None:
            self.child = os.fork()

        def status(self) -> int:
            return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])

    async with aiogpu.init(num_cpus=1):
        actor = kind.remote()
        for way, code in (("return", 0), ("raise", 1), ("exit", 7)):
            assert await actor.fork.remote(way) == code
            assert await actor.add.remote()
        shown = capsys.readouterr()
        assert shown.out.count(") from the child\n") == 3
        assert "ValueError: in the child" in shown.err
        assert await Forks.remote().status.remote() == 0
