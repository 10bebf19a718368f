"""How actors end: with their last handle, by order, with process or node."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import tasks
from tests.contract.actor_classes import (
    Async,
    Broken,
    Closing,
    Counter,
    Leaving,
    LeavingSoftly,
    Lingering,
    Mortal,
    MortalThreads,
    Slow,
    Threads,
)
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]
needs_threads = pytest.mark.needs("threads")


def has_gone(pid: int) -> bool:
    """The process has ended. An actor of an inline node has no process of its own."""
    return pid == os.getpid() or not os.path.exists(f"/proc/{pid}")


@pytest.fixture
def short_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaving actor has 0.1 s."""
    monkeypatch.setattr("aiogpu.runtime.actors.registry.LEAVE_LIMIT", 0.1)


@pytest.mark.needs("blocking", "holders")
@pytest.mark.aiogpu(num_cpus=2, num_gpus=1)
async def test_an_actor_that_is_ending_does_not_hold_without_end(gate: Gate) -> None:
    actor = Lingering.options(num_gpus=1).remote(gate.path)
    await actor.ping.remote()
    waits = tasks.add.options(num_gpus=1).remote(1)
    assert (await waits.why()).is_held_endlessly
    del actor
    await gate.entered("finalizer")
    why = await waits.why()
    assert not why.is_held_endlessly
    assert "which is ending" in str(why)
    gate.release("finalizer")
    assert await waits == 2


@pytest.mark.needs("blocking")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_an_actor_ends_with_its_last_handle(gate: Gate) -> None:
    counter = Mortal.options(num_gpus=1).remote(gate.path, "last")
    first = counter.gated.remote(gate.path, "a")
    rest = [counter.add.remote() for _ in range(5)]
    pid = counter.pid.remote()
    del counter
    await gate.let_pass("a")
    assert await first == "a"
    assert await asyncio.gather(*rest) == [1, 2, 3, 4, 5]
    await gate.entered("last-gone")
    # All results are kept here, and keep nothing alive.
    assert await tasks.where.options(num_gpus=1).remote()
    await until(lambda: has_gone(pid.result()))
    assert await Counter.remote(1).add.remote() == 2


async def test_a_method_and_a_handle_by_name_keep_an_actor(gate: Gate) -> None:
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


async def test_a_block_ends_its_actor_after_its_calls(gate: Gate, address: str) -> None:
    async with Mortal.remote(gate.path, "block") as actor:
        pid = await actor.pid.remote()
        handles = [actor.add.remote() for _ in range(300)]
    if address == "ray":  # which reports the end a moment before
        await until(lambda: has_gone(pid))
    assert has_gone(pid)
    await until(lambda: "block-gone" in gate.pids)
    assert await asyncio.gather(*handles) == [*range(1, 301)]
    calls = actor.add.remote, actor.pid.remote
    await raises(errors.ActorDiedError, *calls, match="block was left")


@pytest.mark.needs("blocking")
async def test_an_error_in_its_block_ends_an_actor_at_once(
    gate: Gate, address: str
) -> None:
    with suppress(ZeroDivisionError):
        async with Counter.remote() as actor:
            running = actor.gated.remote(gate.path, "a")
            await gate.entered("a")
            raise ZeroDivisionError
    if address == "ray":
        await until(lambda: has_gone(gate.pids["a"]))
    assert has_gone(gate.pids["a"])
    await raises(errors.ActorDiedError, running, match="Counter was killed")


@pytest.mark.needs("blocking")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_kill_ends_an_actor_in_any_state(gate: Gate) -> None:
    on_gpu = Counter.options(num_gpus=1)
    running, waiting = await on_gpu.remote(), on_gpu.remote()
    handles = [
        running.gated.remote(gate.path, "a"),
        running.add.remote(),
        waiting.add.remote(),
    ]
    await gate.entered("a")
    aiogpu.kill(waiting)
    aiogpu.kill(running)
    aiogpu.kill(running)
    handles += [running.add.remote(), waiting, running]
    await raises(errors.ActorDiedError, *handles, match="Counter was killed")
    starting = on_gpu.remote()
    aiogpu.kill(starting)
    in_constructor = Slow.options(num_gpus=1).remote(gate.path)
    await gate.entered("constructor")
    assert has_gone(gate.pids["a"]), "the GPU was not free before"
    aiogpu.kill(in_constructor)
    await raises(errors.ActorDiedError, starting)
    assert await tasks.where.options(num_gpus=1).remote()
    assert has_gone(gate.pids["constructor"])
    for wrong in (Counter, running.add, None):
        with pytest.raises(errors.MisuseError, match="kill"):
            aiogpu.kill(wrong)  # type: ignore[arg-type]


