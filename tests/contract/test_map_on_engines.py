"""`f.map(...)` on each engine: windows, chunks, errors, cancels; and waits."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tqdm.asyncio import tqdm

import aiogpu
from aiogpu import errors
from aiogpu.types import RemoteFunction
from tests.contract import map_tasks, tasks
from tests.contract.map_tasks import Adder, LaterAdder, check, check_later, fill
from tests.support.errors import raises
from tests.support.gate import Gate, pass_gate
from tests.support.waits import until

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=2),
]
only_local = pytest.mark.parametrize("address", ["local"])


@pytest.fixture
def linger(gate: Gate) -> RemoteFunction[[str], str]:
    """A task that waits at the gate, and says there that it is cancelled."""
    path = gate.path
    gated = tasks.gated_coroutine.__wrapped__

    @aiogpu.remote
    async def linger(name: str) -> str:
        return await gated(path, name)

    return linger


async def listed(results: AsyncIterable[Any]) -> list[Any]:
    return [result async for result in results]


async def tasks_left(number: int) -> None:
    """Wait until the node knows that many tasks, waiting ones included."""

    async def are_left() -> bool:
        return len((await aiogpu.status()).tasks) == number

    await until(are_left)


def names() -> Iterator[str]:
    """An endless iterable."""
    return map(str, count(1))


async def later_names() -> AsyncIterator[str]:
    """An endless async iterable."""
    for name in names():
        await asyncio.sleep(0)
        yield name


# Results and their order


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
    chunk: Any, limit: int | None, ordered: bool
) -> None:
    options = {"chunk": chunk, "ordered": ordered, "limit": limit}
    for task, expected in (
        (tasks.add, [number + 1 for number in range(200)]),
        (tasks.double, [2 * number for number in range(200)]),
    ):
        results = await listed(task.map(range(200), **options))
        assert (results if ordered else sorted(results)) == expected
    assert await listed(tasks.add.map([], chunk=chunk)) == []
    await tasks_left(0)


@pytest.mark.aiogpu(num_cpus=2, num_gpus=1)
async def test_a_chunk_is_one_task_with_the_options_of_its_function() -> None:
    env = {"env_vars": {"OWN_VARIABLE": "x"}}

    @aiogpu.remote(num_cpus=0.5, name="own", runtime_env=env)
    def look(_: int) -> Any:
        context = aiogpu.get_runtime_context()
        cpus = context.assigned_resources["CPU"]
        return os.environ["OWN_VARIABLE"], aiogpu.get_gpu_ids(), context.task_name, cpus

    pairs = await listed(map_tasks.here.map(range(10), chunk=4))
    assert [number for number, _ in pairs] == list(range(10))
    ids = [task_id for _, task_id in pairs]
    assert ids == ids[:1] * 4 + ids[4:5] * 4 + ids[8:9] * 2
    assert len(set(ids)) == 3
    looked = look.options(num_gpus=0.5).map(range(3), chunk=2)
    assert await listed(looked) == [("x", [0], "own", 0.5)] * 3


async def test_a_task_maps() -> None:

    @aiogpu.remote
    async def total(count: int) -> int:
        return sum([each async for each in tasks.add.map(range(count), chunk="auto")])

    sums = await listed(total.map([1, 2, 100], chunk=2))
    assert sums == [1, 3, sum(range(1, 101))]


async def test_items_may_be_handles_and_large() -> None:
    async with aiogpu.remote(Adder).remote() as actor:
        handles: list[Any] = [tasks.add.remote(number) for number in range(10)]
        for chunk in (None, 3):
            sums = await listed(tasks.add.map(handles, chunk=chunk))
            assert sums == list(range(2, 12))
        arrays = await listed(fill.map(range(10), chunk="auto"))
        assert [int(array[0]) for array in arrays] == list(range(10))
        sums = await listed(map_tasks.total.map(arrays, chunk=3))
        assert sums == [200_000 * number for number in range(10)]
        handles = [fill.remote(number) for number in range(4)]
        sums = await listed(actor.sum.map(handles, chunk=2))
        assert sums == [0, 200_000, 400_000, 600_000]


# Actors


@pytest.mark.parametrize("chunk", [3, "auto"])
async def test_methods_in_chunks_keep_their_order(chunk: Any) -> None:
    for cls in (Adder, LaterAdder):
        async with aiogpu.remote(cls).remote() as actor:
            sums = await listed(actor.add.map([1] * 10, chunk=chunk))
            assert sums == list(range(1, 11))
            assert await listed(actor.half.map([1, 2], chunk=chunk)) == [0.5, 1.0]
    async with aiogpu.remote(LaterAdder).remote() as actor:
        later = actor.add_later.map([1] * 10, chunk=chunk, ordered=False)
        assert sorted(await listed(later)) == list(range(1, 11))


async def test_a_pool_spreads_chunks() -> None:
    async with aiogpu.ActorPool(aiogpu.remote(Adder), 2) as pool:
        halves = await listed(pool.half.map(range(20), chunk=3))
        assert halves == [number / 2 for number in range(20)]
        calls = 0

        async def is_spread() -> bool:
            # On a busy machine one actor may answer before the next chunk is sent.
            nonlocal calls
            calls += 20
            return max(await listed(pool.add.map([1] * 20, chunk=5))) < calls

        await until(is_spread)


MEGABYTE = 1 << 20


def held() -> tuple[int, int]:
    """Return the megabytes and the descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return memory // MEGABYTE, len(os.listdir("/proc/self/fd"))


