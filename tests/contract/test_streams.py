"""Generators as tasks and methods: order, back-pressure, errors, early ends."""

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
from aiogpu import errors
from aiogpu.types import Node
from tests.contract import stream_tasks, tasks
from tests.support.gate import Gate
from tests.support.waits import until, until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]
BLOCKING = pytest.mark.needs("interrupts")
BLOCKED = pytest.mark.needs("interrupts", "wakes")


async def drained(stream: AsyncIterator[Any]) -> tuple[list[Any], Exception]:
    """Return the items of a stream, and the error after them."""
    items: list[Any] = []
    try:
        async for item in stream:
            items.append(item)  # noqa: PERF401 - an error may follow
    except Exception as error:
        return items, error
    raise AssertionError("the stream ended without an error")


@pytest.mark.parametrize("generator", stream_tasks.KINDS)
async def test_all_items_come_in_order(node: Node, generator: Any) -> None:
    for window in (1, 2, None, 1000):
        stream = generator.options(max_buffered=window).remote(150)
        assert [item async for item in stream] == list(range(150))
    assert [item async for item in generator.remote(0)] == []


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
@pytest.mark.parametrize("window", [1, 5])
async def test_a_producer_stays_within_its_window(
    node: Node, gate: Gate, generator: Any, window: int
) -> None:
    bounded = generator.options(max_buffered=window)
    async with bounded.remote(gate.path) as stream:
        for taken in range(12):
            assert await anext(stream) == taken
            await gate.entered(f"begun-{taken + 1}")
            last = max(int(name[6:]) for name in gate.pids)
            assert last <= taken + window


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "async with", "dropped"])
async def test_an_early_end_closes_the_producer_at_its_yield(
    address: str, node: Node, gate: Gate, generator: Any, how: str
) -> None:
    stream = generator.options(max_buffered=1).remote(gate.path)
    assert await anext(stream) == 0
    # Until the producer waits at its yield.
    await until(lambda: "1 items to take" in repr(stream))
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
    # On Ray a second item may wait, and the producer is stopped before its next yield.
    is_amid_code = how == "break" or address == "ray"
    assert "exit" in gate.pids or ("begun-2" in gate.pids and is_amid_code)
    await until_free(CPU=1)
    assert await tasks.add.remote(1) == 2, "the worker goes on"


@pytest.mark.parametrize(
    "generator",
    [
        pytest.param(
            stream_tasks.gated, marks=pytest.mark.needs("interrupts", "wakes")
        ),
        stream_tasks.gated_softly,
    ],
)
async def test_an_early_end_interrupts_a_producer_amid_its_code(
    node: Node, gate: Gate, generator: Any
) -> None:
    async for _ in generator.remote(gate.path):
        await gate.entered("inside")
        break
    is_soft = generator is stream_tasks.gated_softly
    await gate.entered("inside-cancelled" if is_soft else "interrupted")
    await until_free(CPU=1)


@pytest.mark.needs("processes")
async def test_a_producer_that_will_not_end_is_killed(node: Node, gate: Gate) -> None:
    async for _ in stream_tasks.deaf.remote(gate.path):
        await gate.entered("deaf")
        break
    await until_free(CPU=1)


@pytest.mark.parametrize("generator", stream_tasks.GATED)
@pytest.mark.needs("at once")
async def test_items_come_while_tasks_go_on(
    node: Node, gate: Gate, generator: Any
) -> None:
    stream = generator.remote(gate.path)
    assert await anext(stream) == 1
    await gate.entered("inside")
    rest = asyncio.ensure_future(anext(stream))
    gate.release("inside")
    assert await rest == 2
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("generator", stream_tasks.GATED)
@pytest.mark.needs("at once")
async def test_a_late_item_ends_a_stream_unless_its_wait_is_kept(
    node: Node, gate: Gate, generator: Any
) -> None:
    stream = generator.remote(gate.path)
    assert await anext(stream) == 1
    await gate.entered("inside")
    item = asyncio.ensure_future(anext(stream))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(item), 0.001)
    gate.release("inside")
    assert await asyncio.wait_for(asyncio.shield(item), 60) == 2
    late = generator.remote(gate.path)
    assert await anext(late) == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(late), 0.001)
    with pytest.raises(errors.MisuseError, match="was cancelled, and can be iterated"):
        await anext(late)
    await until_free(CPU=1)


