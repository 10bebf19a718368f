"""`num_returns=n`: a handle for each of several results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from aiogpu.types import Node
from tests.contract import value_tasks as v
from tests.contract.value_tasks import both
from tests.support.errors import raises
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=4),
]


async def test_results_are_arguments_of_other_tasks(node: Node) -> None:
    a, b = v.split.options(num_returns=2).remote([1, 2])
    assert await v.total.remote(a, b, x=a) == 4
    assert await a == 1
    assert await v.get_nested.remote({"handle": b}) == 2
    assert await v.await_nested.remote({"handle": b}) == 2


async def test_methods_have_several_results(node: Node) -> None:
    for kind in (v.Serial, v.Soft):
        async with kind.remote() as actor:
            a, b = actor.both.remote([1, 2])
            assert [await b, await a] == [2, 1]
            assert await actor.add.remote(*actor.both.remote([3, 4])) == 7
            a, b = actor.both.remote([1])
            await raises(ValueError, a, match="num_returns=2")
            await raises(ValueError, b, match="num_returns=2")


async def test_the_work_stops_when_all_results_are_cancelled(
    node: Node, gate: Gate
) -> None:
    a, b = v.gated_split.options(num_returns=2).remote(gate.path, "slow", [1, 2])
    await gate.entered("slow")
    assert a.cancel()
    await raises(asyncio.CancelledError, a)
    assert not b.done()
    assert b.cancel()
    await gate.entered("slow-cancelled")


async def test_a_cancel_of_one_result_leaves_the_other(node: Node, gate: Gate) -> None:
    """Of a task that runs, and of an actor that is not made yet."""
    a, b = v.gated_split.options(num_returns=2).remote(gate.path, "slow", [1, 2])
    needs_a = v.give.remote(a)
    await gate.entered("slow")
    assert a.cancel()
    gate.release("slow")
    actor = v.Serial.remote()
    c, d = actor.both.remote([1, 2])
    needs_c = v.give.remote(c)
    assert c.cancel()
    assert [await b, await d] == [2, 2]
    await raises(errors.TaskCancelledError, needs_a, needs_c)


@pytest.mark.needs("at once")
@pytest.mark.parametrize("task", [v.cancel_a_part, v.cancel_a_part_plainly])
async def test_a_task_cancels_one_result_and_gets_the_other(
    task: Any, node: Node, gate: Gate
) -> None:
    running = task.remote(gate.path)
    await gate.entered("slow", "told")
    gate.release("slow")
    assert await running == 2


async def test_results_may_be_many_and_large(node: Node) -> None:
    parts = v.split.options(num_returns=500).remote(list(range(500)))
    assert await v.total.remote(*parts) == sum(range(500))
    large = [bytes([i]) * 400_000 for i in range(3)]
    a, b, c = v.split.options(num_returns=3).remote(large)
    assert await v.give.remote(b) == large[1]
    assert [await a, await b, await c] == large


async def test_each_result_has_a_handle(node: Node) -> None:
    """Of any iterable of the right length."""
    for task in (v.split, v.split_softly):
        a, b, c = task.options(num_returns=3).remote([1, "two", [3]])
        assert [await a, await b, await c] == [1, "two", [3]]
        two = task.options(num_returns=2).remote((4, 5))
        assert await asyncio.gather(*two) == [4, 5]
        assert await task.options(num_returns=1).remote([6]) == [6]
    named = v.split_by_dict.options(num_returns=3).remote()
    assert await asyncio.gather(*named) == ["x", "y", "z"]


async def test_a_wrong_number_of_results_and_errors_reach_each_handle(
    node: Node,
) -> None:
    for value, told in (
        ([1], "returned 1 objects, but num_returns=2"),
        ([1, 2, 3], "returned 3 objects, but num_returns=2"),
        ([], "returned 0 objects"),
        (7, "returned a int"),
        ("ab", "returned a str"),
        (None, "returned a NoneType"),
    ):
        await raises(
            (ValueError, TypeError),
            *v.split.options(num_returns=2).remote(value),
            match=told,
        )
    await raises(
        errors.SerializationError,
        *v.split_unwilling.options(num_returns=2).remote(),
        match="will not travel",
    )
    a, b = v.fail.options(num_returns=2).remote("both")
    await raises(v.LoudError, a, v.give.remote(b), b, match="both")


@pytest.mark.parametrize("task", [v.add_parts, v.add_parts_softly, v.add_gotten_parts])
async def test_a_task_passes_results_of_children_on(task: Any, node: Node) -> None:
    factor = 2 if task is v.add_gotten_parts else 1
    assert await task.remote([1, 20, 300]) == 321 * factor


# Handles are arguments while their node is still opening


@pytest.mark.usefixtures("each_engine")
async def test_a_handle_is_an_argument_before_its_task_starts() -> None:
    first = v.add.remote(1, 1)
    one, two = both.remote(5)
    waiting = [v.add.remote(first, first), v.add.remote(one, two), first]
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting) == [4, 11, 2]
    await aiogpu.shutdown()


@pytest.mark.usefixtures("each_engine")
async def test_a_task_with_an_argument_that_never_starts_fails() -> None:
    never = v.add.options(num_gpus=1000).remote(1, 1)
    cancelled = v.add.remote(1, 1)
    waiting = [v.add.remote(never, 1), v.add.remote(cancelled, 1)]
    cancelled.cancel()
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*waiting, never, return_exceptions=True)
    assert list(map(type, outcomes)) == [
        errors.InfeasibleError,
        errors.TaskCancelledError,
        errors.InfeasibleError,
    ]
    await aiogpu.shutdown()
