"""`timeout`, `run_timeout` and `stop_grace` of tasks and calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import NodeClosedError, NodeError
from aiogpu.types import Node
from tests.cli.sandbox import open_sandbox
from tests.contract import option_tasks, tasks
from tests.contract.node_here import node_here
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2),
]

SHORT, LONG = 0.2, 1.0


async def let_pass(seconds: float, gate: Gate) -> None:
    """Wait until a task's timeout ends it."""
    late = tasks.gated_coroutine.options(num_cpus=0, timeout=seconds)
    with pytest.raises(aiogpu.TaskTimeoutError):
        await late.remote(gate.path, "clock")


async def of_stream(stream: Any) -> list[int]:
    return [item async for item in stream]


@pytest.mark.needs("run times")
@pytest.mark.parametrize("kind", ["coroutine", "stream", "map", "child"])
async def test_run_timeout_stops_code(node: Node, kind: str, gate: Gate) -> None:
    limit: Any = {"run_timeout": SHORT}
    message = (
        rf"did not end within its run_timeout of {SHORT} s: it waited \d+\.\d s "
        r"for \{CPU: 1\} and ran \d+\.\d s\."
    )
    if kind == "coroutine":
        work: Any = tasks.gated_coroutine.options(**limit).remote(gate.path, "in")
    elif kind == "stream":
        work = of_stream(option_tasks.items.options(**limit).remote(gate.path, "in"))
    elif kind == "map":
        task = option_tasks.each.options(**limit)
        work = of_stream(task.map([gate.path] * 2, chunk=2))
    else:
        work = option_tasks.parent.remote(gate.path, "in", limit)
    with pytest.raises(aiogpu.TaskTimeoutError, match=message):
        await work
    assert await tasks.add.remote(1) == 2


@pytest.mark.needs("run times", "at once")
async def test_run_timeout_stops_plain_code(node: Node, gate: Gate) -> None:
    options = {"run_timeout": SHORT, "cancel_grace": 0.1}
    for code in (tasks.gated, tasks.swallow):
        with pytest.raises(aiogpu.TaskTimeoutError, match="run_timeout"):
            await code.options(**options).remote(gate.path, "in")


@pytest.mark.needs("run times", "at once")
@pytest.mark.aiogpu(num_cpus=1)
async def test_run_timeout_does_not_count_waiting(node: Node, gate: Gate) -> None:
    holder = tasks.gated.remote(gate.path, "holder")
    await gate.entered("holder")
    timed = tasks.double.options(run_timeout=LONG)
    waiting = [timed.remote(number) for number in range(20)]
    waiting.append(timed.remote(holder))
    await let_pass(LONG + 0.1, gate)
    gate.release("holder")
    assert await asyncio.gather(*waiting) == [*range(0, 40, 2), 2 * "holder"]


@pytest.mark.needs("at once")
@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.aiogpu(num_cpus=1)
async def test_a_timeout_tells_the_wait_and_the_run(
    address: str, node: Node, is_running: bool, gate: Gate
) -> None:
    holder, limit = None, SHORT
    if is_running:
        # It has begun by then, on a busy machine too: the worker is there.
        before = tasks.gated_coroutine.remote(gate.path, "before")
        await gate.entered("before")
        gate.release("before")
        await before
        limit = 10 * SHORT
    else:
        holder = tasks.gated.remote(gate.path, "holder")
        await gate.entered("holder")
    late = tasks.gated_coroutine.options(timeout=limit)
    ran = r"ran \d\.\d s" if is_running else "did not begin"
    message = rf"it waited \d\.\d s for \{{CPU: 1\}} and {ran}\."
    if address == "ray":
        message = "Ray does not tell"
    with pytest.raises(aiogpu.TaskTimeoutError, match=message):
        await late.remote(gate.path, "in")
    if holder is not None:
        gate.release("holder")
        await holder


CALLS: dict[str, tuple[type, dict[str, int], str]] = {
    "one at a time": (option_tasks.Timed, {}, "It is being stopped"),
    "coroutines": (option_tasks.TimedCoroutines, {}, "cancelled at its next await"),
    "threads": (option_tasks.Timed, {"max_concurrency": 2}, "its code goes on"),
}


@pytest.mark.needs("run times")
@pytest.mark.parametrize(
    "kind",
    [
        "coroutines",
        pytest.param("one at a time", marks=pytest.mark.needs("at once")),
        pytest.param("threads", marks=pytest.mark.needs("at once")),
    ],
)
async def test_run_timeout_stops_actor_calls(
    node: Node, address: str, kind: str, gate: Gate
) -> None:
    cls, options, what_next = CALLS[kind]
    name = "coroutine" if kind == "coroutines" else "plain"
    actor = aiogpu.remote(**options)(cls).remote()  # type: ignore[call-overload]
    message = (
        rf"^{cls.__name__}.{name} did not end within its run_timeout of 0\.2 s: it "
        rf"ran \d+\.\d s\. .*{what_next}\."
    )
    with pytest.raises(aiogpu.TaskTimeoutError, match=message):
        await getattr(actor, name).remote(gate.path, "mine")
    with pytest.raises(aiogpu.TaskTimeoutError, match=message):
        await option_tasks.caller.remote(actor, name, gate.path, "task's")
    assert {"mine", "task's"} <= set(gate.pids)
    if kind == "coroutines":
        await gate.entered("mine-cancelled", "task's-cancelled")
    elif kind == "threads":
        gate.release("mine", "task's")
    assert await actor.quick.remote() == "quick"
    if address == "inline":
        return  # it keeps no records of what has failed
    failures = (await aiogpu.status()).failures
    timed = [failure.name for failure in failures if "run_timeout" in failure.message]
    assert timed.count(f"{cls.__name__}.{name}") == 2


