"""[B12] What tasks of tasks are given, and waits that could never end."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import nested_tasks, tasks
from tests.contract.nested_tasks import await_here, refusal, run_here
from tests.support.gate import Gate, pass_gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


async def free() -> tuple[float, float]:
    resources = await aiogpu.available_resources()
    return resources["CPU"], resources["GPU"]


async def test_who_waits_gives_back_cpus_and_keeps_gpus(gate: Gate) -> None:
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
            async with asyncio.timeout(60):
                while await free() != (3, 2):  # until its process has ended
                    await asyncio.sleep(0)
            gate.forget("parent", "child")


async def test_a_wait_that_is_given_up_takes_the_cpus_again(gate: Gate) -> None:
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


async def test_children_have_gpus_of_their_own() -> None:
    def work() -> list[Any]:
        half = tasks.where.options(num_gpus=0.5)
        shared = [half.remote() for _ in range(2)]
        whole = tasks.where.options(num_gpus=1, max_calls=0).remote()
        mine = aiogpu.get_gpu_ids()
        return [mine, *(told["visible"] for told in aiogpu.get([*shared, whole]))]

    async with aiogpu.init(num_cpus=2, num_gpus=3):
        mine, *others = await run_here.options(num_gpus=1).remote(work)
        assert mine == [0]
        assert others == ["1", "1", "2"]


async def test_each_child_in_a_process_of_its_own() -> None:
    async def work() -> list[int]:
        pid = tasks.pid.options(max_calls=1)
        return await asyncio.gather(*(pid.remote() for _ in range(5)))

    async with aiogpu.init(num_cpus=2):
        assert len(set(await await_here.remote(work))) == 5


async def test_more_than_there_is() -> None:
    def plain() -> str:
        handle = tasks.add.options(num_gpus=2).remote(1)
        return refusal(lambda: aiogpu.get(handle))

    async def soft() -> str:
        with pytest.raises(aiogpu.InfeasibleError) as caught:
            await tasks.add.options(resources={"license": 1}).remote(1)
        return str(caught.value)

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        for _ in range(2):
            told = await run_here.remote(plain)
            assert told.startswith("InfeasibleError: add asks for {CPU: 1, GPU: 2}")
            assert "this node can never give" in await await_here.remote(soft)


@pytest.mark.parametrize("needs", [1, 0.75])
async def test_a_child_that_needs_what_its_parent_holds(needs: float) -> None:
    async with aiogpu.init(num_cpus=2, num_gpus=1):
        parent = nested_tasks.try_gpu_child.options(num_gpus=0.5, name="parent")
        told, after = await parent.remote(needs)
        assert told.startswith("DeadlockError: child asks for {CPU: 1, GPU: ")
        assert "parent holds {CPU: 1, GPU: 0.5} and waits for child" in told
        assert after == 41
        told, _ = await parent.remote(0.5)
        assert told == "nothing was raised"


async def test_a_chain_between_the_holder_and_the_child() -> None:
    def middle() -> Any:
        return aiogpu.get(tasks.add.options(num_gpus=1, name="lowest").remote(1))

    def top() -> Any:
        return aiogpu.get(run_here.options(name="middle").remote(middle))

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        with pytest.raises(aiogpu.errors.DeadlockError) as caught:
            await run_here.options(num_gpus=1, name="top").remote(top)
        told = str(caught.value)
        assert "top holds {CPU: 1, GPU: 1} and waits for middle" in told
        assert "middle holds {CPU: 1} and waits for lowest" in told


async def test_a_coroutine_goes_on_after_a_deadlock() -> None:
    async def work() -> list[str]:
        gpu = tasks.add.options(num_gpus=1)
        found = await asyncio.gather(
            gpu.remote(1), tasks.add.remote(1), gpu.remote(2), return_exceptions=True
        )
        return [type(one).__name__ for one in found]

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        told = await await_here.options(num_gpus=1).remote(work)
        assert told == ["DeadlockError", "int", "DeadlockError"]


async def test_two_trees_that_hold_each_others_gpu(gate: Gate) -> None:
    """One of them is told; the other one's child runs once the first has ended."""
    async with aiogpu.init(num_cpus=4, num_gpus=2):
        tree = nested_tasks.try_gpu_child.options(num_gpus=1)
        trees = [tree.remote(1, gate.path) for _ in range(2)]
        await gate.entered("tree-0", "tree-1")
        gate.release("tree-0", "tree-1")
        told = sorted(told.split(":")[0] for told, _ in await asyncio.gather(*trees))
        assert told == ["DeadlockError", "nothing was raised"]


async def test_a_thread_waits_for_what_its_task_holds(gate: Gate) -> None:
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
        await gate.entered("other", "told")
        gate.release("other", "told")
        assert await handle == ["DeadlockError", "other"]


async def test_retries_of_children(tmp_path: Path) -> None:
    place = tmp_path / "counts"
    place.mkdir()

    def work() -> list[Any]:
        raising = nested_tasks.fail_until.options(
            retry_exceptions=[nested_tasks.LostError], max_retries=2
        )
        dying = tasks.die_until.options(max_retries=1)
        found = aiogpu.get(
            [raising.remote(f"{place}/a", 2), dying.remote(f"{place}/b", 1)]
        )
        told = [
            refusal(lambda: aiogpu.get(raising.remote(f"{place}/c", 3))),
            refusal(lambda: aiogpu.get(dying.remote(f"{place}/d", 2))),
        ]
        return [*found, *(one.split("(")[0] for one in told)]

    async with aiogpu.init(num_cpus=2):
        raised = "LostError: 3"
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


async def test_a_retry_class_that_only_workers_can_import(tmp_path: Path) -> None:
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
        return refusal(lambda: aiogpu.get(handle))

    async with aiogpu.init(num_cpus=1):
        told = await run_here.remote(work)
    assert told.startswith("DeserializationError")
    assert "HiddenError" in told or "only_there" in told
    assert not os.path.exists(count), "it is told before anything runs"
