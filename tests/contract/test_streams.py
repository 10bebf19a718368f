"""[B17] Generators as tasks: items in order, back-pressure, and an early end."""

from __future__ import annotations

import asyncio
import gc
import pickle
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import stream_tasks, tasks
from tests.contract.draining import drained
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


async def idle(cpus: float) -> None:
    """Wait until all resources are free again: the code has stopped."""
    async with asyncio.timeout(30):
        while (await aiogpu.available_resources())["CPU"] != cpus:
            await asyncio.sleep(0)


@pytest.mark.parametrize("generator", stream_tasks.KINDS)
@pytest.mark.parametrize("window", [1, 2, None, 1000])
async def test_all_items_come_in_order(
    address: str, generator: Any, window: int | None
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.options(max_buffered=window).remote(300)
        assert [item async for item in stream] == list(range(300))
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
async def test_leaving_the_loop_ends_the_producer_at_its_yield(
    address: str, gate: Gate, generator: Any
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        async for item in generator.remote(gate.path):
            if item == 7:
                break
        await gate.entered("closed")
        await idle(1.0)
        assert await tasks.add.remote(1) == 2, "its worker goes on"


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
@pytest.mark.parametrize("how", ["aclose", "cancel", "async with", "dropped"])
async def test_the_other_ways_to_end_it_early(
    address: str, gate: Gate, generator: Any, how: str
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.options(max_buffered=1).remote(gate.path)
        assert await anext(stream) == 0
        while "has 1 items" not in repr(stream):
            await asyncio.sleep(0)  # until it stands at its yield
        if how == "aclose":
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
        assert "exit" in gate.pids or ("begun-2" in gate.pids and address == "ray")
        await idle(1.0)


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


@pytest.mark.parametrize("generator", stream_tasks.FAILING)
@pytest.mark.parametrize("good", [0, 1, 200])
async def test_an_error_comes_after_the_items_before_it(
    address: str, generator: Any, good: int
) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        stream = generator.remote(good)
        found, error = await drained(stream)
        assert found == list(range(good))
        assert type(error) is ZeroDivisionError
        assert error.args == ("after", good)
        assert "stream_tasks.py" in str(error.__cause__)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(
            aiogpu.errors.MisuseError, match="ended with ZeroDivisionError"
        ):
            aiter(stream)
        assert await tasks.add.remote(1) == 2


async def test_an_error_in_its_finally(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        with pytest.raises(ValueError, match="in its finally"):
            async for _ in stream_tasks.fails_at_its_end.remote(gate.path):
                pass
        await gate.entered("finally")
        gate.forget("finally")
        async for _ in stream_tasks.fails_at_its_end.remote(gate.path):
            break
        await gate.entered("finally")
        await idle(1.0)


async def test_an_item_that_cannot_be_pickled(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        found, error = await drained(stream_tasks.unsendable.remote(gate.path))
        assert found == [1]
        assert type(error) is aiogpu.errors.SerializationError
        assert re.search(r"unsendable ran, but item 2 .*generator", str(error))
        await gate.entered("closed")


async def test_an_item_that_cannot_be_unpickled_ends_it(
    address: str, gate: Gate
) -> None:
    @aiogpu.remote
    def unreadable(path: str) -> Any:
        from tests.contract.tasks import UnreadableResult
        from tests.support.gate import say

        try:
            yield UnreadableResult("1/0")
            yield from range(10**9)
        finally:
            say(path, "closed")

    async with aiogpu.init(address=address, num_cpus=1):
        found, error = await drained(unreadable.remote(gate.path))
        assert found == []
        assert type(error) is aiogpu.errors.DeserializationError
        assert "ZeroDivisionError" in str(error)
        await gate.entered("closed")
        await idle(1.0)


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
        slow = stream_tasks.gated_softly.options(timeout=1.0)
        found, error = await drained(slow.remote(gate.path))
        assert found == [1]
        assert type(error) is aiogpu.TaskTimeoutError
        await idle(1.0)


@pytest.mark.parametrize(
    "generator", [stream_tasks.doubled, stream_tasks.doubled_softly]
)
@pytest.mark.parametrize("cpus", [1, 2])
async def test_a_stream_of_a_stream(address: str, generator: Any, cpus: int) -> None:
    async with aiogpu.init(address=address, num_cpus=cpus):
        found = [item async for item in generator.options(num_cpus=0).remote(300)]
        assert found == list(range(0, 600, 2))
        async for item in generator.remote(10**9):
            if item == 600:
                break
        await idle(cpus)


@pytest.mark.parametrize("parent", [stream_tasks.total, stream_tasks.total_softly])
async def test_a_task_consumes_its_childs_stream(address: str, parent: Any) -> None:
    """[B12] With one CPU, which the parent gives back while it waits."""
    async with aiogpu.init(address=address, num_cpus=1):
        assert await parent.remote(1000) == sum(range(1000))


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


async def test_many_streams_at_once(address: str) -> None:
    async def consume(number: int) -> int:
        found = 0
        async for item in stream_tasks.numbers_softly.remote(number):
            assert item == found
            found += 1
        return found

    async with aiogpu.init(address=address, num_cpus=2):
        found = await asyncio.gather(*[consume(each % 70) for each in range(1000)])
        assert found == [each % 70 for each in range(1000)]


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


def bounded(**options: Any) -> Any:
    return aiogpu.remote(**options)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_an_ill_valued_window_is_refused(value: Any) -> None:
    with pytest.raises(aiogpu.OptionError, match=re.escape(f"max_buffered={value!r}")):
        stream_tasks.numbers.options(max_buffered=value)
    with pytest.raises(aiogpu.OptionError, match="max_buffered"):
        aiogpu.method(max_buffered=value)


def test_options_that_are_not_a_functions_or_not_a_generators() -> None:
    for refused in (
        lambda: tasks.add.options(max_buffered=2),
        lambda: bounded(max_buffered=2)(len),
        lambda: aiogpu.method(max_buffered=2)(lambda self: 1),
        lambda: bounded(max_buffered=2)(type("A", (), {})),
    ):
        with pytest.raises(aiogpu.OptionError, match="max_buffered"):
            refused()
    with pytest.raises(aiogpu.OptionError, match="num_returns"):
        stream_tasks.numbers.options(num_returns=2)


@pytest.mark.needs("processes")
async def test_a_producer_that_has_died_is_replayed(
    address: str, tmp_path: Path
) -> None:
    """[B24] What was delivered is not delivered again."""
    async with aiogpu.init(address=address, num_cpus=1):
        stream = stream_tasks.dies_after.remote(100, str(tmp_path / "lives"))
        assert [item async for item in stream] == list(range(100))
        assert (tmp_path / "lives").read_text() == "xxx"


@pytest.mark.needs("processes")
async def test_a_producer_that_dies_for_good(address: str, tmp_path: Path) -> None:
    async with aiogpu.init(address=address, num_cpus=1):
        dies = stream_tasks.dies_after.options(max_retries=0)
        found, error = await drained(dies.remote(100, str(tmp_path / "lives")))
        assert found == list(range(11)), "all that it had yielded"
        assert type(error) is aiogpu.WorkerDiedError
        assert "dies_after" in str(error)


async def test_an_error_that_is_retried_goes_on_where_it_was(
    address: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "lives")

    @aiogpu.remote(retry_exceptions=[OSError], max_retries=2)
    def flaky() -> Any:
        lives = Path(path)
        lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
        for number in range(90):
            yield number
            if number == 40 * len(lives.read_text()):
                raise OSError("again")

    async with aiogpu.init(address=address, num_cpus=1):
        assert [item async for item in flaky.remote()] == list(range(90))
        assert Path(path).read_text() == "xxx"
