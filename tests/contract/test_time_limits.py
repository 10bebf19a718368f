"""`run_timeout` counts from a task's first line; errors tell the wait and the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.cli.box import box
from tests.contract import option_tasks, tasks
from tests.contract.node_here import node_here
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

SHORT, LONG = 0.2, 1.0


async def let_pass(seconds: float, gate: Gate) -> None:
    """Wait, by a task whose time is up then."""
    late = tasks.gated_coroutine.options(num_cpus=0, timeout=seconds)
    with pytest.raises(aiogpu.TaskTimeoutError):
        await late.remote(gate.path, "clock")


async def of_stream(stream: Any) -> list[int]:
    return [item async for item in stream]


KINDS: dict[str, Callable[[Any, str], Awaitable[object]]] = {
    "coroutine": lambda given, path: tasks.gated_coroutine.options(**given).remote(
        path, "in"
    ),
    "stream": lambda given, path: of_stream(
        option_tasks.items.options(**given).remote(path, "in")
    ),
    "map": lambda given, path: of_stream(
        option_tasks.each.options(**given).map([path, path], chunk=2)
    ),
    "child": lambda given, path: option_tasks.parent.remote(path, "in", given),
}


@pytest.mark.needs("run times")
@pytest.mark.parametrize("kind", KINDS)
async def test_its_code_is_stopped_when_it_has_run_for_so_long(
    address: str, kind: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=2), asyncio.timeout(30):
        told = (
            rf"did not end within its run_timeout of {SHORT} s: it waited \d+\.\d s "
            r"for \{CPU: 1\} and ran \d+\.\d s\."
        )
        with pytest.raises(aiogpu.TaskTimeoutError, match=told):
            await KINDS[kind]({"run_timeout": SHORT}, gate.path)
        assert "in" in gate.pids
        assert await tasks.add.remote(1) == 2


@pytest.mark.needs("run times", "at once")
async def test_plain_code_is_interrupted_and_killed(address: str, gate: Gate) -> None:
    options = {"run_timeout": SHORT, "cancel_grace": 0.1}
    async with aiogpu.init(address=address, num_cpus=2):
        for code in (tasks.gated, tasks.swallow):
            with pytest.raises(aiogpu.TaskTimeoutError, match="run_timeout"):
                await code.options(**options).remote(gate.path, "in")


@pytest.mark.needs("run times", "at once")
async def test_neither_a_wait_in_the_queue_nor_one_for_arguments_counts(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        holder = tasks.gated.remote(gate.path, "holder")
        await gate.entered("holder")
        timed = tasks.double.options(run_timeout=LONG)
        waiting = [timed.remote(number) for number in range(20)]
        waiting.append(timed.remote(holder))
        await let_pass(LONG + 0.1, gate)
        gate.release("holder")
        assert await asyncio.gather(*waiting) == [*range(0, 40, 2), 2 * "holder"]


@pytest.mark.needs("at once")
@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_timeout_tells_how_long_it_waited_and_how_long_it_ran(
    address: str, is_begun: bool, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        holder = None
        if not is_begun:
            holder = tasks.gated.remote(gate.path, "holder")
            await gate.entered("holder")
        late = tasks.gated_coroutine.options(timeout=SHORT)
        ran = r"ran \d\.\d s" if is_begun else "did not begin"
        told = rf"it waited \d\.\d s for \{{CPU: 1\}} and {ran}\."
        if address == "ray":
            told = "Ray does not tell"
        with pytest.raises(aiogpu.TaskTimeoutError, match=told):
            await late.remote(gate.path, "in")
        if holder is not None:
            gate.release("holder")
            await holder


CALLS: dict[str, tuple[type, dict[str, int], str]] = {
    "one at a time": (option_tasks.Timed, {}, "It is being stopped"),
    "coroutines": (option_tasks.TimedCoroutines, {}, "cancelled where it next awaits"),
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
async def test_a_call_of_an_actor_is_stopped_when_it_has_run_for_so_long(
    address: str, kind: str, gate: Gate
) -> None:
    cls, options, what_next = CALLS[kind]
    name = "coroutine" if kind == "coroutines" else "plain"
    async with aiogpu.init(address=address, num_cpus=2):
        actor = aiogpu.remote(**options)(cls).remote()  # type: ignore[call-overload]
        told = (
            rf"^{cls.__name__}.{name} did not end within its run_timeout of 0\.2 s: it "
            rf"ran \d+\.\d s\. .*{what_next}\."
        )
        with pytest.raises(aiogpu.TaskTimeoutError, match=told):
            await getattr(actor, name).remote(gate.path, "mine")
        with pytest.raises(aiogpu.TaskTimeoutError, match=told):
            await option_tasks.caller.remote(actor, name, gate.path, "task's")
        assert {"mine", "task's"} <= set(gate.pids)
        if kind == "coroutines":
            await gate.entered("mine-cancelled", "task's-cancelled")
        elif kind == "threads":
            gate.release("mine", "task's")
        assert await actor.quick.remote() == "quick"
        failures = (await aiogpu.status()).failures
        timed = [one.name for one in failures if "run_timeout" in one.message]
        assert timed.count(f"{cls.__name__}.{name}") == 2


@pytest.mark.needs("run times", "at once")
async def test_the_run_of_a_stream_and_of_a_chunk_of_calls_is_limited_as_a_whole(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = aiogpu.remote(option_tasks.Timed).remote()
        items = actor.items.remote(gate.path, "stream")
        assert await anext(items) == 0
        with pytest.raises(aiogpu.TaskTimeoutError, match=r"Timed\.items did not"):
            await anext(items)
        with pytest.raises(aiogpu.TaskTimeoutError, match=r"Timed\.each did not"):
            await of_stream(actor.each.map([gate.path] * 2, chunk=2))
        assert "each" in gate.pids


@pytest.mark.needs("run times", "at once")
async def test_calls_that_wait_for_their_turn_have_all_of_it(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        actor = aiogpu.remote(option_tasks.Timed).remote()
        slow = actor.plain.remote(gate.path, "slow")
        waiting = [actor.quick.remote() for _ in range(20)]
        with pytest.raises(aiogpu.TaskTimeoutError):
            await slow
        assert await asyncio.gather(*waiting) == ["quick"] * 20


# A task that knows that its program or node stops: `is_stopping`, `stop_grace`


@pytest.mark.needs("stop graces")
async def test_it_has_its_grace_when_the_node_is_closed(
    address: str, gate: Gate
) -> None:
    kinds: dict[str, Any] = {"soft": option_tasks.save}
    if address != "inline":  # where one runs at a time
        kinds |= {"plain": option_tasks.save_plainly}
    async with aiogpu.init(address=address, num_cpus=2):
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
            with pytest.raises(aiogpu.errors.NodeClosedError):
                await handle


@pytest.mark.needs("stop graces")
async def test_who_needs_longer_than_its_grace_is_stopped(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        handle = option_tasks.save.options(stop_grace=0.1).remote(gate.path, "in")
        await gate.entered("in-False")
        closing = asyncio.ensure_future(aiogpu.shutdown())
        await gate.entered("in-told-cancelled")
        await closing
        assert "in-saved" not in gate.pids
        assert handle.done()


@pytest.mark.needs("stop graces")
@pytest.mark.parametrize("kind", ["task", "method"])
async def test_one_that_is_cancelled_knows_and_has_no_grace(
    address: str, kind: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
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


async def test_the_tasks_of_a_program_that_leaves_are_told_alone(
    tmp_path: Path, gate: Gate
) -> None:
    """What it has left detached goes on, and so does what others have."""
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


async def test_a_drain_tells_all_and_waits_for_who_needs_longer(gate: Gate) -> None:
    """The one that has no grace is stopped when the drain is over."""
    with box() as here:
        await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in here.variables.items():
                patch.setenv(name, value)
            async with aiogpu.init(address="auto"):
                patient = option_tasks.save.options(stop_grace=60)
                saves = patient.remote(gate.path, "in")
                other = option_tasks.look_as_task.remote(gate.path, "other")
                await gate.entered("in-False", "other")
                stopping = asyncio.ensure_future(
                    asyncio.to_thread(here.run, "stop", "--drain=0.5")
                )
                await gate.entered("in-told", "other-True")
                assert not stopping.done()
                gate.release("in-told")
                await gate.entered("in-saved")
                await stopping
                for handle in (saves, other):
                    with pytest.raises(aiogpu.errors.NodeError):
                        await handle
