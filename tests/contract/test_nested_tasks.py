"""Tasks that start tasks: waits, errors, resources, and the end of children."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu import errors
from aiogpu.types import Node
from tests.contract import nested_tasks, tasks
from tests.contract.actor_classes import Counter
from tests.contract.nested_tasks import LostError, await_here, refusal, run_here
from tests.support.errors import raises
from tests.support.gate import Gate, pass_gate
from tests.support.waits import until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2, num_gpus=1, cancel_grace=20),
]


@pytest.fixture
async def local() -> AsyncIterator[Node]:
    """A node of the local engine with three CPUs."""
    async with aiogpu.init(num_cpus=3, num_gpus=1) as session:
        yield session


async def test_tasks_wait_for_their_children(node: Node) -> None:
    assert await nested_tasks.plain_sum.remote(300) == sum(range(1, 301))
    assert await nested_tasks.soft_sum.remote(5) == 20
    for _ in range(2):
        assert await nested_tasks.sum_on_own_loop.remote(5) == 21


async def test_a_deep_recursion_runs_on_one_cpu(address: str) -> None:
    """Each level lends the CPU to the next."""
    async with asyncio.timeout(60), aiogpu.init(address=address, num_cpus=1):
        assert await nested_tasks.mixed_depth.remote(20) == 20
        await tasks.add.remote(1)
        await until_free(CPU=1)


async def test_program_and_task_call_the_same_function(node: Node) -> None:
    """In either order."""
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
async def test_errors_of_children_reach_the_parent(kind: str, node: Node) -> None:
    catches = getattr(nested_tasks, f"{kind}_catches")
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


async def test_a_parent_gets_an_error_of_a_child_twice(node: Node) -> None:
    with pytest.raises(LookupError, match="of the child") as caught:
        await nested_tasks.plain_fails_by_child.remote()
    assert "raise kind(*args)" in str(caught.value.__cause__)
    again = ("LookupError", "again")
    assert await nested_tasks.same_failure_twice.remote() == [again, again]
    first, second = await nested_tasks.unreadable_twice.remote()
    assert first == second
    assert first[0] == "DeserializationError"


async def test_a_timeout_of_a_wait_leaves_the_child(node: Node, gate: Gate) -> None:
    failures, is_done = await nested_tasks.plain_times_out.remote(gate.path)
    said = "say_and_wait did not end within {} s; it goes on"
    for (name, text), seconds in zip(failures, ["0.05", "0.01"], strict=True):
        assert (name, said.format(seconds) in text) == ("TaskTimeoutError", True)
    assert not is_done
    await gate.entered("child", "child-ended")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        resumed = await nested_tasks.plain_resumes.remote(f"{place}/s")
        assert resumed == (False, "child")


async def test_a_parent_cancels_children(node: Node, gate: Gate) -> None:
    failures = await nested_tasks.plain_cancels.remote(gate.path)
    assert [name for name, _ in failures] == ["TaskCancelledError"] * 2
    assert failures[0][1] == "add was cancelled."
    await gate.entered("child-ended")


@pytest.mark.needs("waiting for resources")
@pytest.mark.needs("deadlocks")
async def test_a_wait_that_can_never_end_fails(node: Node) -> None:
    failures = await nested_tasks.plain_greedy.remote()
    assert [name for name, _ in failures] == ["DeadlockError"] * 3
    assert failures[0][1] == (
        "add asks for {CPU: 1, GPU: 1}, which waiting tasks hold: plain_greedy "
        "holds {CPU: 1, GPU: 1} and waits for add. The wait could never end. Let the "
        "waiting task ask for less, or end before it starts the other task."
    )
    assert await nested_tasks.soft_greedy.remote() == ["DeadlockError"] * 2
    name, text = await nested_tasks.grandparent_greedy.remote()
    assert name == "DeadlockError"
    assert "grandparent_greedy holds {CPU: 1, GPU: 1} and waits for middle" in text
    assert "middle holds {CPU: 1} and waits for add" in text
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.needs("waiting for resources")
@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_a_child_without_a_waiter_is_no_deadlock(kind: str, node: Node) -> None:
    assert await getattr(nested_tasks, f"{kind}_starts_greedy").remote() == 2
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_children_end_with_a_parent(kind: str, node: Node, gate: Gate) -> None:
    """A child that runs, and a child that may not have begun."""
    handle = getattr(nested_tasks, f"{kind}_leaves").remote(gate.path)
    if kind == "soft":
        await gate.entered("parent", "child")
        gate.release("parent")
    assert await handle == "left"
    await gate.entered("child", "child-ended")
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.parametrize("kind", ["plain", "soft"])
@pytest.mark.needs("interrupts")
async def test_cancel_of_a_parent_ends_its_child(
    kind: str, node: Node, gate: Gate
) -> None:
    handle = getattr(nested_tasks, f"{kind}_waits").remote(gate.path)
    await gate.entered("child")
    handle.cancel()
    await gate.entered("child-ended")
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


async def test_a_parents_timeout_ends_its_child(node: Node, gate: Gate) -> None:
    await nested_tasks.soft_sum.remote(1)  # so that workers have imported asyncio
    timeout = 0.25
    while "child" not in gate.pids:
        with pytest.raises(errors.TaskTimeoutError):
            await nested_tasks.soft_waits.options(timeout=timeout).remote(gate.path)
        timeout *= 2  # the timeout may come before the child says that it runs
    await gate.entered("child-ended")
    assert await tasks.add.remote(1) == 2


async def test_misuse_in_a_task_raises(node: Node) -> None:
    told = await nested_tasks.misuses.remote()
    expected = [
        ("MisuseError", "no truth value"),
        ("MisuseError", "write `await handle`"),
        ("MisuseError", "call aiogpu.get(handle) instead"),
        ("MisuseError", "list of handles, not 1"),
        ("OptionError", "timeout=-1"),
        ("MisuseError", "Await it, and pickle the value"),
    ]
    assert len(told) == len(expected)
    for (name, text), (error, words) in zip(told, expected, strict=True):
        assert (name, words in text) == (error, True), text


async def test_a_handle_of_an_ended_task_is_refused(address: str) -> None:
    async with asyncio.timeout(60), aiogpu.init(address=address, num_cpus=1):
        await nested_tasks.keeps.remote()
        name, _ = await nested_tasks.gets_kept.remote()
    assert name in ("MisuseError", "TaskCancelledError")


async def test_a_parent_keeps_its_context_over_a_wait(node: Node) -> None:
    own = ("facts", [])
    assert await nested_tasks.facts.remote() == (own, ("child", [0], "0"), own)


async def test_functions_defined_inside_a_task_run_remotely(local: Node) -> None:
    def work() -> list[Any]:
        base = 40

        @aiogpu.remote
        def closure(x: int) -> int:
            return base + x

        @aiogpu.remote
        async def coroutine(x: int) -> int:
            await asyncio.sleep(0)
            return plainly(x)

        def plainly(x: int) -> int:
            return base - x

        anonymous = aiogpu.remote(lambda x: x * base)
        env = {"env_vars": {"NEST": "1"}}
        variable = tasks.environment.options(runtime_env=env).remote("NEST")
        handles = [f.remote(2) for f in (closure, coroutine, anonymous)]
        return aiogpu.get([*handles, variable])

    for _ in range(2):
        assert await run_here.remote(work) == [42, 38, 80, {"NEST": "1"}]


async def test_errors_keep_their_type_through_levels(local: Node) -> None:
    error = await raises(LostError, lambda: nested_tasks.raise_below.remote(2))
    assert error.code == 7
    trace = str(error.__cause__)
    assert "in raise_below" in trace
    assert trace.count("LostError: 7") >= 2, trace


async def test_the_first_failure_ends_a_wait(local: Node, gate: Gate) -> None:
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
    await gate.let_pass("caught", "slow")
    assert await handle == ["KeyError: 1", "KeyError: 2", "slow"]


async def test_a_task_returns_a_handle(local: Node) -> None:
    """The child of the handle runs on."""
    handle = await run_here.remote(lambda: tasks.add.remote(1))
    assert await handle == 2


async def test_get_is_refused_outside_plain_tasks(local: Node) -> None:
    handle = tasks.add.remote(1)
    with pytest.raises(errors.MisuseError, match="await"):
        aiogpu.get(handle)
    told = await asyncio.to_thread(refusal, lambda: aiogpu.get(handle))
    assert "this handle belongs to an event loop: write `await handle` there" in told
    assert await handle == 2

    async def block() -> str:
        child = tasks.add.remote(1)
        told = refusal(lambda: aiogpu.get(child))
        assert await child == 2
        return told

    assert "would block the event loop" in await await_here.remote(block)


def test_get_without_a_node_takes_an_empty_list() -> None:
    assert aiogpu.get([]) == []
    with pytest.raises(errors.MisuseError, match="list of handles, not 1"):
        aiogpu.get(1)  # type: ignore[call-overload]


async def test_a_fork_of_a_task_cannot_start_tasks(local: Node) -> None:
    """Of a function that the task has called before, and of another."""

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
    assert "the node is not available inside a task or in a process that" in told


async def test_a_coroutine_waits_in_each_way(local: Node) -> None:
    async def work() -> list[Any]:
        many = await asyncio.gather(*(tasks.add.remote(n) for n in range(2000)))
        async with asyncio.TaskGroup() as group:
            inside = [group.create_task(tasks.add.remote(n).coro()) for n in range(3)]
        handles = [tasks.add.remote(n) for n in range(5)]
        found = [await done for done in asyncio.as_completed(handles)]
        done, pending = await asyncio.wait([tasks.add.remote(20)])
        assert (done.pop().result(), pending) == (21, set())
        return [
            sum(many),
            [task.result() for task in inside],
            sorted(found),
            await asyncio.wait_for(tasks.add.remote(10), 60),
            await asyncio.shield(tasks.add.remote(30)),
            [await handles[0], await handles[0]],
        ]

    told = [2001000, [1, 2, 3], [1, 2, 3, 4, 5], 11, 31, [1, 1]]
    assert await await_here.remote(work) == told


async def test_threads_of_a_plain_task_start_tasks(local: Node) -> None:
    def work() -> list[int]:
        def one(number: int) -> int:
            doubled = aiogpu.get(tasks.add.remote(number, number))
            return aiogpu.get(tasks.add.remote(doubled))

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(one, range(40)))
        return [*found, aiogpu.get(tasks.add.remote(1))]

    assert await run_here.remote(work) == [*(2 * n + 1 for n in range(40)), 2]


async def test_loops_in_threads_start_tasks(local: Node) -> None:
    async def some(count: int) -> int:
        found = 0
        for number in range(count):
            found += await tasks.add.remote(number, 0)
        return found

    async def work() -> list[int]:
        own = asyncio.create_task(some(30))
        threads = [asyncio.to_thread(asyncio.run, some(30)) for _ in range(3)]
        plain = asyncio.to_thread(lambda: aiogpu.get(tasks.add.remote(0, 435)))
        return list(await asyncio.gather(own, *threads, plain))

    assert await await_here.remote(work) == [435] * 5

    def plainly() -> list[int]:
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(asyncio.run(some(30))))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        found.append(sum(aiogpu.get([tasks.add.remote(n, 0) for n in range(30)])))
        for thread in threads:
            thread.join()
        return found

    assert await run_here.remote(plainly) == [435] * 4


async def test_a_cancel_passes_a_waiting_thread(local: Node, gate: Gate) -> None:
    """The thread may read the cancel that is for the task's loop."""
    path = gate.path

    async def work() -> None:
        def wait() -> None:
            refusal(lambda: aiogpu.get(tasks.gated.remote(path, "child")))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.to_thread(pass_gate, path, "heard")
            raise

    handle = await_here.remote(work)
    await gate.entered("child")
    handle.cancel()
    await gate.let_pass("heard")
    assert await tasks.add.remote(1) == 2