@pytest.mark.aiogpu(num_cpus=2)
async def test_a_killed_actor_stays_dead_whatever_arrives_late() -> None:
    """Its `Created` may be on its way when the actor is killed."""
    for delay in range(0, 60, 3):
        actor = Counter.remote()
        call = actor.add.remote()
        for _ in range(delay):
            await asyncio.sleep(0)
        aiogpu.kill(actor)
        ended = actor._link.ended()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        assert outcome == 1 or isinstance(outcome, errors.ActorDiedError)
        await raises(errors.ActorDiedError, actor, match="killed")
        await ended


@pytest.mark.parametrize(
    "kind", [Mortal, pytest.param(MortalThreads, marks=needs_threads), Closing]
)
async def test_exit_actor_ends_the_actor_that_calls_it(kind: Any, gate: Gate) -> None:
    actor = kind.options(max_restarts=5).remote(gate.path, "it")
    pid = await actor.pid.remote()
    leave = actor.leave_later if kind is Closing else actor.leave
    leaving = leave.remote()
    late = [actor.add.remote() for _ in range(2)]
    await raises(errors.ActorDiedError, leaving, match="ended it by exit_actor")
    for outcome in await asyncio.gather(*late, return_exceptions=True):
        # Threads and coroutines may have run it before.
        assert isinstance(outcome, int | errors.ActorDiedError)
    await until(lambda: has_gone(pid))
    if kind is not MortalThreads:
        await gate.entered("it-gone")
    call = actor.add.remote
    await raises(errors.ActorDiedError, call, match=r"exit_actor\(\)")
    with pytest.raises(errors.MisuseError, match="outside"):
        aiogpu.exit_actor()


async def test_calls_that_end_after_exit_actor_do_not_disturb_it(gate: Gate) -> None:
    """They may end in the turns of the loop in which the actor begins to close."""
    actor = await Closing.remote(gate.path, "it")
    leaving = actor.leave_later.remote()
    late = [actor.turns.remote(count) for count in range(6)]
    await asyncio.gather(leaving, *late, return_exceptions=True)
    await gate.entered("it-closed", "it-gone")


async def test_exit_actor_cancels_the_calls_that_run(gate: Gate) -> None:
    """They are cancelled in the actor's process, and their callers learn why."""
    actor = Closing.remote(gate.path, "it")
    running = actor.wait.remote("running")
    await gate.entered("running")
    calls = actor.leave_later.remote(), running
    await raises(errors.ActorDiedError, *calls, match=r"by exit_actor\(\)")
    await gate.entered("running-cancelled")


