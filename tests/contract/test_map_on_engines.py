"""[B18] `f.map(...)` end to end: windows, chunks, errors in their place, what stops."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import pytest
from tqdm.asyncio import tqdm

import aiogpu
from tests.contract import tasks
from tests.contract.map_tasks import (
    Adder,
    LaterAdder,
    Plus,
    check,
    check_later,
    exit_at_2,
    fill,
    here,
    lock_at_2,
    sum_of,
    sum_of_given,
    sum_of_later,
    total,
)
from tests.support.gate import Gate, pass_gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@pytest.fixture
def linger(gate: Gate) -> aiogpu.types.RemoteFunction[[str], str]:
    """A task that waits at the gate, and tells of its cancelling: "a-cancelled"."""
    path = gate.path
    gated = tasks.gated_coroutine.__wrapped__

    @aiogpu.remote
    async def linger(name: str) -> str:
        return await gated(path, name)

    return linger


async def left(number: int) -> None:
    """Wait until the node knows of that many tasks, waiting ones included."""
    async with asyncio.timeout(60):
        while len((await aiogpu.status()).tasks) != number:
            await asyncio.sleep(0)


def names() -> Iterator[str]:
    """An endless iterable."""
    return map(str, count(1))


async def later_names() -> AsyncIterator[str]:
    """An endless async iterable."""
    for name in names():
        await asyncio.sleep(0)
        yield name


# Which results there are, and in which order


@pytest.mark.parametrize(
    ("chunk", "limit", "ordered"),
    [
        (None, 7, True),
        (None, None, False),
        (1, 1, True),
        (7, None, False),
        (1000, 1000, True),
        ("auto", None, True),
        ("auto", 1000, False),
    ],
)
async def test_every_item_gives_one_result(
    address: str, chunk: Any, limit: int | None, ordered: bool
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        for task in (tasks.add, tasks.double):
            given = task.map(range(200), chunk=chunk, ordered=ordered, limit=limit)
            results = [each async for each in given]
            if not ordered:
                results.sort()
            is_double = task is tasks.double
            assert results == [2 * n if is_double else n + 1 for n in range(200)]
        assert [each async for each in tasks.add.map([], chunk=chunk)] == []
        await left(0)


async def test_a_chunk_is_one_task_with_the_options_of_its_function(
    address: str,
) -> None:
    @aiogpu.remote(
        num_cpus=0.5, name="own", runtime_env={"env_vars": {"OWN_VARIABLE": "x"}}
    )
    def look(_: int) -> Any:
        context = aiogpu.get_runtime_context()
        return (
            os.environ["OWN_VARIABLE"],
            aiogpu.get_gpu_ids(),
            context.task_name,
            context.assigned_resources["CPU"],
        )

    async with aiogpu.init(address=address, num_cpus=2, num_gpus=1):
        found = [each async for each in here.map(range(10), chunk=4)]
        assert [number for number, _ in found] == list(range(10))
        ran = [task for _, task in found]
        assert ran == ran[:1] * 4 + ran[4:5] * 4 + ran[8:9] * 2
        assert len(set(ran)) == 3
        looked = look.options(num_gpus=0.5).map(range(3), chunk=2)
        assert [each async for each in looked] == [("x", [0], "own", 0.5)] * 3


async def test_a_map_inside_a_task(address: str) -> None:
    """[B12]"""

    @aiogpu.remote
    async def total(count: int) -> int:
        return sum([each async for each in tasks.add.map(range(count), chunk="auto")])

    async with aiogpu.init(address=address, num_cpus=2):
        sums = [each async for each in total.map([1, 2, 100], chunk=2)]
        assert sums == [1, 3, sum(range(1, 101))]


async def test_items_that_are_handles_and_large_items(address: str) -> None:
    """[B16]"""
    async with (
        aiogpu.init(address=address, num_cpus=2),
        aiogpu.remote(Adder).remote() as actor,
    ):
        handles: list[Any] = [tasks.add.remote(number) for number in range(10)]
        for chunk in (None, 3):
            sums = tasks.add.map(handles, chunk=chunk)
            assert [each async for each in sums] == list(range(2, 12))
        arrays = [each async for each in fill.map(range(10), chunk="auto")]
        assert [int(array[0]) for array in arrays] == list(range(10))
        sums = total.map(arrays, chunk=3)
        assert [each async for each in sums] == [200_000 * n for n in range(10)]
        handles = [fill.remote(number) for number in range(4)]
        sums = actor.sum.map(handles, chunk=2)
        assert [each async for each in sums] == [0, 200_000, 400_000, 600_000]


# Actors


@pytest.mark.parametrize("chunk", [3, "auto"])
async def test_methods_in_chunks_keep_their_order(address: str, chunk: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        for cls in (Adder, LaterAdder):
            async with aiogpu.remote(cls).remote() as actor:
                sums = [each async for each in actor.add.map([1] * 10, chunk=chunk)]
                assert sums == list(range(1, 11))
                halves = [each async for each in actor.half.map([1, 2], chunk=chunk)]
                assert halves == [0.5, 1.0]
        async with aiogpu.remote(LaterAdder).remote() as actor:
            later = actor.add_later.map([1] * 10, chunk=chunk, ordered=False)
            assert sorted([each async for each in later]) == list(range(1, 11))


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


async def test_what_cannot_be_mapped_is_refused(address: str) -> None:
    class Deaf:
        def hear(self) -> None:
            """Nothing."""

    pair = tasks.echo.options(num_returns=2)
    async with (
        aiogpu.init(address=address, num_cpus=1),
        aiogpu.remote(Deaf).remote() as actor,
    ):
        wrong = "called with wrong arguments"
        with pytest.raises(aiogpu.errors.MisuseError, match=wrong):
            await anext(actor.hear.map([1], chunk=2))
        for chunk in (None, 2):
            with pytest.raises(aiogpu.errors.MisuseError, match="num_returns=2"):
                pair.map([(1, 2)], chunk=chunk)


# Errors


@pytest.mark.parametrize(
    ("task", "chunk"), [(check, 4), (check, "auto"), (check_later, 100)]
)
async def test_an_error_comes_in_its_place(
    address: str, task: aiogpu.types.RemoteFunction[[int], int], chunk: Any
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


@pytest.mark.parametrize(
    ("task", "chunk"), [(check, None), (check, 4), (check, "auto"), (check_later, 100)]
)
async def test_errors_among_the_results(
    address: str, task: aiogpu.types.RemoteFunction[[int], int], chunk: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        mapped = task.map(range(50), chunk=chunk, return_exceptions=True)
        found = [repr(one) async for one in mapped]
        assert found == [
            f"ValueError({n})" if n % 10 == 7 else f"{n}" for n in range(50)
        ]
        mapped = task.map(range(50), chunk=chunk, ordered=False, return_exceptions=True)
        assert sorted([repr(one) async for one in mapped]) == sorted(found)

        def broken() -> Iterator[int]:
            yield 7
            raise KeyError("input")

        with pytest.raises(KeyError, match="input"):
            async for _ in task.map(broken(), chunk=chunk, return_exceptions=True):
                pass


@pytest.mark.parametrize(
    ("task", "kind", "told"),
    [
        (exit_at_2, aiogpu.TaskError, "SystemExit: enough"),
        (
            lock_at_2,
            aiogpu.errors.SerializationError,
            r"lock_at_2 ran, but the result cannot be pickled: result \(a lock\): ",
        ),
    ],
    ids=["no exception", "no pickle"],
)
async def test_what_does_not_travel_fails_in_its_place(
    address: str, task: Any, kind: type[Exception], told: str
) -> None:
    """[B37]"""
    async with aiogpu.init(address=address, num_cpus=1):
        results = task.map(range(5), chunk=5)
        assert [await anext(results), await anext(results)] == [0, 1]
        with pytest.raises(kind, match=told):
            await anext(results)


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
        results = die_at_5.map(range(9), chunk=3, return_exceptions=True)
        kinds = [type(one).__name__ async for one in results]
        assert kinds == 3 * ["int"] + 3 * ["WorkerDiedError"] + 3 * ["int"]


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
        if retries == 2:
            given = flaky.options(max_retries=1).map([2, 1], chunk=2)
            (tmp_path / "tries").write_text("")
            with pytest.raises(OSError, match="2"):
                await anext(given)
            assert (tmp_path / "tries").read_text().split().count("2") == 2
            return
    tried = (tmp_path / "tries").read_text().split()
    assert [tried.count(str(number)) for number in range(7)] == [1, 1, 3, 1, 1, 1, 1]


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


# What runs at once, and what stops


async def test_at_most_the_limit_runs_and_results_keep_their_order(gate: Gate) -> None:
    path = gate.path
    enter = aiogpu.remote(lambda name: pass_gate(path, name))
    async with aiogpu.init(num_cpus=8):
        async with enter.map(later_names(), limit=3) as results:
            first = asyncio.ensure_future(results.__anext__())
            await gate.entered("1", "2", "3")
            gate.release("2")
            await left(2)
            assert not first.done(), "it is the second that has ended"
            assert set(gate.pids) == {"1", "2", "3"}, "and it still counts"
            gate.release("1")
            assert [await first, await anext(results)] == ["1", "2"]
            third = asyncio.ensure_future(results.__anext__())
            await gate.entered("4", "5")
            assert gate.inside == {"3", "4", "5"}
            gate.release("3")
            assert await third == "3"
        assert gate.pids.keys() <= set("123456"), "three beyond the three taken"


async def test_break_stops_what_runs(
    gate: Gate, linger: aiogpu.types.RemoteFunction[[str], str]
) -> None:
    async def take_one() -> str:
        async for result in linger.map(names(), limit=3):
            return result
        raise AssertionError

    async with aiogpu.init(num_cpus=8):
        task = asyncio.ensure_future(take_one())
        await gate.entered("1", "2", "3")
        gate.release("1")
        assert await task == "1"
        await gate.entered("2-cancelled", "3-cancelled")
        await left(0)
        assert (await aiogpu.available_resources())["CPU"] == 8.0


async def test_an_error_in_the_middle_cancels_the_rest(gate: Gate) -> None:
    path = gate.path
    linger = tasks.gated_coroutine.__wrapped__

    @aiogpu.remote
    async def fail_at_b(name: str) -> str:
        result = await linger(path, name)
        if name == "b":
            raise KeyError(name)
        return result

    async with aiogpu.init(num_cpus=3):
        results = fail_at_b.map("abcde", limit=4)
        first = asyncio.ensure_future(results.__anext__())
        await gate.entered("a", "b", "c")
        gate.release("b")
        await gate.entered("d")
        assert not first.done(), "what comes before the error is not lost"
        gate.release("a")
        assert await first == "a"
        with pytest.raises(KeyError, match="b"):
            await anext(results)
        await gate.entered("c-cancelled", "d-cancelled")


async def test_a_consumer_that_is_cancelled_or_whose_node_is_shut_down(
    gate: Gate, linger: aiogpu.types.RemoteFunction[[str], str]
) -> None:
    """[B6] [B15]"""
    async with aiogpu.init(num_cpus=2):
        task = asyncio.ensure_future(linger.map("abc", limit=3).__anext__())
        await gate.entered("a", "b")
        task.cancel()
        await gate.entered("a-cancelled", "b-cancelled")
        assert await tasks.add.remote(1) == 2
        assert "c" not in gate.pids, "what waits goes before what runs"
        results = linger.map(names(), limit=4)
        task = asyncio.ensure_future(results.__anext__())
        await gate.entered("1", "2")
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await task


def test_a_program_that_ends_in_the_midst_leaves_nothing() -> None:
    async def main() -> None:
        await aiogpu.init(num_cpus=2)
        for source in (names(), later_names()):
            results = tasks.echo.map(source)
            kept.append((results, await anext(results)))

    kept: list[Any] = []
    aiogpu.run(main())
    assert [result for _, result in kept] == ["1", "1"]


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
        for _ in range(10):
            async with task.map(range(500), chunk=10) as results:
                await anext(results)
        assert await tasks.add.remote(1) == 2
    assert "never awaited" not in "".join(capfd.readouterr())


# Progress bars over results: tqdm asks for a length and iterates


async def test_tqdm_draws_a_bar_over_results(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        drawn = io.StringIO()
        bar = tqdm(tasks.add.map(range(50), chunk="auto"), file=drawn)
        assert bar.total == 50
        assert [each async for each in bar] == list(range(1, 51))
        assert "50/50" in drawn.getvalue()
        bar = tqdm(tasks.add.map(iter(range(5))), file=drawn)
        assert bar.total is None
        assert [each async for each in bar] == [1, 2, 3, 4, 5]
        bar = tqdm(check.map(range(9), chunk=2), file=io.StringIO())
        with pytest.raises(ValueError, match="7"):
            async for _ in bar:
                pass
        assert bar.n == 7
        handles = [tasks.add.remote(number) for number in range(5)]
        bar = tqdm(aiogpu.as_completed(handles), file=io.StringIO())
        assert bar.total == 5
        assert {await handle async for handle in bar} == {1, 2, 3, 4, 5}


# Waits: the first that end


async def test_in_a_program(address: str) -> None:
    """[B16] Of tasks that give or fail, calls of actors, and values."""
    async with aiogpu.init(address=address, num_cpus=2), Plus.remote() as actor:
        fails = tasks.fail.remote(KeyError, 2)
        value: Any = await aiogpu.put(5)
        handles: list[Any] = [tasks.add.remote(1), fails, value]
        handles += [actor.add.remote(number) for number in range(5, 15)]
        assert await aiogpu.wait(handles, num_returns=13) == (handles, [])
        found = {
            str(handle.exception()) if handle.exception() else handle.result()
            async for handle in aiogpu.as_completed(handles)
        }
        assert found == {2, "2", 5, *range(6, 16)}
        assert await sum_of_given.remote([value, *handles[3:5]]) == 5 + 6 + 7


@pytest.mark.parametrize("task", [sum_of, sum_of_later])
async def test_in_a_task(address: str, task: Any) -> None:
    """On one CPU, which the task lends while it waits."""
    async with aiogpu.init(address=address, num_cpus=1):
        assert sorted(await task.remote(6)) == [1, 2, 3, 4, 5, 6]
        if address == "local":
            assert sorted(await task.remote(1_000)) == list(range(1, 1_001))


@pytest.mark.needs("at once")
async def test_the_fast_ones_first_and_a_wait_that_is_given_up_leaves_the_work(
    address: str, gate: Gate
) -> None:
    """[B15]"""
    async with aiogpu.init(address=address, num_cpus=3):
        handles = [tasks.gated.remote(gate.path, name) for name in "abc"]
        await gate.entered("a", "b", "c")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aiogpu.wait(handles), 0.001)
        assert await aiogpu.wait(handles, timeout=0) == ([], handles)
        completed = aiogpu.as_completed(handles)
        for name in "bca":
            gate.release(name)
            assert (await anext(completed)).result() == name  # type: ignore[call-overload]