async def test_a_thread_that_outlives_its_task_fails(local: Node, gate: Gate) -> None:
    pid = await nested_tasks.outlive.remote(gate.path)
    await gate.entered("TaskCancelledError", "MisuseError")
    assert gate.pids["MisuseError"] == pid
    assert await nested_tasks.several.remote([1]) == [2]


async def free() -> tuple[float, float]:
    resources = await aiogpu.available_resources()
    return resources["CPU"], resources["GPU"]


async def test_a_waiting_task_lends_its_cpus_and_keeps_its_gpus(gate: Gate) -> None:
    path = gate.path

    def work() -> str:
        child = tasks.gated.options(num_cpus=2).remote(path, "child")
        pass_gate(path, "parent")
        return aiogpu.get(child)

    async def soft() -> str:
        child = tasks.gated.options(num_cpus=2).remote(path, "child")
        await asyncio.to_thread(pass_gate, path, "parent")
        return await child

    async with aiogpu.init(num_cpus=3, num_gpus=2):
        for way, function in ((run_here, work), (await_here, soft)):
            parent = way.options(num_cpus=2, num_gpus=0.5)
            handle = parent.remote(function)  # type: ignore[arg-type]
            await gate.entered("parent")
            assert await free() == (1, 1.5)
            assert "child" not in gate.inside
            gate.release("parent")
            await gate.entered("child")
            assert await free() == (1, 1.5), "the child has what its parent had"
            gate.release("child")
            assert await handle == "child"
            await until_free(CPU=3, GPU=2)  # the process has ended
            gate.forget("parent", "child")


