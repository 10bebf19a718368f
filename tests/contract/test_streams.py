"""[B17] Generators as tasks and methods: order, back-pressure, errors, early ends."""

from __future__ import annotations

import asyncio
import gc
import pickle
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import stream_tasks, tasks
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


async def drained(stream: AsyncIterator[Any]) -> tuple[list[Any], Exception]:
    """Its items, and the error after them."""
    found: list[Any] = []
    try:
        async for item in stream:
            found.append(item)  # noqa: PERF401 - those before an error
    except Exception as error:
        return found, error
    raise AssertionError("it has come to its end")


async def idle(cpus: float) -> None:
    """Wait until all resources are free again: the code has stopped."""
    async with asyncio.timeout(30):
        while (await aiogpu.available_resources())["CPU"] != cpus:
            await asyncio.sleep(0)


@pytest.mark.parametrize("generator", stream_tasks.KINDS)
async def test_all_items_come_in_order(address: str, generator: Any) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        for window in (1, 2, None, 1000):
            stream = generator.options(max_buffered=window).remote(150)
            assert [item async for item in stream] == list(range(150))
        assert [item async for item in generator.remote(0)] == []


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
@pytest.mark.parametrize("window", [1, 5])
async def test_a_producer_is_no_further_ahead_than_its_window(
    address: str, gate: Gate, generator: Any, window: int
) -> None:
    bounded = generator.options(max_buffered=window)
    async with (
        aiogpu.init(address=address, num_cpus=1),
        bounded.remote(gate.path) as stream,
    ):
        for taken in range(12):
            assert await anext(stream) == taken
            await gate.entered(f"begun-{taken + 1}")
            last = max(int(name[6:]) for name in gate.pids)
            assert last <= taken + window


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "async with", "dropped"])
async def test_ending_it_early_ends_the_producer_at_its_yield(
    address: str, gate: Gate, generator: Any, how: str
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.options(max_buffered=1).remote(gate.path)
        assert await anext(stream) == 0
        while "has 1 items" not in repr(stream):
            await asyncio.sleep(0)  # until it stands at its yield
        if how == "break":
            async for item in stream:
                if item == 7:
                    break
            del stream
        elif how == "aclose":
            async with aclosing(stream):
                pass
            await stream.aclose()
        elif how == "cancel":
            assert stream.cancel()
            assert not stream.cancel()
        elif how == "async with":
            async with stream as same:
                assert same is stream
        else:
            del stream
            gc.collect()
        await gate.entered("closed")
        # On Ray one more may wait there, and it is ended amid its code for that one.
        amid = how == "break" or address == "ray"
        assert "exit" in gate.pids or ("begun-2" in gate.pids and amid)
        await idle(1.0)
        assert await tasks.add.remote(1) == 2, "its worker goes on"


BLOCKING = pytest.mark.needs("interrupts")


@pytest.mark.parametrize(
    "generator",
    [pytest.param(stream_tasks.gated, marks=BLOCKING), stream_tasks.gated_softly],
)
async def test_a_producer_amid_its_code_is_interrupted_there(
    address: str, gate: Gate, generator: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        async for _ in generator.remote(gate.path):
            await gate.entered("inside")
            break
        is_soft = generator is stream_tasks.gated_softly
        await gate.entered("inside-cancelled" if is_soft else "interrupted")
        await idle(1.0)


@pytest.mark.needs("processes")
async def test_a_producer_that_hears_nothing_is_killed(
    address: str, gate: Gate
) -> None:
    """[B15]"""

    async with aiogpu.init(address=address, num_cpus=1):
        async for _ in stream_tasks.deaf.remote(gate.path):
            await gate.entered("deaf")
            break
        await idle(1.0)


@pytest.mark.parametrize("generator", stream_tasks.GATED)
@pytest.mark.needs("at once")
async def test_an_item_comes_at_once_though_its_producer_goes_on(
    address: str, gate: Gate, generator: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.remote(gate.path)
        assert await anext(stream) == 1
        await gate.entered("inside")
        rest = asyncio.ensure_future(anext(stream))
        gate.release("inside")
        assert await rest == 2
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
async def test_a_cancelled_consumer_stops_the_producer(
    address: str, gate: Gate, generator: Any
) -> None:
    """[B15] Who waits for the next item is the only one who does."""
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.options(max_buffered=1).remote(gate.path)

        async def consume() -> None:
            async for _ in stream:
                pass

        consumer = asyncio.create_task(consume())
        await gate.entered("begun-3")
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await gate.entered("closed")
        with pytest.raises(aiogpu.errors.MisuseError, match="was cancelled"):
            await anext(stream)
        await idle(1.0)


@pytest.mark.needs("at once")
async def test_who_waits_learns_of_cancel_and_of_aclose(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        streams = [stream_tasks.gated_softly.remote(gate.path) for _ in range(2)]
        for stream in streams:
            assert await anext(stream) == 1
        waiters = [asyncio.ensure_future(anext(stream, "over")) for stream in streams]
        await asyncio.sleep(0)
        streams[0].cancel()
        await streams[1].aclose()
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]
        assert await waiters[1] == "over"
        await idle(2.0)


async def test_a_stream_is_one_consumers(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = stream_tasks.gated_softly.remote(gate.path)
        assert await anext(stream) == 1
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # the producer may be there already: until it waits
        await gate.entered("inside")
        with pytest.raises(aiogpu.errors.MisuseError, match="another asyncio task"):
            await anext(stream)
        gate.release("inside")
        assert await first == 2
        assert [item async for item in stream] == []
        with pytest.raises(
            aiogpu.errors.MisuseError, match=r"iterated to its end.*once"
        ):
            aiter(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert not stream.cancel()


async def test_what_a_stream_is_not(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = stream_tasks.numbers.remote(2)
        assert stream.task_name == "numbers"
        for misuse in (bool, pickle.dumps):
            with pytest.raises(aiogpu.errors.MisuseError, match="numbers"):
                misuse(stream)
        with pytest.raises(
            aiogpu.errors.MisuseError, match=r"for item in numbers\.remote"
        ):
            await stream
        assert [item async for item in stream] == [0, 1]
        assert (
            repr(stream)
            == f"<Stream of numbers {stream.task_id}: was iterated to its end>"
        )
        with pytest.raises(aiogpu.errors.MisuseError, match="map"):
            stream_tasks.numbers.map([1])
        with pytest.raises(aiogpu.errors.MisuseError, match="async for"):
            stream_tasks.numbers(1)


async def test_its_timeout_counts_from_remote(address: str, gate: Gate) -> None:
    """[B25] What came in time can be taken."""
    async with aiogpu.init(address=address, num_cpus=1):
        timeout, found = 0.1, []
        while not found:  # nothing had come in time: a worker was started meanwhile
            timeout *= 2
            slow = stream_tasks.gated_softly.options(timeout=timeout)
            found, error = await drained(slow.remote(gate.path))
            assert type(error) is aiogpu.TaskTimeoutError
        assert found == [1]
        await idle(1.0)


@pytest.mark.parametrize(
    "parent",
    [
        pytest.param(stream_tasks.first_of_endless, marks=BLOCKING),
        stream_tasks.first_of_endless_softly,
    ],
)
async def test_a_task_leaves_its_childs_stream_early(
    address: str, gate: Gate, parent: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        handle = parent.remote(gate.path)
        await gate.entered("closed", "parent")
        gate.release("parent")
        assert await handle == 3
        await idle(2.0)


async def test_what_plain_code_is_told_of_its_stream(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        *told, rest = await stream_tasks.misuses.remote()
        assert len(told) == 4
        assert all("numbers" in each for each in told)
        assert rest == "[]", "it was closed"


async def test_a_node_that_closes_ends_its_streams(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        held = stream_tasks.endless.remote(gate.path)
        waited = stream_tasks.gated_softly.remote(gate.path)
        assert await anext(held) == 0
        assert await anext(waited) == 1
        waiter = asyncio.ensure_future(anext(waited))
        await gate.entered("inside")
    await gate.entered("closed")
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await waiter
    with pytest.raises(aiogpu.errors.NodeClosedError):
        async for _ in held:
            pass


async def test_why_tells_where_its_task_is(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = stream_tasks.endless.options(max_buffered=2).remote(gate.path)
        await gate.entered("begun-1")
        async with asyncio.timeout(30):
            while "waits for its consumer" not in str(why := await stream.why()):
                await asyncio.sleep(0)
        # Ray does not tell of a task whether it runs.
        assert why.state == ("sent" if address == "ray" else "running")
        status = await aiogpu.status()
        assert [task.name for task in status.tasks] == ["endless"]
        stream.cancel()
        assert (await stream.why()).outcome == "it was cancelled"
        whole = stream_tasks.numbers.remote(1)
        assert [item async for item in whole] == [0]
        assert (await whole.why()).outcome == "it gave its last item"


@pytest.mark.parametrize("generator", stream_tasks.FAILING)
async def test_an_error_comes_after_the_items_before_it(
    address: str, generator: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        for good in (0, 1, 200):
            stream = generator.remote(good)
            found, error = await drained(stream)
            assert found == list(range(good))
            assert type(error) is ZeroDivisionError
            assert error.args == ("after", good)
            assert "stream_tasks.py" in str(error.__cause__)
            for _ in range(2):
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            with pytest.raises(
                aiogpu.errors.MisuseError, match="ended with ZeroDivisionError"
            ):
                aiter(stream)
        assert await tasks.add.remote(1) == 2


async def test_items_that_cannot_travel_and_errors_at_the_end(
    address: str, gate: Gate
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        found, error = await drained(stream_tasks.unsendable.remote(gate.path))
        assert found == [1]
        assert type(error) is aiogpu.errors.SerializationError
        assert re.search(r"unsendable ran, but item 2 .*generator", str(error))
        await gate.entered("closed")
        gate.forget("closed")
        found, error = await drained(stream_tasks.unreadable.remote(gate.path))
        assert found == []
        assert type(error) is aiogpu.errors.DeserializationError
        assert "ZeroDivisionError" in str(error)
        await gate.entered("closed")
        found, error = await drained(stream_tasks.fails_at_its_end.remote(gate.path))
        assert (found, str(error)) == ([1, 2], "in its finally")
        await gate.entered("finally")
        gate.forget("finally")
        async for _ in stream_tasks.fails_at_its_end.remote(gate.path):
            break
        await gate.entered("finally")
        await idle(1.0)


@pytest.mark.parametrize("way", ["plain", "coroutine"])
async def test_a_task_consumes_its_childs_stream(address: str, way: str) -> None:
    """[B12] With one CPU, which the parent gives back while it waits."""
    is_soft = way == "coroutine"
    total = stream_tasks.total_softly if is_soft else stream_tasks.total
    doubled: Any = stream_tasks.doubled_softly if is_soft else stream_tasks.doubled
    async with aiogpu.init(address=address, num_cpus=1):
        assert await total.remote(1000) == sum(range(1000))
        found = [item async for item in doubled.options(num_cpus=0).remote(300)]
        assert found == list(range(0, 600, 2))
        async for item in doubled.remote(10**9):
            if item == 600:
                break
        await idle(1.0)


async def test_many_streams_at_once(address: str) -> None:
    async def consume(number: int) -> list[int]:
        return [item async for item in stream_tasks.numbers_softly.remote(number)]

    async with aiogpu.init(address=address, num_cpus=2):
        found = await asyncio.gather(*[consume(each % 70) for each in range(140)])
        assert found == [[*range(each % 70)] for each in range(140)]


def test_options_of_streams() -> None:
    for value in (0, -1, 1.5, True, "many"):
        told = re.escape(f"max_buffered={value!r}")
        with pytest.raises(aiogpu.OptionError, match=told):
            stream_tasks.numbers.options(max_buffered=value)
        with pytest.raises(aiogpu.OptionError, match="max_buffered"):
            aiogpu.method(max_buffered=value)  # type: ignore[call-overload]
    bounded: Any = aiogpu.remote(max_buffered=2)
    for refused in (
        lambda: tasks.add.options(max_buffered=2),
        lambda: bounded(len),
        lambda: aiogpu.method(max_buffered=2)(lambda self: 1),
        lambda: bounded(type("A", (), {})),
    ):
        with pytest.raises(aiogpu.OptionError, match="max_buffered"):
            refused()
    with pytest.raises(aiogpu.OptionError, match="num_returns"):
        stream_tasks.numbers.options(num_returns=2)


@pytest.mark.needs("processes")
async def test_a_producer_that_dies(address: str, tmp_path: Path) -> None:
    """[B24] It is replayed; what was delivered is not delivered again."""
    async with aiogpu.init(address=address, num_cpus=1):
        stream = stream_tasks.dies_after.remote(100, str(tmp_path / "again"))
        assert [item async for item in stream] == list(range(100))
        assert (tmp_path / "again").read_text() == "xxx"
        dies = stream_tasks.dies_after.options(max_retries=0)
        found, error = await drained(dies.remote(100, str(tmp_path / "once")))
        assert found == list(range(11)), "all that it had yielded"
        assert type(error) is aiogpu.WorkerDiedError
        assert "dies_after" in str(error)


async def test_an_error_that_is_retried_goes_on_where_it_was(
    address: str, tmp_path: Path
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        flaky = stream_tasks.flaky.remote(str(tmp_path / "lives"))
        assert [item async for item in flaky] == list(range(90))
        assert (tmp_path / "lives").read_text() == "xxx"


# Methods of actors that are generators


KINDS = pytest.mark.parametrize(
    "kind",
    [
        stream_tasks.Serial,
        pytest.param(stream_tasks.Threaded, marks=pytest.mark.needs("threads")),
        stream_tasks.Async,
    ],
)


@KINDS
async def test_a_methods_items_errors_and_early_ends(
    address: str, kind: Any, gate: Gate
) -> None:
    """[B29] The actor goes on."""
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote(gate.path)
        for name in ("count", *["softly"] * (kind is stream_tasks.Async)):
            method = actor.count_softly if name == "softly" else actor.count
            for end in (300, 0):
                assert [each async for each in method.remote(end)] == [*range(end)]
                await gate.entered(name)
                gate.forget(name)
            async for each in method.remote(10**9):
                if each == 100:
                    break
            await gate.entered(name)
            assert (await actor.has_ended.remote())[-3:] == [name] * 3
        found, error = await drained(actor.fail.remote(70))
        assert found == list(range(70))
        assert type(error) is ZeroDivisionError
        with pytest.raises(aiogpu.errors.MisuseError, match="map"):
            actor.count.map([1])
        async with aiogpu.ActorPool(kind, 1) as pool:
            with pytest.raises(aiogpu.errors.MisuseError, match="generator"):
                pool.count.remote(1)


@KINDS
async def test_one_ahead_is_one_ahead(address: str, kind: Any, gate: Gate) -> None:
    """Streams interleave where calls do; else each occupies its actor."""
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote(gate.path)
        async with actor.slowly.remote() as stream:
            for taken in range(5):
                assert await anext(stream) == taken
                await gate.entered(f"begun-{taken + 1}")
                assert f"begun-{taken + 2}" not in gate.pids
            other = actor.has_ended.remote()
            if kind is stream_tasks.Serial:
                assert [await anext(stream) for _ in range(5)] == [*range(5, 10)]
                assert not other.done()
            else:
                assert await other == []
                streams = [actor.slowly.remote() for _ in range(2)]
                for number in range(4):
                    assert [await anext(each) for each in streams] == [number] * 2
                for each in streams:
                    await each.aclose()
        assert await other == []
        assert [each async for each in actor.count.remote(2)] == [0, 1]


@KINDS
async def test_a_task_consumes_an_actors_stream(address: str, kind: Any) -> None:
    consumers = [stream_tasks.sum_softly]
    if not (address == "inline" and kind is stream_tasks.Async):
        consumers.append(stream_tasks.sum_of)  # blocks the loop's thread
    async with aiogpu.init(address=address, num_cpus=1):
        actor = kind.remote()
        for consumer in consumers:
            assert await consumer.remote(actor) == sum(range(500))


@KINDS
@pytest.mark.needs("processes")
async def test_an_actor_that_dies_amid_a_stream(address: str, kind: Any) -> None:
    """One that is restarted, and may try calls again, goes on where it was."""
    lasting = kind.options(max_restarts=1, max_task_retries=1)
    async with aiogpu.init(address=address, num_cpus=1):
        actor, found = lasting.remote(), []
        async for each in actor.count.remote(1000):
            found.append(each)
            if each == 300:
                aiogpu.kill(actor, no_restart=False)
        assert found == list(range(1000))
        stream = actor.count.remote(10**9)
        assert [await anext(stream) for _ in range(100)] == list(range(100))
        aiogpu.kill(actor)
        found, error = await drained(stream)
        assert found == list(range(100, 100 + len(found)))
        assert type(error) is aiogpu.ActorDiedError


@pytest.mark.needs("processes")
@pytest.mark.parametrize("kind", [stream_tasks.Threaded, stream_tasks.Async])
async def test_a_stream_of_an_actor_that_another_call_ends(
    address: str, kind: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        actor = await kind.remote()
        method = actor.count if kind is stream_tasks.Threaded else actor.count_softly
        stream = method.remote(10_000)
        assert await anext(stream) == 0
        with pytest.raises(aiogpu.ActorDiedError, match="exit_actor"):
            await actor.leave.remote()
        _, error = await drained(stream)
        assert "exit_actor" in str(error)


@pytest.mark.usefixtures("each_engine")
async def test_a_call_before_the_node_is_open() -> None:
    actor = stream_tasks.Async.remote()
    stream = actor.count.remote(3)
    dropped = actor.count.remote(3)
    await dropped.aclose()
    assert [each async for each in stream] == [0, 1, 2]
    await aiogpu.shutdown()


async def test_handles_of_actors_go_either_way(address: str) -> None:
    """[B29] They live as long as somebody has them or waits for them."""
    async with aiogpu.init(address=address, num_cpus=1):
        stream = stream_tasks.asks.remote(stream_tasks.Async.remote(), 70)
        assert [each async for each in stream] == [[]] * 70
        async for actor in stream_tasks.makes.remote(3):
            assert [each async for each in actor.count.remote(2)] == [0, 1]
            assert await actor.has_ended.remote() == ["count"]