WAYS: dict[str, Any] = {
    "method": lambda pool, items: pool.echo.map(items, limit=8),
    "function": lambda _, items: tasks.echo.map(items, limit=8),
    "chunks": lambda _, items: tasks.echo.map(items, limit=8, chunk=4),
}


@pytest.mark.needs("processes")
@pytest.mark.parametrize("way", WAYS)
async def test_a_map_keeps_nothing_that_was_taken(way: str) -> None:
    calls, most_memory, most_descriptors = 300, 0, 0
    async with aiogpu.ActorPool(aiogpu.remote(map_tasks.Echo), 2) as pool:
        inputs = (number.to_bytes(8) * (MEGABYTE // 8) for number in range(calls))
        results = WAYS[way](pool, inputs)
        memory, descriptors = held()
        taken = 0
        async for result in results:
            assert len(result) == MEGABYTE
            taken += 1
            if not taken % 20:
                now = held()
                most_memory = max(most_memory, now[0] - memory)
                most_descriptors = max(most_descriptors, now[1] - descriptors)
    assert taken == calls
    assert most_memory < 150
    assert most_descriptors < 150


@pytest.mark.needs("threads")
async def test_chunks_run_in_the_group_of_their_method() -> None:
    @aiogpu.remote(concurrency_groups={"io": 2}, max_concurrency=1)
    class Threaded:
        @aiogpu.method(concurrency_group="io")
        def thread(self, number: int) -> str:
            return threading.current_thread().name

    async with Threaded.remote() as actor:
        names = await listed(actor.thread.map(range(8), chunk=2))
        assert all(name.startswith("aiogpu-io") for name in names)


@pytest.mark.aiogpu(num_cpus=1)
async def test_calls_that_cannot_be_mapped_are_refused() -> None:
    class Deaf:
        def hear(self) -> None:
            """Nothing."""

    async with aiogpu.remote(Deaf).remote() as actor:
        results = actor.hear.map([1], chunk=2)
        with pytest.raises(errors.MisuseError, match="called with wrong arguments"):
            await anext(results)
        pair = tasks.echo.options(num_returns=2)
        for chunk in (None, 2):
            with pytest.raises(errors.MisuseError, match="num_returns=2"):
                pair.map([(1, 2)], chunk=chunk)


# Errors


@pytest.mark.parametrize(
    ("task", "chunk"), [(check, 4), (check, "auto"), (check_later, 100)]
)
async def test_an_error_comes_in_its_place(
    task: RemoteFunction[[int], int], chunk: Any
) -> None:
    results = task.map(range(50), chunk=chunk)
    assert [await anext(results) for _ in range(7)] == list(range(7))
    error = await raises(ValueError, lambda: anext(results), match="7")
    trace = str(error.__cause__)
    assert "raise ValueError(number)" in trace
    assert "/aiogpu/" not in trace, "the frames are the user's"
    ended = "ended with ValueError"
    await raises(errors.MisuseError, lambda: anext(results), match=ended)
    assert await tasks.add.remote(1) == 2


@pytest.mark.parametrize(
    ("task", "chunk"), [(check, None), (check, 4), (check, "auto"), (check_later, 100)]
)
async def test_errors_may_be_among_the_results(
    task: RemoteFunction[[int], int], chunk: Any
) -> None:
    mapped = task.map(range(50), chunk=chunk, return_exceptions=True)
    found = [repr(each) async for each in mapped]
    assert found == [f"ValueError({n})" if n % 10 == 7 else f"{n}" for n in range(50)]
    mapped = task.map(range(50), chunk=chunk, ordered=False, return_exceptions=True)
    assert sorted([repr(each) async for each in mapped]) == sorted(found)

    def broken() -> Iterator[int]:
        yield 7
        raise KeyError("input")

    mapped = task.map(broken(), chunk=chunk, return_exceptions=True)
    await raises(KeyError, listed(mapped), match="input")


@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        (map_tasks.exit_at_2, errors.TaskError, "SystemExit: enough"),
        (
            map_tasks.lock_at_2,
            errors.SerializationError,
            r"lock_at_2 ran, but the result cannot be pickled: result \(a lock\): ",
        ),
    ],
    ids=["no exception", "no pickle"],
)
@pytest.mark.aiogpu(num_cpus=1)
async def test_a_result_that_cannot_be_sent_fails_in_its_place(
    task: Any, kind: type[Exception], message: str
) -> None:
    results = task.map(range(5), chunk=5)
    assert [await anext(results), await anext(results)] == [0, 1]
    await raises(kind, lambda: anext(results), match=message)