async def test_a_task_takes_its_cpus_back_after_a_timeout(gate: Gate) -> None:
    path = gate.path

    def work() -> str:
        child = tasks.gated.remote(path, "child")
        told = refusal(lambda: aiogpu.get(child, timeout=1e-3))
        pass_gate(path, "parent")
        assert aiogpu.get(child) == "child"
        return told

    async with aiogpu.init(num_cpus=2, num_gpus=0):
        handle = run_here.remote(work)
        await gate.entered("child", "parent")
        assert (await aiogpu.available_resources())["CPU"] == 0
        gate.release("child", "parent")
        assert (await handle).startswith("TaskTimeoutError")


async def test_two_trees_that_wait_for_each_others_gpu_get_an_error(gate: Gate) -> None:
    """One tree gets the error; the other's child runs when the first has ended."""
    async with aiogpu.init(num_cpus=4, num_gpus=2):
        tree = nested_tasks.try_gpu_child.options(num_gpus=1)
        trees = [tree.remote(1, gate.path) for _ in range(2)]
        await gate.let_pass("tree-0", "tree-1")
        told = sorted(told.split(":")[0] for told, _ in await asyncio.gather(*trees))
        assert told == ["DeadlockError", "nothing was raised"]


async def test_a_thread_that_waits_for_its_tasks_gpu_gets_an_error(gate: Gate) -> None:
    """The wait of one thread does not hide that of another."""
    path = gate.path

    def work() -> list[str]:
        from concurrent.futures import ThreadPoolExecutor

        gpu = tasks.add.options(num_gpus=1)
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(refusal, lambda: aiogpu.get(gpu.remote(1)))
            two = threads.submit(aiogpu.get, tasks.gated.remote(path, "other"))
            told = one.result()
            pass_gate(path, "told")
            return [told.split(":")[0], two.result()]

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        handle = run_here.options(num_gpus=1).remote(work)
        await gate.let_pass("other", "told")
        assert await handle == ["DeadlockError", "other"]


