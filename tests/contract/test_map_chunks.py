"""[B18] `f.map(..., chunk=)` end to end: many items in a task, results one by one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

import aiogpu
from tests.contract import tasks
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

Chunk = int | Literal["auto"]


@aiogpu.remote
def check(number: int) -> int:
    if number % 10 == 7:
        raise ValueError(number)
    return number


@aiogpu.remote
async def check_later(number: int) -> int:
    await asyncio.sleep(0)
    if number % 10 == 7:
        raise ValueError(number)
    return number


@aiogpu.remote
def here(number: int) -> tuple[int, int]:
    return number, aiogpu.get_runtime_context().task_id


class Adder:
    """Methods of all kinds."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    @staticmethod
    def half(number: int) -> float:
        return number / 2


class LaterAdder(Adder):
    async def add_later(self, number: int) -> int:
        await asyncio.sleep(0)
        return self.add(number)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 500, 1000, "auto"])
@pytest.mark.parametrize("limit", [None, 1000])
async def test_every_item_gives_one_result(
    address: str, chunk: Chunk, ordered: bool, limit: int | None
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        for task in (tasks.add, tasks.double):
            results = [
                each
                async for each in task.map(
                    range(500), chunk=chunk, ordered=ordered, limit=limit
                )
            ]
            if not ordered:
                results.sort()
            is_double = task is tasks.double
            assert results == [2 * n if is_double else n + 1 for n in range(500)]
        assert [each async for each in tasks.add.map([], chunk=chunk)] == []


async def test_an_async_iterable_in_chunks(address: str) -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(100):
            if number % 30 == 0:
                await asyncio.sleep(0)
            yield number

    async with aiogpu.init(address=address, num_cpus=2):
        for chunk in (7, "auto"):
            results = tasks.add.map(numbers(), chunk=chunk)  # type: ignore[arg-type]
            assert [each async for each in results] == list(range(1, 101))


async def test_a_chunk_is_one_task(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        found = [each async for each in here.map(range(10), chunk=4)]
    assert [number for number, _ in found] == list(range(10))
    ran = [task for _, task in found]
    assert ran[0:4] == ran[:1] * 4
    assert ran[4:8] == ran[4:5] * 4
    assert len(set(ran)) == 3


@pytest.mark.parametrize("task", [check, check_later])
@pytest.mark.parametrize("chunk", [4, 100, "auto"])
async def test_an_error_comes_in_its_place(
    address: str, task: aiogpu.types.RemoteFunction[[int], int], chunk: Chunk
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        results = task.map(range(50), chunk=chunk)
        assert [await anext(results) for _ in range(7)] == list(range(7))
        with pytest.raises(ValueError, match="7") as caught:
            await anext(results)
        trace = str(caught.value.__cause__)
        assert "raise ValueError(number)" in trace
        assert "/aiogpu/" not in trace, "the frames are the user's"
        with pytest.raises(aiogpu.errors.MisuseError, match="ended with ValueError"):
            await anext(results)
        assert await tasks.add.remote(1) == 2


async def test_what_is_no_exception_comes_in_its_place(address: str) -> None:
    """[B37]"""

    @aiogpu.remote
    def leave(number: int) -> int:
        if number == 2:
            raise SystemExit("enough")
        return number

    async with aiogpu.init(address=address, num_cpus=1):
        results = leave.map(range(5), chunk=5)
        assert [await anext(results), await anext(results)] == [0, 1]
        with pytest.raises(aiogpu.TaskError, match="SystemExit: enough"):
            await anext(results)


async def test_a_result_that_cannot_be_pickled_fails_in_its_place(
    address: str,
) -> None:
    @aiogpu.remote
    def lock_at_2(number: int) -> Any:
        return threading.Lock() if number == 2 else [number]

    async with aiogpu.init(address=address, num_cpus=1):
        results = lock_at_2.map(range(5), chunk=5)
        assert [await anext(results), await anext(results)] == [[0], [1]]
        told = r"lock_at_2 ran, but the result cannot be pickled: result \(a lock\): "
        with pytest.raises(aiogpu.errors.SerializationError, match=told):
            await anext(results)


async def test_options_and_names_are_the_functions_own(address: str) -> None:
    @aiogpu.remote(
        num_cpus=0.5, name="own", runtime_env={"env_vars": {"OWN_VARIABLE": "x"}}
    )
    def look(number: int) -> Any:
        context = aiogpu.get_runtime_context()
        return (
            number,
            os.environ["OWN_VARIABLE"],
            aiogpu.get_gpu_ids(),
            context.task_name,
            context.assigned_resources["CPU"],
        )

    async with aiogpu.init(address=address, num_cpus=2, num_gpus=1):
        looked = look.options(num_gpus=0.5).map(range(3), chunk=2)
        assert [each async for each in looked] == [
            (number, "x", [0], "own", 0.5) for number in range(3)
        ]


@pytest.mark.parametrize("chunk", [3, "auto"])
async def test_methods_in_chunks(address: str, chunk: Chunk) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        for cls in (Adder, LaterAdder):
            async with aiogpu.remote(cls).remote() as actor:
                sums = [each async for each in actor.add.map([1] * 10, chunk=chunk)]
                assert sorted(sums) == list(range(1, 11))
                halves = [each async for each in actor.half.map([1, 2], chunk=chunk)]
                assert halves == [0.5, 1.0]
        async with aiogpu.remote(LaterAdder).remote() as actor:
            later = actor.add_later.map([1] * 10, chunk=chunk, ordered=False)
            assert sorted([each async for each in later]) == list(range(1, 11))


@pytest.mark.parametrize("chunk", [3, "auto"])
async def test_chunks_of_plain_methods_keep_their_order(
    address: str, chunk: Chunk
) -> None:
    async with (
        aiogpu.init(address=address, num_cpus=2),
        aiogpu.remote(Adder).remote() as actor,
    ):
        sums = [each async for each in actor.add.map([1] * 10, chunk=chunk)]
        assert sums == list(range(1, 11))


@pytest.mark.parametrize("chunk", [3, "auto"])
async def test_chunks_of_coroutines_keep_their_order(
    address: str, chunk: Chunk
) -> None:
    async with (
        aiogpu.init(address=address, num_cpus=2),
        aiogpu.remote(LaterAdder).remote() as actor,
    ):
        sums = [each async for each in actor.add.map([1] * 10, chunk=chunk)]
        assert sums == list(range(1, 11))


async def test_a_pools_methods_in_chunks(address: str) -> None:
    async with (
        aiogpu.init(address=address, num_cpus=2),
        aiogpu.ActorPool(aiogpu.remote(Adder), 2) as pool,
    ):
        halves = [each async for each in pool.half.map(range(20), chunk=3)]
        assert halves == [number / 2 for number in range(20)]
        sums = [each async for each in pool.add.map([1] * 20, chunk=5)]
        assert max(sums) < 20, "both have had some"


@pytest.mark.needs("threads")
async def test_chunks_of_methods_in_threads_and_groups(address: str) -> None:
    @aiogpu.remote(concurrency_groups={"io": 2}, max_concurrency=1)
    class Threaded:
        @aiogpu.method(concurrency_group="io")
        def thread(self, number: int) -> str:
            return threading.current_thread().name

    async with (
        aiogpu.init(address=address, num_cpus=2),
        Threaded.remote() as actor,
    ):
        names = [each async for each in actor.thread.map(range(8), chunk=2)]
        assert all(name.startswith("aiogpu-io") for name in names)


async def test_a_method_that_takes_no_item(address: str) -> None:
    class Deaf:
        def hear(self) -> None:
            """Nothing."""

    async with (
        aiogpu.init(address=address, num_cpus=1),
        aiogpu.remote(Deaf).remote() as actor,
    ):
        with pytest.raises(
            aiogpu.errors.MisuseError, match="called with wrong arguments"
        ):
            await anext(actor.hear.map([1], chunk=2))


async def test_map_in_chunks_inside_a_task(address: str) -> None:
    """[B12]"""

    @aiogpu.remote
    async def total(count: int) -> int:
        return sum([each async for each in tasks.add.map(range(count), chunk="auto")])

    async with aiogpu.init(address=address, num_cpus=2):
        assert await total.remote(100) == sum(range(1, 101))
        sums = [each async for each in total.map([1, 2, 3], chunk=2)]
        assert sums == [1, 3, 6]


@pytest.mark.needs("at once")
async def test_a_chunk_is_stopped_in_its_midst(address: str, gate: Gate) -> None:
    """[B15]"""
    path = gate.path
    spin = tasks.spin.__wrapped__

    @aiogpu.remote
    def spin_at_b(name: str) -> str:
        if name == "b":
            spin(path, name)
        return name

    async with aiogpu.init(address=address, num_cpus=1):
        async with spin_at_b.map("abc", chunk=3) as results:
            task = asyncio.ensure_future(anext(results))  # type: ignore[arg-type]
            await gate.entered("b")
            assert not task.done()
        await gate.entered("b-interrupted")
        await asyncio.wait([task])
        assert await tasks.add.remote(1) == 2


@pytest.mark.parametrize("task", [tasks.echo, check_later])
async def test_a_chunk_of_coroutines_that_was_stopped_is_silent(
    address: str, task: aiogpu.types.RemoteFunction[[int], int], capfd: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        for _ in range(20):
            async with task.map(range(500), chunk=10) as results:
                await anext(results)
        assert await tasks.add.remote(1) == 2
    assert "never awaited" not in "".join(capfd.readouterr())


@pytest.mark.needs("processes")
async def test_a_chunk_that_dies_fails_in_the_place_of_its_first(address: str) -> None:
    """[B38]"""

    @aiogpu.remote(max_retries=0)
    def die_at_5(number: int) -> int:
        if number == 5:
            os._exit(7)
        return number

    async with aiogpu.init(address=address, num_cpus=2, log_to_driver=False):
        results = die_at_5.map(range(9), chunk=3)
        assert [await anext(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(aiogpu.WorkerDiedError, match="code 7"):
            await anext(results)
        assert await tasks.add.remote(1) == 2


@pytest.mark.parametrize("retries", [2, -1])
async def test_an_item_that_raises_is_tried_again_alone(
    address: str, retries: int, tmp_path: Any
) -> None:
    path = str(tmp_path / "tries")

    @aiogpu.remote(max_retries=retries, retry_exceptions=(OSError,))
    def flaky(number: int) -> int:
        with open(path, "a+") as file:
            file.write(f"{number} ")
            file.seek(0)
            tries = file.read().split().count(str(number))
        if number == 2 and tries < 3:
            raise OSError(tries)
        if number == 6:
            raise KeyError(number)
        return number

    async with aiogpu.init(address=address, num_cpus=1):
        results = flaky.map(range(8), chunk=4)
        assert [await anext(results) for _ in range(6)] == list(range(6))
        with pytest.raises(KeyError, match="6"):
            await anext(results)
    tried = (tmp_path / "tries").read_text().split()
    assert [tried.count(str(number)) for number in range(7)] == [1, 1, 3, 1, 1, 1, 1]


async def test_an_item_is_tried_no_more_often_than_told(
    address: str, tmp_path: Any
) -> None:
    path = str(tmp_path / "tries")

    @aiogpu.remote(max_retries=2, retry_exceptions=True)
    def fail(number: int) -> int:
        with open(path, "a") as file:
            file.write(f"{number} ")
        raise OSError(number)

    async with aiogpu.init(address=address, num_cpus=1):
        with pytest.raises(OSError, match="5"):
            await anext(fail.map([5, 6], chunk=2))
    assert (tmp_path / "tries").read_text().split().count("5") == 3


@pytest.mark.needs("processes")
async def test_a_fork_that_a_function_makes_runs_no_other_items(address: str) -> None:
    @aiogpu.remote
    def fork_at_1(number: int) -> int:
        if number == 1:
            child = os.fork()
            if not child:
                return -1
            _, status = os.waitpid(child, 0)
            assert status == 0
        return number

    async with aiogpu.init(address=address, num_cpus=1):
        assert [each async for each in fork_at_1.map(range(4), chunk=4)] == [0, 1, 2, 3]


async def test_a_chunk_that_takes_too_long_gives_what_it_has(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each item is run once all the same."""
    monkeypatch.setattr("aiogpu.api.map.LONGEST", 1e-9)
    monkeypatch.setattr("aiogpu.api.map.FIRST", 5)
    monkeypatch.setattr("aiogpu.api.map.Sizes.note", lambda *_: None)
    async with aiogpu.init(address=address, num_cpus=2):
        for ordered in (True, False):
            found = [
                each
                async for each in here.map(range(30), chunk="auto", ordered=ordered)
            ]
            assert sorted(number for number, _ in found) == list(range(30))
            if ordered:
                assert [number for number, _ in found] == list(range(30))
            assert len({task for _, task in found}) == 30