@pytest.mark.own_node
async def test_an_ending_actor_cancels_closes_and_prints(
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
        call = actor.add.remote
        await raises(errors.ActorDiedError, call, match="block was left")
    if address != "ray":  # the clusters of the tests show no output
        shown = capsys.readouterr()
        assert "ValueError: cannot close" in shown.err
        assert "going" in shown.out


@pytest.mark.needs("processes")
@pytest.mark.usefixtures("short_leave")
@pytest.mark.parametrize("way", ["handle", "exit"])
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_an_endless_close_is_cut_off(way: str, gate: Gate) -> None:
    options = {"num_gpus": 1, "name": "a", "max_restarts": 3}
    actor = Closing.options(**options).remote(gate.path, "it", "endless")
    pid = await actor.pid.remote()
    if way == "exit":
        await raises(errors.ActorDiedError, actor.leave_later.remote())
    else:
        del actor
    await gate.entered("it-closing")
    assert await tasks.where.options(num_gpus=1).remote()
    assert has_gone(pid)
    assert "it-closed" not in gate.pids
    await raises(errors.ActorNameError, lambda: aiogpu.get_actor("a"))


@pytest.mark.needs("interrupts", "blocked ends")
@pytest.mark.usefixtures("short_leave")
async def test_a_cancelled_call_does_not_keep_its_actor(gate: Gate) -> None:
    for kind in (Counter, Threads):
        actor = kind.remote()
        call = actor.block_in_c.remote(gate.path, kind.__name__)
        await gate.entered(kind.__name__)
        call.cancel()
        del actor
        await until(lambda name=kind.__name__: has_gone(gate.pids[name]))


@pytest.mark.needs("blocking", "orderly close")
@pytest.mark.parametrize("kind", [Mortal, MortalThreads, Closing])
@pytest.mark.own_node
async def test_actors_end_in_order_with_their_node(kind: Any, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=1):
        actor = await kind.remote(gate.path, "it")
        holder = await Counter.options(num_cpus=1).remote()
        lost = [holder.gated.remote(gate.path, "holder"), Counter.remote()]
        if kind is not MortalThreads:  # nothing but itself can end a thread's call
            wait = actor.spin_at_gate if kind is Mortal else actor.wait
            lost.append(wait.remote("call"))
            await gate.entered("call")
        for number in range(5):
            actor.note.remote(number)
    await raises(errors.NodeClosedError, *lost, match="shut down")
    await gate.entered("it-gone")
    if kind is Mortal:
        await until(lambda: "call-interrupted" in gate.pids)
    elif kind is Closing:
        await until(lambda: {"call-cancelled", "it-closed"} <= set(gate.pids))


@pytest.mark.needs("processes")
@pytest.mark.parametrize("kind", [Counter, Async])
@pytest.mark.aiogpu(num_cpus=1, log_to_driver=False)
async def test_a_method_that_ends_its_process_ends_the_actor(kind: Any) -> None:
    """"""
    for method, argument, reason in (
        ("exit", 7, "exited with code 7"),
        ("kill_self", int(signal.SIGKILL), "SIGKILL"),
        ("kill_self", int(signal.SIGSEGV), "SIGSEGV"),
    ):
        actor = kind.remote()
        pid = await actor.pid.remote()
        call = getattr(actor, method).remote(argument)
        late = actor.add.remote()
        error = await raises(errors.ActorDiedError, call, match=reason)
        assert not error.is_restarting
        cause = error.__cause__
        assert isinstance(cause, errors.WorkerDiedError)
        assert cause.pid == pid
        if method == "exit":
            assert cause.last_output == ("last words",)
        calls = late, actor.add.remote(), actor
        await raises(errors.ActorDiedError, *calls, match=reason)


async def test_a_fork_of_the_program_leaves_its_actors_alone() -> None:
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
            except errors.NodeError:
                continue
        del counter
        os._exit(code)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert status == 0
    assert await counter.add.remote() == 1


@pytest.mark.needs("waiting for resources")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_a_waiting_actor_without_handles_is_never_made(tmp_path: Path) -> None:
    """Unless it was sent calls before the last handle went."""
    runs = tmp_path / "runs"
    holder = await Counter.options(num_gpus=1).remote()
    Broken.options(num_gpus=1).remote(OSError, str(runs))
    call = Counter.options(num_gpus=1).remote().add.remote()
    await holder.add.remote()
    aiogpu.kill(holder)
    assert await call == 1
    assert await tasks.where.options(num_gpus=1).remote()
    await aiogpu.shutdown()
    assert not runs.exists()


@pytest.mark.needs("blocking")
async def test_an_actor_refuses_calls_while_its_block_is_left(gate: Gate) -> None:
    actor = await Counter.remote()
    running = actor.gated.remote(gate.path, "a")
    await gate.entered("a")
    leaving = asyncio.ensure_future(actor.__aexit__(None, None, None))
    await asyncio.sleep(0)
    call = actor.add.remote
    await raises(errors.ActorDiedError, call, match="takes no more calls")
    gate.release("a")
    await leaving
    assert await running == "a"


async def test_exit_actor_is_refused_outside_a_method() -> None:
    @aiogpu.remote
    class Never:
        def __init__(self) -> None:
            aiogpu.exit_actor()

    @aiogpu.remote
    def task() -> None:
        aiogpu.exit_actor()

    await raises(errors.ActorDiedError, Never.remote(), match="constructor")
    await raises(errors.MisuseError, task.remote(), match="outside")


@pytest.mark.whole
@pytest.mark.parametrize(
    "kind",
    [
        aiogpu.remote(Leaving),
        pytest.param(aiogpu.remote(max_concurrency=2)(Leaving), marks=needs_threads),
        aiogpu.remote(LeavingSoftly),
    ],
    ids=["serial", "threads", "coroutines"],
)
async def test_a_method_that_swallows_exit_actor_ends_the_actor(
    kind: Any, address: str
) -> None:
    for method in ("returned", "replaced"):
        actor = await kind.options(max_restarts=2).remote()
        call = getattr(actor, method).remote()
        await raises(errors.ActorDiedError, call, match="exit_actor")
        await raises(errors.ActorDiedError, lambda add=actor.add: add.remote(1))
    if address not in ("inline", "ray"):
        actor = await kind.remote()
        items = actor.items.remote()
        assert await anext(items) == 1
        with pytest.raises(errors.ActorDiedError):
            _ = [item async for item in items]
        await raises(errors.ActorDiedError, lambda: actor.add.remote(1))


@pytest.mark.needs("processes")
@pytest.mark.own_node
async def test_a_node_waits_for_no_actor_beyond_its_grace(gate: Gate) -> None:
    """"""
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
    await raises(errors.NodeClosedError, *lost)
    assert all(has_gone(pid) for pid in gate.pids.values())


@pytest.mark.needs("processes")
@pytest.mark.parametrize("kind", [Counter, Threads, Async])
async def test_a_fork_of_an_actor_does_not_answer_for_it(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    @aiogpu.remote
    class Forks:
        def __init__(self) -> None:
            self.child = os.fork()

        def status(self) -> int:
            return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])

    actor = kind.remote()
    for way, code in (("return", 0), ("raise", 1), ("exit", 7)):
        assert await actor.fork.remote(way) == code
        assert await actor.add.remote()
    shown = capsys.readouterr()
    assert shown.out.count(") from the child\n") == 3
    assert "ValueError: in the child" in shown.err
    assert await Forks.remote().status.remote() == 0