async def test_children_are_retried(tmp_path: Path) -> None:
    place = tmp_path / "counts"
    place.mkdir()

    def work() -> list[Any]:
        raising = tasks.fail_until.options(retry_exceptions=[LostError], max_retries=2)
        dying = tasks.die_until.options(max_retries=1)
        found = aiogpu.get(
            [raising.remote(f"{place}/a", 2, LostError), dying.remote(f"{place}/b", 1)]
        )
        told = [
            refusal(lambda: aiogpu.get(raising.remote(f"{place}/c", 3, LostError))),
            refusal(lambda: aiogpu.get(dying.remote(f"{place}/d", 2))),
        ]
        return [*found, *(one.split("(")[0] for one in told)]

    async with aiogpu.init(num_cpus=2):
        raised = "LostError: attempt 3"
        died = "WorkerDiedError: the worker that ran die_until "
        assert await run_here.remote(work) == [3, 2, raised, died]


ONLY_THERE = """
class HiddenError(Exception):
    pass

def fail(path):
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        if len(file.read()) < 3:
            raise HiddenError
    return "at last"
"""


async def test_a_class_of_a_worker_alone_is_sent_by_value(tmp_path: Path) -> None:
    """An import in another process would not find its module."""
    (tmp_path / "only_there.py").write_text(ONLY_THERE)
    count = str(tmp_path / "count")

    def work() -> str:
        sys.path.insert(0, str(tmp_path))
        try:
            import only_there  # type: ignore[import-not-found]
        finally:
            del sys.path[0]
        task = aiogpu.remote(only_there.fail)
        retried = task.options(retry_exceptions=[only_there.HiddenError])
        handle = retried.options(runtime_env={"env_vars": {}}).remote(count)
        return str(aiogpu.get(handle))

    async with aiogpu.init(num_cpus=1):
        assert await run_here.remote(work) == "at last"
    assert Path(count).read_text() == "xxx", "it was retried twice"


