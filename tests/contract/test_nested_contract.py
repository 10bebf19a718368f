"""[B12] Tasks that start tasks: what is the same wherever they run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator

import pytest

import aiogpu
from tests.contract import kin_tasks, tasks
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
async def node(address: str) -> AsyncIterator[aiogpu.types.Node]:
    """Two CPUs, and one GPU."""
    async with (
        asyncio.timeout(60),
        aiogpu.init(
            address=address, num_cpus=2, num_gpus=1, cancel_grace=20
        ) as session,
    ):
        yield session


@pytest.mark.parametrize("how", ["plain_sum", "soft_sum", "sum_on_own_loop"])
async def test_children_are_waited_for(how: str, node: aiogpu.types.Node) -> None:
    expected = {"plain_sum": 15, "soft_sum": 20, "sum_on_own_loop": 21}
    assert await getattr(kin_tasks, how).remote(5) == expected[how]


async def test_a_long_list_in_its_order(node: aiogpu.types.Node) -> None:
    assert await kin_tasks.plain_sum.remote(300) == sum(range(1, 301))


@pytest.mark.parametrize("kind", ["plain", "soft", "mixed"])
async def test_a_deep_recursion(kind: str, node: aiogpu.types.Node) -> None:
    assert await getattr(kin_tasks, f"{kind}_depth").remote(20) == 20
    await tasks.add.remote(1)
    all_of_it = {"CPU": 2.0, "GPU": 1.0}
    # A cluster tells a moment later.
    while not all_of_it.items() <= (await aiogpu.available_resources()).items():
        await asyncio.sleep(0)


async def test_the_same_function_in_the_program_and_in_a_task(
    node: aiogpu.types.Node,
) -> None:
    """Whoever calls it first."""
    first = tasks.add.options(name="first in a task")
    second = tasks.add.options(name="first in the program")

    @aiogpu.remote
    def call_both() -> list[int]:
        return aiogpu.get([first.remote(1), second.remote(2)])

    assert await second.remote(3) == 4
    assert await call_both.remote() == [2, 3]
    assert await asyncio.gather(first.remote(5), second.remote(6)) == [6, 7]
    assert await call_both.remote() == [2, 3]


@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_errors_of_children(kind: str, node: aiogpu.types.Node) -> None:
    catches = getattr(kin_tasks, f"{kind}_catches")
    assert await catches.remote("fail", LookupError, "x") == ("LookupError", "x")
    name, text = await catches.remote("fail", SystemExit, 3)
    assert (name, "SystemExit: 3" in text) == ("TaskError", True)
    name, text = await catches.remote("unpicklable")
    assert (name, "lock" in text) == ("SerializationError", True)
    name, text = await catches.remote("unreadable", "1 / 0")
    assert (name, "division" in text) == ("DeserializationError", True)
    name, text = await catches.remote("add", 1, num_gpus=2)
    assert (name, "GPU 2 of 1" in text) == ("InfeasibleError", True)
    name, text = await catches.remote("fail_until", "/dev/null", 1, LookupError)
    assert name == "LookupError"


async def test_a_childs_error_is_its_parents(node: aiogpu.types.Node) -> None:
    with pytest.raises(LookupError, match="of the child") as caught:
        await kin_tasks.plain_fails_by_child.remote()
    assert "raise kind(*args)" in str(caught.value.__cause__)


async def test_an_error_may_be_seen_twice(node: aiogpu.types.Node) -> None:
    again = ("LookupError", "again")
    assert await kin_tasks.same_failure_twice.remote() == [again, again]
    first, second = await kin_tasks.unreadable_twice.remote()
    assert first == second
    assert first[0] == "DeserializationError"


async def test_the_first_failure_ends_the_wait(node: aiogpu.types.Node) -> None:
    name, _ = await kin_tasks.fails_before_others_end.remote()
    assert name in ("LookupError", "TaskCancelledError")


async def test_a_wait_out_of_time(node: aiogpu.types.Node, gate: Gate) -> None:
    failures, is_done = await kin_tasks.plain_times_out.remote(gate.path)
    said = (
        "1 of 1 tasks did not end within the {} s of aiogpu.get(), say_and_wait for "
        "one; they go on"
    )
    for (name, text), seconds in zip(failures, ["0.05", "0.01"], strict=True):
        assert (name, said.format(seconds) in text) == ("TaskTimeoutError", True)
    assert not is_done
    await gate.entered("child", "child-ended")


async def test_what_was_waited_for_goes_on(
    node: aiogpu.types.Node,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        assert await kin_tasks.plain_resumes.remote(f"{place}/s") == (False, "child")


async def test_cancelled_children(node: aiogpu.types.Node, gate: Gate) -> None:
    failures = await kin_tasks.plain_cancels.remote(gate.path)
    assert [name for name, _ in failures] == ["TaskCancelledError"] * 2
    assert failures[0][1] == "add was cancelled."
    await gate.entered("child-ended")


@pytest.mark.needs("deadlocks")
async def test_waits_that_can_never_end(node: aiogpu.types.Node) -> None:
    failures = await kin_tasks.plain_greedy.remote()
    assert [name for name, _ in failures] == ["DeadlockError"] * 3
    assert failures[0][1] == (
        "add asks for {CPU: 1, GPU: 1}, and those that wait hold it: plain_greedy "
        "holds {CPU: 1, GPU: 1} and waits for add. The wait could never end. Let the "
        "one that waits ask for less, or end before it starts the other."
    )
    assert await kin_tasks.soft_greedy.remote() == ["DeadlockError"] * 2
    name, text = await kin_tasks.grandparent_greedy.remote()
    assert name == "DeadlockError"
    assert "grandparent_greedy holds {CPU: 1, GPU: 1} and waits for middle" in text
    assert "middle holds {CPU: 1} and waits for add" in text
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_what_nobody_waits_for_is_no_deadlock(
    kind: str, node: aiogpu.types.Node
) -> None:
    assert await getattr(kin_tasks, f"{kind}_starts_greedy").remote() == 2
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_children_end_with_their_parent(
    kind: str, node: aiogpu.types.Node, gate: Gate
) -> None:
    """The one that runs, and the one that may not have begun."""
    handle = getattr(kin_tasks, f"{kind}_leaves").remote(gate.path)
    if kind == "soft":
        await gate.entered("parent", "child")
        gate.release("parent")
    assert await handle == "left"
    await gate.entered("child", "child-ended")
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("kind", ["plain", "soft"])
@pytest.mark.needs("interrupts")
async def test_cancelling_a_parent(
    kind: str, node: aiogpu.types.Node, gate: Gate
) -> None:
    handle = getattr(kin_tasks, f"{kind}_waits").remote(gate.path)
    await gate.entered("child")
    handle.cancel()
    await gate.entered("child-ended")
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_a_parents_timeout_ends_its_child(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    await kin_tasks.soft_sum.remote(1)  # so that workers have imported asyncio
    timeout = 0.25
    while "child" not in gate.pids:
        with pytest.raises(aiogpu.TaskTimeoutError):
            await kin_tasks.soft_waits.options(timeout=timeout).remote(gate.path)
        timeout *= 2  # if it came before the child's first word
    await gate.entered("child-ended")
    assert await tasks.add.remote(1) == 2


async def test_misuse_is_told(node: aiogpu.types.Node) -> None:
    told = await kin_tasks.misuses.remote()
    expected = [
        ("MisuseError", "no truth value"),
        ("MisuseError", "write `await handle`"),
        ("MisuseError", "wait by aiogpu.get(handle)"),
        ("MisuseError", "was given 1"),
        ("OptionError", "timeout=0"),
        ("MisuseError", "Await it, and pickle the value"),
    ]
    assert len(told) == len(expected)
    for (name, text), (error, words) in zip(told, expected, strict=True):
        assert (name, words in text) == (error, True), text


async def test_a_handle_of_a_task_that_has_ended(address: str) -> None:
    async with asyncio.timeout(60), aiogpu.init(address=address, num_cpus=1):
        await kin_tasks.keeps.remote()
        name, _ = await kin_tasks.gets_kept.remote()
    assert name in ("MisuseError", "TaskCancelledError")


async def test_a_parent_finds_its_surroundings_again(node: aiogpu.types.Node) -> None:
    own = ("facts", [])
    assert await kin_tasks.facts.remote() == (own, ("child", [0], "0"), own)
