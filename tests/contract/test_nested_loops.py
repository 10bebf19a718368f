"""[B12] Tasks with an event loop: awaiting children, on any loop and in any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import aiogpu
from tests.contract import nested_tasks, tasks
from tests.contract.nested_tasks import LostError, await_here, refusal, run_here
from tests.support.gate import Gate, pass_gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
]


@pytest.fixture
async def node() -> AsyncIterator[aiogpu.types.Node]:
    async with aiogpu.init(num_cpus=2) as session:
        yield session


async def test_the_ways_to_wait(node: aiogpu.types.Node) -> None:
    async def work() -> list[Any]:
        one = await tasks.add.remote(1)
        many = await asyncio.gather(*(tasks.double.remote(n) for n in range(50)))
        async with asyncio.TaskGroup() as group:
            inside = [group.create_task(tasks.add.remote(n).coro()) for n in range(3)]
        handles = [tasks.add.remote(n) for n in range(5)]
        found = [await done for done in asyncio.as_completed(handles)]
        limited = await asyncio.wait_for(tasks.add.remote(10), 60)
        done, pending = await asyncio.wait([tasks.add.remote(20)])
        shielded = await asyncio.shield(tasks.add.remote(30))
        mapped = [x async for x in tasks.double.map(range(20), limit=3)]
        again = handles[0]
        return [
            one,
            many,
            [task.result() for task in inside],
            sorted(found),
            limited,
            [handle.result() for handle in done],
            len(pending),
            shielded,
            mapped,
            [await again, await again],
        ]

    told = [2, [2 * n for n in range(50)], [1, 2, 3], [1, 2, 3, 4, 5], 11, [21], 0, 31]
    told += [[2 * n for n in range(20)], [1, 1]]
    assert await await_here.remote(work) == told


async def fail_beside(path: str) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(tasks.gated.remote(path, "beside").coro())
        group.create_task(tasks.fail.remote(KeyError).coro())


async def test_errors_and_the_ways_to_stop(node: aiogpu.types.Node, gate: Gate) -> None:
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

    handle = await_here.remote(work)
    await gate.entered("cancelled", "first")
    gate.release("first")
    await gate.entered("cancelled-cancelled")
    assert await handle == [True, 2]


async def test_a_cancelled_parent_cancels_its_wait(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    path = gate.path

    async def work() -> None:
        try:
            await tasks.gated_coroutine.remote(path, "child")
        except asyncio.CancelledError:
            await asyncio.to_thread(pass_gate, path, "parent")
            raise

    handle = await_here.remote(work)
    await gate.entered("child")
    handle.cancel()
    await gate.entered("child-cancelled", "parent")
    gate.release("parent")
    assert await tasks.add.remote(1) == 2


async def test_a_loop_of_the_tasks_own(node: aiogpu.types.Node) -> None:
    def work() -> list[int]:
        async def main(base: int) -> int:
            assert await tasks.add.remote(1) == 2
            handles = (tasks.add.remote(base, n) for n in range(5))
            return sum(await asyncio.gather(*handles))

        before = aiogpu.get(tasks.add.remote(1))
        one, two = asyncio.run(main(0)), asyncio.run(main(1))
        return [before, one, two, aiogpu.get(tasks.add.remote(1)), aiogpu.run(main(2))]

    for _ in range(2):
        assert await run_here.remote(work) == [2, 10, 15, 2, 20]


async def test_a_handle_that_is_kept_between_tasks(node: aiogpu.types.Node) -> None:
    """A plain task's; a coroutine's; one's on a loop that is kept as well."""
    kept: dict[str, Any] = {}

    def plain() -> str:
        if not kept:
            kept["handle"] = nested_tasks.wait_for_ever.remote()
            return ""
        return refusal(lambda: aiogpu.get(kept["handle"]))

    async def soft() -> str:
        assert await tasks.add.remote(1) == 2
        if "handle" not in kept:
            kept["handle"] = nested_tasks.wait_for_ever.remote()
            return ""
        with pytest.raises(aiogpu.TaskCancelledError) as caught:
            await kept["handle"]
        return str(caught.value)

    def on_its_own_loop() -> str:
        loop = kept.setdefault("loop", asyncio.new_event_loop())
        told: str = loop.run_until_complete(soft())
        return told

    for function in map(aiogpu.remote, (plain, soft, on_its_own_loop)):
        told = ""
        while not told:  # until a worker has it for the second time
            told = await function.remote()  # type: ignore[assignment]
        assert "was stopped, since the task that had started it has ended" in told


async def test_threads_of_a_plain_task(node: aiogpu.types.Node) -> None:
    def work() -> list[int]:
        def one(number: int) -> int:
            doubled = aiogpu.get(tasks.add.remote(number, number))
            return aiogpu.get(tasks.add.remote(doubled))

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(one, range(40)))
        return [*found, aiogpu.get(tasks.add.remote(1))]

    assert await run_here.remote(work) == [*(2 * n + 1 for n in range(40)), 2]


async def test_loops_in_threads_beside_the_tasks_own(node: aiogpu.types.Node) -> None:
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


async def test_a_cancel_is_heard_beside_a_reading_thread(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    """The thread may read the cancel that is meant for the task's loop."""
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
    await gate.entered("heard")
    gate.release("heard")
    assert await tasks.add.remote(1) == 2


async def test_a_thread_that_outlives_its_task(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    pid = await nested_tasks.outlive.remote(gate.path)
    await gate.entered("TaskCancelledError", "MisuseError")
    assert gate.pids["MisuseError"] == pid
    assert await nested_tasks.increased.remote(1) == 2


async def test_a_thousand_children_awaited_at_once(node: aiogpu.types.Node) -> None:
    async def work() -> int:
        return sum(await asyncio.gather(*(tasks.add.remote(n) for n in range(2000))))

    assert await await_here.remote(work) == 2001000