async def test_children_end_with_a_killed_parent(local: Node, gate: Gate) -> None:
    path = gate.path

    def sibling(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    tree = nested_tasks.tree.options(max_retries=0)
    handle = tree.remote(path, "t", 2)
    await gate.entered("t")
    await aiogpu.remote(sibling).remote(gate.pids["t2"])
    await raises(errors.WorkerDiedError, handle, match=r"tree .* signal 9")
    await until_free()
    assert "t" in gate.inside


async def test_a_retried_parent_starts_its_children_again(
    local: Node, gate: Gate, tmp_path: Path
) -> None:
    task = nested_tasks.start_anew.options(max_retries=1)
    handle = task.remote(str(tmp_path / "count"), gate.path)
    await gate.entered("parent1", "child1")
    gate.release("parent1")
    await gate.let_pass("parent2", "child2")
    assert await handle == 2 + len("child2")
    await until_free()
    assert "child1" in gate.inside, "the first one was stopped"


@pytest.mark.parametrize("how", ["returns", "dies", "cancelled"])
async def test_a_detached_child_outlives_its_parent(
    how: str, local: Node, gate: Gate
) -> None:
    path = gate.path

    def work() -> None:
        tasks.gated.options(lifetime="detached").remote(path, "detached")
        tasks.gated.remote(path, "child")
        pass_gate(path, "parent")
        if how == "dies":
            os._exit(1)

    handle = run_here.options(max_retries=0, num_gpus=1).remote(work)
    await gate.entered("parent", "detached", "child")
    if how == "cancelled":
        handle.cancel()
    else:
        gate.release("parent")
        await asyncio.wait([handle])
        handle.exception()
    await until_free(CPU=2)
    detached = psutil.Process(gate.pids["detached"])
    assert detached.is_running()
    (running,) = (await aiogpu.status()).tasks
    assert running.name == "gated"
    gate.release("detached")
    await until_free()


async def test_a_parent_controls_detached_children(local: Node, gate: Gate) -> None:
    path = gate.path

    def work() -> int:
        add = tasks.add.options(lifetime="detached")
        child = tasks.gated_coroutine.options(lifetime="detached").remote(path, "a")
        pass_gate(path, "parent")
        child.cancel()
        return aiogpu.get(add.remote(1))

    handle = run_here.remote(work)
    await gate.entered("a", "parent")
    gate.release("parent")
    assert await handle == 2
    await gate.entered("a-cancelled")
    await until_free()


@pytest.mark.parametrize("lifetime", [None, "detached"])
async def test_a_closing_node_ends_a_deep_tree(
    lifetime: str | None, gate: Gate
) -> None:
    async with aiogpu.init(num_cpus=2):
        tree = nested_tasks.tree.options(lifetime=lifetime)  # type: ignore[typeddict-item]
        handle = tree.remote(gate.path, "t", 8)
        await gate.entered("t")
        pids = set(gate.pids.values())
        assert len(pids) == 9
    await raises(errors.NodeClosedError, handle)
    assert not any(map(psutil.pid_exists, pids))


async def test_output_of_children_comes_before_the_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=2):
        await nested_tasks.said_below.remote("a")
        out = capsys.readouterr().out
        said = re.findall(r"\((\w+) pid=\d+\) (.*)", out)
        assert said == [
            ("said_below", "a begins"),
            *(("output", f"a {number}") for number in range(3)),
            ("said_below", "a ends"),
        ]
        handles = [nested_tasks.said_below.remote(name) for name in "bcdefg"]
        for name, handle in zip("bcdefg", handles, strict=True):
            await handle
            out += capsys.readouterr().out
            assert len(re.findall(rf"\) {name} ", out)) == 5


