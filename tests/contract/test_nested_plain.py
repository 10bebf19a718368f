"""[B12] Tasks of plain functions: `.remote()` and `aiogpu.get`, which blocks."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from tests.contract import nested_tasks, tasks
from tests.contract.nested_tasks import LostError, await_here, refusal, run_here
from tests.support.gate import Gate, pass_gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    async with aiogpu.init(num_cpus=2) as session:
        yield session


async def test_a_task_starts_others(node: aiogpu.types.Node) -> None:
    assert await nested_tasks.increased.remote(1) == 2
    assert await nested_tasks.several.remote([3, 1, 2]) == [4, 2, 3]
    assert await nested_tasks.several.remote([]) == []


async def test_one_cpu_is_enough_for_any_depth() -> None:
    async with aiogpu.init(num_cpus=1):
        assert await nested_tasks.depth.remote(12) == 12
        assert await nested_tasks.depth_of_coroutines.remote(12) == 12


async def test_results_come_in_the_order_of_the_handles(
    node: aiogpu.types.Node,
) -> None:
    def work() -> Any:
        slow, fast = tasks.add.remote(1), tasks.double.remote(1)
        first = aiogpu.get(fast)
        both = aiogpu.get((slow, fast, slow))
        return first, both, aiogpu.get(slow), repr(slow), slow.done(), slow.result()

    told = (2, [2, 2, 2], 2, "<BlockingHandle add finished>", True, 2)
    assert await run_here.remote(work) == told


async def test_what_is_defined_inside_a_task(node: aiogpu.types.Node) -> None:
    def work() -> list[Any]:
        base = 40

        @aiogpu.remote
        def closure(x: int) -> int:
            return base + x

        @aiogpu.remote
        async def coroutine(x: int) -> int:
            await asyncio.sleep(0)
            return aiogpu_of(x)

        def aiogpu_of(x: int) -> int:
            return base - x

        anonymous = aiogpu.remote(lambda x: x * base)
        handles = [f.remote(2) for f in (closure, coroutine, anonymous)]
        return aiogpu.get(handles)

    assert await run_here.remote(work) == [42, 38, 80]
    assert await run_here.remote(work) == [42, 38, 80]


async def test_a_child_with_other_options(node: aiogpu.types.Node) -> None:
    def work() -> Any:
        other = tasks.where.options(
            name="other", num_cpus=0.5, runtime_env={"env_vars": {"NEST": "1"}}
        )
        variables = tasks.environment.options(
            runtime_env={"env_vars": {"NEST": "1"}}
        ).remote("NEST")
        return aiogpu.get(other.remote()), aiogpu.get(variables)

    facts, variables = await run_here.remote(work)
    assert (facts["name"], facts["resources"]) == ("other", {"CPU": 0.5})
    assert variables == {"NEST": "1"}


async def test_errors_keep_their_type_through_levels(node: aiogpu.types.Node) -> None:
    with pytest.raises(LostError) as caught:
        await nested_tasks.raise_below.remote(2)
    assert caught.value.code == 7
    trace = str(caught.value.__cause__)
    assert "in raise_below" in trace
    assert trace.count("LostError: 7") >= 2, trace

    def catch() -> list[str]:
        odd = tasks.fail.remote(SystemExit, 3)
        awkward = tasks.fail_awkwardly.remote()
        unsendable = tasks.unpicklable.remote()
        unreadable = tasks.unreadable.remote("1/0")
        handles: list[Any] = [odd, awkward, unsendable, unreadable]
        told = [refusal(lambda one=one: aiogpu.get(one)) for one in handles]  # type: ignore[misc]
        assert told == [
            refusal(lambda one=one: one.result())  # type: ignore[misc]
            for one in handles
        ], "a second look sees the same"
        return told

    odd, awkward, unsendable, unreadable = await run_here.remote(catch)
    assert odd.startswith("TaskError: fail failed")
    assert "SystemExit" in odd
    assert awkward.startswith("TaskError: fail_awkwardly failed")
    assert unsendable.startswith("SerializationError: unpicklable ran, but")
    assert unreadable.startswith("DeserializationError")


async def test_the_first_failure_ends_the_wait(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    path = gate.path

    def work() -> list[str]:
        slow = tasks.gated.remote(path, "slow")
        told = [
            refusal(lambda: aiogpu.get([slow, tasks.fail.remote(KeyError, 1)])),
            refusal(lambda: aiogpu.get([tasks.fail.remote(KeyError, 2), slow])),
        ]
        pass_gate(path, "caught")
        return [*told, aiogpu.get(slow)]

    handle = run_here.remote(work)
    await gate.entered("caught", "slow")
    gate.release("caught", "slow")
    assert await handle == ["KeyError: 1", "KeyError: 2", "slow"]


async def test_time_may_be_limited(node: aiogpu.types.Node, gate: Gate) -> None:
    path = gate.path

    def work() -> tuple[str, str, str]:
        slow, quick = tasks.gated.remote(path, "a"), tasks.add.remote(1)
        aiogpu.get(quick, timeout=60)
        told = refusal(lambda: aiogpu.get([quick, slow], timeout=1e-3))
        bad = refusal(lambda: aiogpu.get(slow, timeout=-1))
        pass_gate(path, "late")
        return told, bad, aiogpu.get(slow, timeout=60)

    handle = run_here.remote(work)
    await gate.entered("late", "a")
    gate.release("a", "late")
    told, bad, slow = await handle
    assert told == (
        "TaskTimeoutError: 1 of 2 tasks did not end within the 0.001 s of "
        "aiogpu.get(), gated for one; they go on."
    )
    assert bad.startswith("OptionError: timeout=-1")
    assert slow == "a"


async def test_a_child_is_cancelled(node: aiogpu.types.Node, gate: Gate) -> None:
    path = gate.path

    def work() -> Any:
        child = tasks.gated_coroutine.remote(path, "child")
        waiting = [tasks.add.remote(1) for _ in range(3)]
        pass_gate(path, "parent")
        states = [child.cancel(), child.cancel(), child.cancelled(), child.done()]
        told = refusal(lambda: aiogpu.get(child)), repr(child)
        return states, told, aiogpu.get(waiting), waiting[0].cancel()

    handle = run_here.remote(work)
    await gate.entered("child", "parent")
    gate.release("parent")
    await gate.entered("child-cancelled")
    states, told, rest, late = await handle
    assert states == [True, False, True, True]
    assert told == (
        "TaskCancelledError: gated_coroutine was cancelled.",
        "<BlockingHandle gated_coroutine cancelled>",
    )
    assert (rest, late) == ([2, 2, 2], False)


async def test_a_blocking_handle_is_no_result(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    path = gate.path

    def work() -> list[str]:
        handle = tasks.gated.remote(path, "child")
        told = [
            refusal(lambda: bool(handle)),
            refusal(lambda: handle.__await__()),
            refusal(lambda: pickle.dumps(handle)),
            refusal(lambda: handle.result()),
            refusal(lambda: aiogpu.get("handle")),  # type: ignore[call-overload]
            refusal(lambda: aiogpu.get([tasks.add])),  # type: ignore[list-item]
        ]
        handle.cancel()
        return told

    truth, awaited, pickled, early, text, function = await run_here.remote(work)
    assert truth.startswith("MisuseError: a handle is not its result")
    assert "wait by aiogpu.get(handle)" in awaited
    assert "Await it, and pickle the value" in pickled
    assert early == "MisuseError: gated has not ended; aiogpu.get() waits."
    assert text.startswith("MisuseError: aiogpu.get() was given 'handle'")
    assert function.startswith("MisuseError: aiogpu.get() was given <RemoteFunction")


async def test_a_handle_is_the_result_of_a_task(node: aiogpu.types.Node) -> None:
    """And what it is the handle of goes on, although it was that task's child."""
    handle = await run_here.remote(lambda: tasks.add.remote(1))
    assert await handle == 2


