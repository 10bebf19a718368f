"""[B17] The consumer's end of a stream: its items, its demand, its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from aiogpu.api.results.stream import Stream
from aiogpu.errors import MisuseError
from aiogpu.serialization.serializer import dump_result
from tests.support.turns import turns
from tests.unit.api.fakes import Owner


class Producer(Owner):
    """Notes what it is asked for."""

    state = "running"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int, int]] = []

    def demand(self, task: int, limit: int) -> None:
        self.asked.append(("demand", task, limit))

    def cancel(self, task: int) -> None:
        self.asked.append(("cancel", task, 0))


def items(*values: object) -> tuple[bytes, ...]:
    return tuple(map(dump_result, values))


@pytest.fixture
def producer() -> Producer:
    return Producer()


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def new_stream(producer: Producer) -> Stream[int]:
    return Stream("train", producer, 2, asyncio.get_running_loop())


async def test_a_wake_that_comes_late_ends_nothing(producer: Producer) -> None:
    """Each item that another thread brings wakes the loop a moment later."""
    stream = new_stream(producer)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)

    def feed() -> None:
        stream.inflow.receive_items(items(0))
        stream.inflow.receive_items(items(1))

    in_thread(feed)  # both wakes are posted before the loop sees the first
    assert await waiting == 0
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await turns()
    stream.inflow.loop.call_soon(stream.inflow.notify)
    await turns()
    assert not waiting.done()
    stream.inflow.receive_items(items(2))
    assert await waiting == 2


async def test_an_error_is_raised_once_and_named_afterwards(producer: Producer) -> None:
    stream = new_stream(producer)
    stream.inflow.settle(KeyError("k"))
    assert (await stream.why()).outcome == "it failed with KeyError"
    with pytest.raises(KeyError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(MisuseError, match="ended with KeyError"):
        aiter(stream)


async def test_a_dropped_stream_is_cancelled_on_its_loop(producer: Producer) -> None:
    stream = new_stream(producer)
    in_thread(stream.__del__)
    assert producer.asked == [], "not in whichever thread it was"
    await asyncio.sleep(0)
    assert producer.asked == [("cancel", 0, 0)]


async def test_why_belongs_to_its_loop(producer: Producer) -> None:
    stream = new_stream(producer)
    assert not (await stream.why()).is_ahead
    stream.inflow.receive_items(items(1, 2))
    assert (await stream.why()).is_ahead
    with pytest.raises(MisuseError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, stream.why())
    await stream.aclose()