@pytest.mark.needs("processes")
@pytest.mark.aiogpu(num_cpus=2, log_to_driver=False)
async def test_a_chunk_that_dies_fails_in_the_place_of_its_first_item() -> None:

    @aiogpu.remote(max_retries=0)
    def die_at_5(number: int) -> int:
        if number == 5:
            os._exit(7)
        return number

    results = die_at_5.map(range(9), chunk=3)
    assert [await anext(results) for _ in range(3)] == [0, 1, 2]
    await raises(errors.WorkerDiedError, results.__anext__, match="code 7")
    assert await tasks.add.remote(1) == 2
    results = die_at_5.map(range(9), chunk=3, return_exceptions=True)
    kinds = [type(each).__name__ async for each in results]
    assert kinds == 3 * ["int"] + 3 * ["WorkerDiedError"] + 3 * ["int"]


@pytest.mark.parametrize("retries", [2, -1])
@pytest.mark.aiogpu(num_cpus=1)
async def test_an_item_that_raises_is_retried_alone(
    retries: int, tmp_path: Any
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

    def tries() -> list[int]:
        """Count the tries by number."""
        tried = (tmp_path / "tries").read_text().split()
        return [tried.count(str(number)) for number in range(7)]

    results = flaky.map(range(8), chunk=4)
    assert [await anext(results) for _ in range(6)] == list(range(6))
    await raises(KeyError, results.__anext__, match="6")
    await tasks_left(0)
    assert tries() == [1, 1, 3, 1, 1, 1, 1]
    if retries == 2:
        (tmp_path / "tries").write_text("")
        results = flaky.options(max_retries=1).map([2, 1], chunk=2)
        await raises(OSError, results.__anext__, match="2")
        assert tries()[2] == 2


@pytest.mark.needs("processes")
@pytest.mark.aiogpu(num_cpus=1)
async def test_a_fork_of_a_chunk_runs_no_other_items() -> None:
    @aiogpu.remote
    def fork_at_1(number: int) -> int:
        if number == 1:
            child = os.fork()
            if not child:
                return -1
            _, status = os.waitpid(child, 0)
            assert status == 0
        return number

    assert await listed(fork_at_1.map(range(4), chunk=4)) == [0, 1, 2, 3]


# Limits and stops


@only_local
@pytest.mark.aiogpu(num_cpus=8)
async def test_at_most_the_limit_runs_and_results_keep_their_order(gate: Gate) -> None:
    path = gate.path
    enter = aiogpu.remote(lambda name: pass_gate(path, name))
    async with enter.map(later_names(), limit=3) as results:
        first = asyncio.ensure_future(results.__anext__())
        await gate.entered("1", "2", "3")
        gate.release("2")
        await tasks_left(2)
        assert not first.done(), "the second task has ended"
        assert set(gate.pids) == {"1", "2", "3"}, "and it still counts"
        gate.release("1")
        assert [await first, await anext(results)] == ["1", "2"]
        third = asyncio.ensure_future(results.__anext__())
        await gate.entered("4", "5")
        assert gate.inside == {"3", "4", "5"}
        gate.release("3")
        assert await third == "3"
    assert gate.pids.keys() <= set("123456"), "three beyond the three taken"


@only_local
@pytest.mark.aiogpu(num_cpus=8)
async def test_a_break_stops_the_tasks_that_run(
    gate: Gate, linger: RemoteFunction[[str], str]
) -> None:
    async def take_one() -> str:
        async for result in linger.map(names(), limit=3):
            return result
        raise AssertionError

    task = asyncio.ensure_future(take_one())
    await gate.entered("1", "2", "3")
    gate.release("1")
    assert await task == "1"
    await gate.entered("2-cancelled", "3-cancelled")
    await tasks_left(0)
    assert (await aiogpu.available_resources())["CPU"] == 8.0


@only_local
@pytest.mark.aiogpu(num_cpus=3)
async def test_an_error_cancels_the_items_behind_it(gate: Gate) -> None:
    path = gate.path
    linger = tasks.gated_coroutine.__wrapped__

    @aiogpu.remote
    async def fail_at_b(name: str) -> str:
        result = await linger(path, name)
        if name == "b":
            raise KeyError(name)
        return result

    results = fail_at_b.map("abcde", limit=4)
    first = asyncio.ensure_future(results.__anext__())
    await gate.entered("a", "b", "c")
    gate.release("b")
    await gate.entered("d")
    assert not first.done(), "the result before the error is not lost"
    gate.release("a")
    assert await first == "a"
    await raises(KeyError, results.__anext__, match="b")
    await gate.entered("c-cancelled", "d-cancelled")


@only_local
async def test_a_map_stops_with_its_consumer_and_its_node(
    gate: Gate, linger: RemoteFunction[[str], str]
) -> None:
    """"""
    task = asyncio.ensure_future(linger.map("abc", limit=3).__anext__())
    await gate.entered("a", "b")
    task.cancel()
    await gate.entered("a-cancelled", "b-cancelled")
    assert await tasks.add.remote(1) == 2
    assert "c" not in gate.pids, "waiting tasks are cancelled before running ones"
    results = linger.map(names(), limit=4)
    task = asyncio.ensure_future(results.__anext__())
    await gate.entered("1", "2")
    await aiogpu.shutdown()
    await raises(errors.NodeClosedError, task)


@only_local
@pytest.mark.own_node
def test_a_program_that_ends_amid_maps_leaves_nothing() -> None:
    async def main() -> None:
        await aiogpu.init(num_cpus=2)
        for source in (names(), later_names()):
            results = tasks.echo.map(source)
            kept.append((results, await anext(results)))

    kept: list[Any] = []
    aiogpu.run(main())
    assert [result for _, result in kept] == ["1", "1"]


@pytest.mark.needs("at once")
@pytest.mark.aiogpu(num_cpus=1)
async def test_a_chunk_is_stopped_in_the_middle(gate: Gate) -> None:
    path = gate.path
    spin = tasks.spin.__wrapped__

    @aiogpu.remote
    def spin_at_b(name: str) -> str:
        if name == "b":
            spin(path, name)
        return name

    async with spin_at_b.map("abc", chunk=3) as results:
        task = asyncio.ensure_future(anext(results))  # type: ignore[arg-type]
        await gate.entered("b")
        assert not task.done()
    await gate.entered("b-interrupted")
    await asyncio.wait([task])
    assert await tasks.add.remote(1) == 2


@pytest.mark.parametrize("task", [tasks.echo, check_later])
@pytest.mark.own_node
async def test_a_stopped_chunk_of_coroutines_is_silent(
    address: str, task: RemoteFunction[[int], int], capfd: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        for _ in range(10):
            async with task.map(range(500), chunk=10) as results:
                await anext(results)
        assert await tasks.add.remote(1) == 2
    assert "never awaited" not in "".join(capfd.readouterr())


# Progress bars over results: tqdm reads the length and iterates.


async def test_tqdm_draws_a_bar_over_results() -> None:
    drawn = io.StringIO()
    bar = tqdm(tasks.add.map(range(50), chunk="auto"), file=drawn)
    assert bar.total == 50
    assert await listed(bar) == list(range(1, 51))
    assert "50/50" in drawn.getvalue()
    bar = tqdm(tasks.add.map(iter(range(5))), file=drawn)
    assert bar.total is None
    assert await listed(bar) == [1, 2, 3, 4, 5]
    bar = tqdm(check.map(range(9), chunk=2), file=io.StringIO())
    await raises(ValueError, listed(bar), match="7")
    assert bar.n == 7
    handles = [tasks.add.remote(number) for number in range(5)]
    bar = tqdm(aiogpu.as_completed(handles), file=io.StringIO())
    assert bar.total == 5
    assert {await handle async for handle in bar} == {1, 2, 3, 4, 5}


# Waits


async def test_a_program_waits_for_tasks_calls_and_values() -> None:
    """Of tasks that give or fail."""
    async with map_tasks.Plus.remote() as actor:
        fails = tasks.fail.remote(KeyError, 2)
        value: Any = aiogpu.put(5)
        handles: list[Any] = [tasks.add.remote(1), fails, value]
        handles += [actor.add.remote(number) for number in range(5, 15)]
        assert await aiogpu.wait(handles, num_returns=13) == (handles, [])
        outcomes = {
            str(handle.exception()) if handle.exception() else handle.result()
            async for handle in aiogpu.as_completed(handles)
        }
        assert outcomes == {2, "2", 5, *range(6, 16)}
        total = await map_tasks.sum_of_given.remote([value, *handles[3:5]])
        assert total == 5 + 6 + 7


@pytest.mark.parametrize("task", [map_tasks.sum_of, map_tasks.sum_of_later])
@pytest.mark.aiogpu(num_cpus=1)
async def test_a_task_waits_for_its_children(address: str, task: Any) -> None:
    """On one CPU, which the task lends while it waits."""
    assert sorted(await task.remote(6)) == [1, 2, 3, 4, 5, 6]
    if address == "local":
        assert sorted(await task.remote(1_000)) == list(range(1, 1_001))


@pytest.mark.needs("at once")
@pytest.mark.aiogpu(num_cpus=3)
async def test_a_wait_gives_the_first_tasks_that_end(gate: Gate) -> None:
    handles = [tasks.gated.remote(gate.path, name) for name in "abc"]
    await gate.entered("a", "b", "c")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(aiogpu.wait(handles), 0.001)
    assert await aiogpu.wait(handles, timeout=0) == ([], handles)
    completed = aiogpu.as_completed(handles)
    for name in "bca":
        gate.release(name)
        assert (await anext(completed)).result() == name  # type: ignore[call-overload]