async def test_get_is_for_tasks(node: aiogpu.types.Node) -> None:
    handle = tasks.add.remote(1)
    with pytest.raises(aiogpu.errors.MisuseError, match="await"):
        aiogpu.get(handle)
    told = await asyncio.to_thread(refusal, lambda: aiogpu.get(handle))
    assert "this handle belongs to an event loop: await it there" in told
    assert await handle == 2

    async def block() -> str:
        child = tasks.add.remote(1)
        told = refusal(lambda: aiogpu.get(child))
        assert await child == 2
        return told

    assert "would block the event loop" in await await_here.remote(block)


def test_get_without_any_node() -> None:
    assert aiogpu.get([]) == []
    with pytest.raises(aiogpu.errors.MisuseError, match="was given 1"):
        aiogpu.get(1)  # type: ignore[call-overload]


async def test_many_children_in_one_get() -> None:
    async with aiogpu.init(num_cpus=2):
        numbers = list(range(2000))
        assert await nested_tasks.several.remote(numbers) == [n + 1 for n in numbers]


async def test_large_arguments_and_results(node: aiogpu.types.Node) -> None:
    def work() -> int:
        return len(aiogpu.get(tasks.echo.remote(bytes(50_000_000))))

    assert await run_here.remote(work) == 50_000_000


async def test_a_fork_of_a_task_starts_none(node: aiogpu.types.Node) -> None:
    """Neither by a function that the task has called before, nor by another."""

    def work() -> str:
        aiogpu.get(tasks.add.remote(1))
        reading, writing = os.pipe()
        if os.fork() == 0:
            for function in (tasks.add, tasks.double):
                os.write(writing, refusal(lambda f=function: f.remote(1)).encode())  # type: ignore[misc]
            os._exit(0)
        os.wait()
        return os.read(reading, 1000).decode()

    told = await run_here.remote(work)
    assert "no task of aiogpu runs in this process" in told
    assert "the node cannot be reached inside a task or what it has forked" in told


async def test_a_task_asks_its_node_for_nothing_else(node: aiogpu.types.Node) -> None:
    async def ask() -> list[str]:
        told = []
        for question in (aiogpu.init, aiogpu.status, aiogpu.available_resources):
            with pytest.raises(aiogpu.errors.NodeError) as caught:
                await question()
            told.append(str(caught.value))
        await aiogpu.shutdown()
        return told

    told = await await_here.remote(ask)
    assert told[0].startswith("aiogpu.init() cannot be reached inside a task")
    assert told[1].startswith("aiogpu.status() was called inside a task")
    assert told[2].startswith("aiogpu.available_resources() was called inside a task")
