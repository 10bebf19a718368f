"""[B17] The consumer's end of a stream, without an engine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiogpu.api.results.blocking import ItemBuffer
from aiogpu.api.results.stream import Stream
from aiogpu.errors import DeserializationError, MisuseError, TaskCancelledError
from aiogpu.observe.why import Why
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_result


class PaperSource:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def demand(self, task: int, limit: int) -> None:
        self.asked.append(("demand", task, limit))

    def cancel(self, task: int) -> None:
        self.asked.append(("cancel", task, 0))

    async def why(self, name: str, task: int) -> Why:
        return Why(name, task, "running")


def items(*values: object) -> tuple[bytes, ...]:
    return tuple(map(dump_result, values))


@pytest.fixture
def source() -> PaperSource:
    return PaperSource()


@pytest.fixture
def inflow(source: PaperSource) -> ItemBuffer:
    inflow = ItemBuffer("train", source, 2)
    inflow.task_id = 7
    return inflow


def test_taking_lets_the_producer_go_on(
    inflow: ItemBuffer, source: PaperSource
) -> None:
    inflow.receive_items(items(1, None))
    assert inflow.is_held
    assert [inflow.take(), inflow.take()] == [1, None]
    assert source.asked == [("demand", 7, 3), ("demand", 7, 4)]
    assert not inflow.is_held


def test_what_was_cancelled_takes_nothing(
    inflow: ItemBuffer, source: PaperSource
) -> None:
    inflow.receive_items(items(1))
    inflow.cancel()
    inflow.cancel()
    inflow.receive_items(items(2))
    inflow.settle(ValueError("late"))
    assert source.asked == [("cancel", 7, 0)]
    assert (list(inflow.buffer), inflow.error, inflow.is_over) == ([], None, True)


def test_the_end_comes_once_and_nothing_is_asked_after_it(
    inflow: ItemBuffer, source: PaperSource
) -> None:
    inflow.receive_items(items(1, 2))
    inflow.settle(NONE_PAYLOAD)
    inflow.settle(TaskCancelledError("its parent has ended"))
    assert inflow.done()
    assert not inflow.is_held
    assert [inflow.take(), inflow.take()] == [1, 2]
    inflow.cancel()
    assert (source.asked, inflow.error) == ([], None)


def test_an_error_of_aiogpu_ends_it(inflow: ItemBuffer) -> None:
    inflow.settle(TaskCancelledError("its parent has ended"))
    assert type(inflow.error) is TaskCancelledError


def test_an_item_that_cannot_be_read(inflow: ItemBuffer) -> None:
    inflow.receive_items((b"no pickle",))
    with pytest.raises(DeserializationError):
        inflow.take()


def new_stream(source: PaperSource) -> Stream[int]:
    return Stream("train", source, 2, asyncio.get_running_loop())


async def test_a_wake_that_comes_late_ends_nothing(source: PaperSource) -> None:
    """Each item that another thread brings wakes the loop a moment later."""
    stream = new_stream(source)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    def feed() -> None:
        stream.inflow.receive_items(items(0))
        stream.inflow.receive_items(items(1))

    thread = threading.Thread(target=feed)
    thread.start()
    thread.join()  # both wakes are posted before the loop sees the first
    assert await waiting == 0
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    for _ in range(5):
        await asyncio.sleep(0)
    stream.inflow.loop.call_soon(stream.inflow.notify)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    stream.inflow.receive_items(items(2))
    assert await waiting == 2


async def test_items_may_come_in_another_thread(source: PaperSource) -> None:
    stream = new_stream(source)

    def feed() -> None:
        for number in range(100):
            stream.inflow.receive_items(items(number))
        stream.inflow.settle(NONE_PAYLOAD)

    thread = threading.Thread(target=feed)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    thread.start()
    assert await waiting == 0
    assert [number async for number in stream] == list(range(1, 100))
    thread.join()


async def test_an_error_is_raised_once_and_named_afterwards(
    source: PaperSource,
) -> None:
    stream = new_stream(source)
    stream.inflow.settle(KeyError("k"))
    assert (await stream.why()).outcome == "it failed with KeyError"
    with pytest.raises(KeyError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(MisuseError, match="ended with KeyError"):
        aiter(stream)


async def test_one_that_is_dropped_is_cancelled_on_its_loop(
    source: PaperSource,
) -> None:
    stream = new_stream(source)
    thread = threading.Thread(target=stream.__del__)
    thread.start()
    thread.join()
    assert source.asked == [], "not in whichever thread it was"
    await asyncio.sleep(0)
    assert source.asked == [("cancel", 0, 0)]


async def test_why_belongs_to_its_loop(source: PaperSource) -> None:
    stream = new_stream(source)
    assert not (await stream.why()).is_ahead
    stream.inflow.receive_items(items(1, 2))
    assert (await stream.why()).is_ahead
    with pytest.raises(MisuseError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, stream.why())
    await stream.aclose()