@pytest.mark.parametrize("generator", stream_tasks.ENDLESS)
async def test_a_cancel_stops_the_producer(
    node: Node, gate: Gate, generator: Any
) -> None:
    """The consumer was the only one to wait for the next item."""
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
    with pytest.raises(errors.MisuseError, match="was cancelled"):
        await anext(stream)
    await until_free(CPU=1)


@pytest.mark.needs("at once")
@pytest.mark.aiogpu(num_cpus=2)
async def test_a_waiting_consumer_learns_of_the_end(node: Node, gate: Gate) -> None:
    streams = [stream_tasks.gated_softly.remote(gate.path) for _ in range(2)]
    assert [await anext(stream) for stream in streams] == [1, 1]
    waiters = [asyncio.ensure_future(anext(stream, "over")) for stream in streams]
    await asyncio.sleep(0)
    streams[0].cancel()
    await streams[1].aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiters[0]
    assert await waiters[1] == "over"
    await until_free(CPU=2)


async def test_a_stream_has_one_consumer(node: Node, gate: Gate) -> None:
    stream = stream_tasks.gated_softly.remote(gate.path)
    assert await anext(stream) == 1
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # until `first` waits: the producer may be at the gate
    await gate.entered("inside")
    with pytest.raises(errors.MisuseError, match="another asyncio task"):
        await anext(stream)
    gate.release("inside")
    assert await first == 2
    assert [item async for item in stream] == []
    with pytest.raises(errors.MisuseError, match=r"iterated to its end.*once"):
        aiter(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert not stream.cancel()


async def test_a_stream_used_as_a_handle_raises(node: Node) -> None:
    stream = stream_tasks.numbers.remote(2)
    assert stream.task_name == "numbers"
    for misuse, hint in (
        *((lambda: bool(stream), "numbers"), (lambda: pickle.dumps(stream), "numbers")),
        (lambda: stream_tasks.numbers.map([1]), "map"),
        (lambda: stream_tasks.numbers(1), "async for"),
    ):
        with pytest.raises(errors.MisuseError, match=hint):
            misuse()
    with pytest.raises(errors.MisuseError, match=r"for item in numbers\.remote"):
        await stream
    assert [item async for item in stream] == [0, 1]
    end = f"{stream.task_id}: was iterated to its end"
    assert repr(stream) == f"<Stream of numbers {end}>"


async def test_the_timeout_counts_from_remote(node: Node, gate: Gate) -> None:
    """Items that came in time can be taken."""
    timeout, items = 0.1, []
    while not items:  # no item came in time: a worker was started meanwhile
        timeout *= 2
        slow = stream_tasks.gated_softly.options(timeout=timeout)
        items, error = await drained(slow.remote(gate.path))
        assert type(error) is aiogpu.TaskTimeoutError
    assert items == [1]
    await until_free(CPU=1)


@pytest.mark.parametrize(
    "parent",
    [
        pytest.param(stream_tasks.first_of_endless, marks=BLOCKING),
        stream_tasks.first_of_endless_softly,
    ],
)
@pytest.mark.aiogpu(num_cpus=2)
async def test_a_task_may_leave_a_stream_early(
    node: Node, gate: Gate, parent: Any
) -> None:
    handle = parent.remote(gate.path)
    await gate.entered("closed", "parent")
    gate.release("parent")
    assert await handle == 3
    await until_free(CPU=2)


async def test_a_stream_used_as_a_handle_in_plain_code_raises(node: Node) -> None:
    *messages, rest = await stream_tasks.misuses.remote()
    assert len(messages) == 4
    assert all("numbers" in message for message in messages)
    assert rest == "[]", "the stream was closed"


async def test_a_closing_node_ends_its_streams(address: str, gate: Gate) -> None:
    async with aiogpu.init(address=address, num_cpus=2):
        idle = stream_tasks.endless.remote(gate.path)
        awaited = stream_tasks.gated_softly.remote(gate.path)
        assert (await anext(idle), await anext(awaited)) == (0, 1)
        waiter = asyncio.ensure_future(anext(awaited))
        await gate.entered("inside")
    await gate.entered("closed")
    with pytest.raises(errors.NodeClosedError):
        await waiter
    with pytest.raises(errors.NodeClosedError):
        async for _ in idle:
            pass


async def test_why_explains_a_stream(address: str, node: Node, gate: Gate) -> None:
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
async def test_an_error_comes_after_its_items(node: Node, generator: Any) -> None:
    for good in (0, 1, 200):
        stream = generator.remote(good)
        items, error = await drained(stream)
        assert (items, type(error)) == ([*range(good)], ZeroDivisionError)
        assert error.args == ("after", good)
        assert "stream_tasks.py" in str(error.__cause__)
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        with pytest.raises(errors.MisuseError, match="ended with ZeroDivisionError"):
            aiter(stream)
    assert await tasks.add.remote(1) == 2


async def test_an_unpicklable_item_ends_its_producer(node: Node, gate: Gate) -> None:
    """So does an item that cannot be unpickled; an error in `finally` is raised."""
    for task, sent, kind, message in (
        ("unsendable", [1], "Serial", r"unsendable ran, but item 2 .*generator"),
        ("unreadable", [], "Deserial", "ZeroDivisionError"),
    ):
        items, error = await drained(getattr(stream_tasks, task).remote(gate.path))
        assert items == sent
        assert type(error) is getattr(errors, f"{kind}izationError")
        assert re.search(message, str(error))
        await gate.entered("closed")
        gate.forget("closed")
    items, error = await drained(stream_tasks.fails_at_its_end.remote(gate.path))
    assert (items, str(error)) == ([1, 2], "in its finally")
    await gate.entered("finally")
    gate.forget("finally")
    async for _ in stream_tasks.fails_at_its_end.remote(gate.path):
        break
    await gate.entered("finally")
    await until_free(CPU=1)


@pytest.mark.parametrize("way", ["plain", "coroutine"])
async def test_tasks_read_their_childrens_streams(node: Node, way: str) -> None:
    """The node has one CPU, which the parent gives back while it waits."""
    soft = "_softly" if way == "coroutine" else ""
    total: Any = getattr(stream_tasks, f"total{soft}")
    doubled: Any = getattr(stream_tasks, f"doubled{soft}")
    assert await total.remote(1000) == sum(range(1000))
    items = [item async for item in doubled.options(num_cpus=0).remote(300)]
    assert items == list(range(0, 600, 2))
    async for item in doubled.remote(10**9):
        if item == 600:
            break
    await until_free(CPU=1)


@pytest.mark.aiogpu(num_cpus=2)
async def test_many_streams_run_at_once(node: Node) -> None:
    async def consume(length: int) -> list[int]:
        return [item async for item in stream_tasks.numbers_softly.remote(length)]

    lengths = [number % 70 for number in range(140)]
    items = await asyncio.gather(*map(consume, lengths))
    assert items == [[*range(length)] for length in lengths]


def test_max_buffered_is_checked() -> None:
    for value in (0, -1, 1.5, True, "many"):
        message = re.escape(f"max_buffered={value!r}")
        with pytest.raises(aiogpu.OptionError, match=message):
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
async def test_a_replayed_producer_repeats_no_item(node: Node, tmp_path: Path) -> None:
    stream = stream_tasks.dies_after.remote(100, str(tmp_path / "again"))
    assert [item async for item in stream] == list(range(100))
    assert (tmp_path / "again").read_text() == "xxx"
    dies = stream_tasks.dies_after.options(max_retries=0)
    items, error = await drained(dies.remote(100, str(tmp_path / "once")))
    assert items == list(range(11)), "all that the producer had yielded"
    assert type(error) is aiogpu.WorkerDiedError
    assert "dies_after" in str(error)


async def test_a_retry_repeats_no_item(node: Node, tmp_path: Path) -> None:
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
async def test_methods_stream_items_and_errors(
    node: Node, kind: Any, gate: Gate
) -> None:
    """The actor goes on after each."""
    actor = kind.remote(gate.path)
    for name in ("count", *["softly"] * (kind is stream_tasks.Async)):
        method = actor.count_softly if name == "softly" else actor.count
        for end in (300, 0):
            assert [item async for item in method.remote(end)] == [*range(end)]
            await gate.entered(name)
            gate.forget(name)
        async for item in method.remote(10**9):
            if item == 100:
                break
        await gate.entered(name)
        assert (await actor.has_ended.remote())[-3:] == [name] * 3
    items, error = await drained(actor.fail.remote(70))
    assert (items, type(error)) == ([*range(70)], ZeroDivisionError)
    with pytest.raises(errors.MisuseError, match="map"):
        actor.count.map([1])
    async with aiogpu.ActorPool(kind, 1) as pool:
        with pytest.raises(errors.MisuseError, match="generator"):
            pool.count.remote(1)


@KINDS
async def test_methods_stay_within_their_window(
    node: Node, kind: Any, gate: Gate
) -> None:
    """Streams interleave if calls do; otherwise a stream occupies its actor."""
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
    assert [item async for item in actor.count.remote(2)] == [0, 1]


@KINDS
async def test_tasks_read_actors_streams(address: str, node: Node, kind: Any) -> None:
    actor = kind.remote()
    assert await stream_tasks.sum_softly.remote(actor) == sum(range(500))
    if not (address == "inline" and kind is stream_tasks.Async):
        # It blocks the loop's thread.
        assert await stream_tasks.sum_of.remote(actor) == sum(range(500))


@KINDS
@pytest.mark.needs("processes")
async def test_a_restarted_actor_repeats_no_item(node: Node, kind: Any) -> None:
    """Nor is an item lost, if calls may be retried."""
    lasting = kind.options(max_restarts=1, max_task_retries=1)
    actor, items = lasting.remote(), []
    async for item in actor.count.remote(1000):
        items.append(item)
        if item == 300:
            aiogpu.kill(actor, no_restart=False)
    assert items == list(range(1000))
    stream = actor.count.remote(10**9)
    assert [await anext(stream) for _ in range(100)] == list(range(100))
    aiogpu.kill(actor)
    items, error = await drained(stream)
    assert items == list(range(100, 100 + len(items)))
    assert type(error) is aiogpu.ActorDiedError


@pytest.mark.needs("processes")
@pytest.mark.parametrize("kind", [stream_tasks.Threaded, stream_tasks.Async])
async def test_a_stream_ends_with_its_actor(node: Node, kind: Any) -> None:
    actor = await kind.remote()
    method = actor.count if kind is stream_tasks.Threaded else actor.count_softly
    stream = method.remote(10_000)
    assert await anext(stream) == 0
    with pytest.raises(aiogpu.ActorDiedError, match="exit_actor"):
        await actor.leave.remote()
    _, error = await drained(stream)
    assert "exit_actor" in str(error)


@pytest.mark.usefixtures("each_engine")
async def test_a_method_may_stream_before_the_node_is_open() -> None:
    actor = stream_tasks.Async.remote()
    stream = actor.count.remote(3)
    dropped = actor.count.remote(3)
    await dropped.aclose()
    assert [item async for item in stream] == [0, 1, 2]
    await aiogpu.shutdown()


async def test_streams_take_and_give_handles_of_actors(node: Node) -> None:
    """An actor lives as long as a program holds its handle or awaits a call."""
    stream = stream_tasks.asks.remote(stream_tasks.Async.remote(), 70)
    assert [item async for item in stream] == [[]] * 70
    async for actor in stream_tasks.makes.remote(3):
        assert [item async for item in actor.count.remote(2)] == [0, 1]
        assert await actor.has_ended.remote() == ["count"]