async def fail_beside(path: str) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(tasks.gated.remote(path, "beside").coro())
        group.create_task(tasks.fail.remote(KeyError).coro())


async def test_a_coroutine_stops_children_in_each_way(gate: Gate) -> None:
    path = gate.path

    async def work() -> list[str]:
        told = []
        with pytest.raises(LostError) as caught:
            await nested_tasks.raise_below.remote(1)
        told.append(str(caught.value.__cause__).count("LostError") > 1)
        one = tasks.gated_coroutine.remote(path, "cancelled")
        pass_gate(path, "first")
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await tasks.gated_coroutine.remote(path, "late")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tasks.gated.remote(path, "too"), 0.001)
        with pytest.raises(ExceptionGroup):
            await fail_beside(path)
        told.append(await tasks.add.remote(1))
        return told

    async with aiogpu.init(num_cpus=2):
        handle = await_here.remote(work)
        await gate.entered("cancelled", "first")
        gate.release("first")
        await gate.entered("cancelled-cancelled")
        assert await handle == [True, 2]


@pytest.mark.parametrize("address", ["local", "node"], indirect=True)
@pytest.mark.parametrize("is_actor", [False, True], ids=["task", "actor"])
async def test_endless_children_let_other_calls_of_their_program_run(
    address: str, is_actor: bool
) -> None:
    """Own calls, other shapes, shares of GPUs, actors, and all CPUs."""
    options = {"num_cpus": 2, "num_gpus": 1, "cancel_grace": 20}
    async with asyncio.timeout(60):
        async with aiogpu.init(address=address, **options), Gate.open() as gate:
            actor = nested_tasks.Pump.remote() if is_actor else None
            start = actor.run if actor else nested_tasks.pump
            pump = start.remote(gate.path, 48)
            await gate.entered("pump")
            add, counter = tasks.add, Counter.remote()
            own = [add.remote(number) for number in range(50)]
            others = [
                add.options(num_cpus=2).remote(1),
                add.options(num_gpus=0.5, max_calls=0).remote(2),
                add.options(num_gpus=1).remote(3),
                add.options(runtime_env={"env_vars": {"A": "b"}}).remote(4),
            ]
            assert await asyncio.gather(*own) == [*range(1, 51)]
            assert await asyncio.gather(*others) == [2, 3, 4, 5]
            await counter.add.remote(1)
            assert not pump.done()
            pump.cancel()
            if actor is not None:
                aiogpu.kill(actor)