@pytest.mark.needs("run times", "at once")
async def test_run_timeout_limits_streams_and_chunks(node: Node, gate: Gate) -> None:
    actor = aiogpu.remote(option_tasks.Timed).remote()
    items = actor.items.remote(gate.path, "stream")
    assert await anext(items) == 0
    with pytest.raises(aiogpu.TaskTimeoutError, match=r"Timed\.items did not"):
        await anext(items)
    with pytest.raises(aiogpu.TaskTimeoutError, match=r"Timed\.each did not"):
        await of_stream(actor.each.map([gate.path] * 2, chunk=2))
    assert "each" in gate.pids


@pytest.mark.needs("run times", "at once")
async def test_queued_calls_keep_their_full_run_timeout(node: Node, gate: Gate) -> None:
    actor = aiogpu.remote(option_tasks.Timed).remote()
    slow = actor.plain.remote(gate.path, "slow")
    waiting = [actor.quick.remote() for _ in range(20)]
    with pytest.raises(aiogpu.TaskTimeoutError):
        await slow
    assert await asyncio.gather(*waiting) == ["quick"] * 20


# Tasks that know that their program or node stops: `is_stopping`, `stop_grace`


@pytest.mark.needs("stop graces")
async def test_stop_grace_delays_the_close(
    address: str, node: Node, gate: Gate
) -> None:
    kinds: dict[str, Any] = {"soft": option_tasks.save}
    if address != "inline":  # an inline node runs one task at a time
        kinds |= {"plain": option_tasks.save_plainly}
    handles = [
        kind.options(stop_grace=60).remote(gate.path, name)
        for name, kind in kinds.items()
    ]
    await gate.entered(*(f"{name}-False" for name in kinds))
    closing = asyncio.ensure_future(aiogpu.shutdown())
    await gate.entered(*(f"{name}-told" for name in kinds))
    assert not closing.done()
    for name in kinds:
        gate.release(f"{name}-told")
    await gate.entered(*(f"{name}-saved" for name in kinds))
    await closing
    for handle in handles:
        with pytest.raises(NodeClosedError):
            await handle


@pytest.mark.needs("stop graces")
async def test_a_task_beyond_its_stop_grace_is_stopped(node: Node, gate: Gate) -> None:
    handle = option_tasks.save.options(stop_grace=0.1).remote(gate.path, "in")
    await gate.entered("in-False")
    closing = asyncio.ensure_future(aiogpu.shutdown())
    await gate.entered("in-told-cancelled")
    await closing
    assert "in-saved" not in gate.pids
    assert handle.done()


@pytest.mark.needs("stop graces")
@pytest.mark.parametrize("kind", ["task", "method"])
async def test_cancel_gives_no_stop_grace(node: Node, kind: str, gate: Gate) -> None:
    assert not aiogpu.get_runtime_context().is_stopping
    if kind == "task":
        call: Any = option_tasks.look_as_task.options(stop_grace=60)
        handle = call.remote(gate.path, "in")
        await gate.entered("in")
        handle.cancel()
        await gate.entered("in-True")
    else:
        async with option_tasks.Looking.remote() as actor:
            handle = actor.look.remote(gate.path, "in")
            await gate.entered("in")
            handle.cancel()
            await gate.entered("in-False")  # the call ends, the actor goes on
            assert await actor.is_stopping.remote() is False


async def test_only_the_leaving_programs_tasks_stop(tmp_path: Path, gate: Gate) -> None:
    """Its detached tasks go on, and so do tasks of other programs."""
    async with node_here(tmp_path) as here:
        async with here.join() as leaves:
            half = option_tasks.save.options(num_cpus=0.5)
            kept = half.options(lifetime="detached").remote(gate.path, "kept")
            handle = half.options(stop_grace=60).remote(gate.path, "own")
            await gate.entered("own-False", "kept-False")
            await leaves.shutdown(at_once=True)
            await gate.entered("own-told")
            assert handle.done()
            assert kept.done()
        async with here.join():
            other = option_tasks.look_as_task.remote(gate.path, "other")
            await gate.entered("other")
            gate.release("other", "own-told")
            await other
            await gate.entered("own-saved", "other-False")
        assert "kept-told" not in gate.pids


async def test_a_drain_waits_for_stop_graces(gate: Gate) -> None:
    """A task without a grace is stopped when the drain is over."""
    with open_sandbox() as here:
        await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in here.variables.items():
                patch.setenv(name, value)
            async with aiogpu.init(address="auto"):
                patient = option_tasks.save.options(stop_grace=60)
                saves = patient.remote(gate.path, "in")
                other = option_tasks.look_as_task.remote(gate.path, "other")
                await gate.entered("in-False", "other")
                stop = asyncio.to_thread(here.run, "stop", "--drain=0.5")
                stopping = asyncio.ensure_future(stop)
                await gate.entered("in-told", "other-True")
                assert not stopping.done()
                gate.release("in-told")
                await gate.entered("in-saved")
                await stopping
                for handle in (saves, other):
                    with pytest.raises(NodeError):
                        await handle
