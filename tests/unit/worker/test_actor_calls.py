"""Actors in a worker: threads that read for each other, and an async actor's waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from aiogpu.client.current import current
from aiogpu.client.references import Loans
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.serialization.payload import unpack
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import dump_arguments
from aiogpu.wire.messages import (
    DEFAULT_GROUP,
    THREADED,
    Create,
    Done,
    Failed,
    Hold,
    Invoke,
    Items,
    Leave,
    Returned,
)
from aiogpu.worker.actors import ThreadedActor
from aiogpu.worker.async_actor import AsyncActor
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from tests.unit.worker.conftest import DriverEnd


class Echo:
    def say(self, word: int) -> int:
        return word


@pytest.fixture
def children(channel: Channel, executor: Executor) -> Iterator[TaskClient]:
    current.client = executor.client
    channel.admit_guests(True)
    yield executor.client
    current.client = None


def test_a_call_that_a_method_has_read_is_begun(
    driver: DriverEnd, channel: Channel, executor: Executor, children: TaskClient
) -> None:
    """The kernel lets a thread sleep on whose bytes another reads before it wakes."""
    is_asleep, has_read = threading.Event(), threading.Event()
    wait = channel.wait

    def wait_for_bytes_that_a_method_reads(seconds: float | None) -> None:
        if not has_read.is_set():
            is_asleep.set()
            assert has_read.wait(60)
        wait(seconds)

    channel.wait = wait_for_bytes_that_a_method_reads  # type: ignore[method-assign]
    answers: list[Any] = []

    def read_for_it() -> None:
        assert is_asleep.wait(60)
        driver.send(Invoke(1, "say", dump_arguments("say", (7,), {})))
        wait(None)
        children.read()
        has_read.set()
        answers.append(driver.next())
        driver.send(Leave())

    method = threading.Thread(target=read_for_it)
    method.start()
    creation = Create(0, 0, b"", 0, THREADED, {DEFAULT_GROUP: 2}, {})
    ThreadedActor(executor, Echo(), creation).serve()
    method.join(60)
    assert [type(one) for one in answers] == [Done]


class Given:
    """Stands for a handle to actor 5."""

    def __init__(self, client: TaskClient) -> None:
        self._hold = client.actor(5)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        add_actor(5, self._hold)
        return int, (5,)


class Giver:
    def __init__(self, client: TaskClient) -> None:
        self._client = client

    def give(self) -> Given:
        return Given(self._client)


def test_a_result_holds_the_actors_whose_handles_it_has(
    driver: DriverEnd,
    channel: Channel,
    executor: Executor,
    children: TaskClient,
    page: ControlPage,
) -> None:
    """Until it is sent: its own loan of them is over before, in whichever thread."""
    channel.loans = Loans("", "", page, Interrupts(page), press=bool)
    driver.send(Invoke(1, "give", dump_arguments("give", (), {})), Leave())
    creation = Create(0, 0, b"", 0, THREADED, {DEFAULT_GROUP: 1}, {})
    ThreadedActor(executor, Giver(children), creation).serve()
    children.tell_dropped()
    told = [driver.next() for _ in range(3)]
    assert (told[0], told[2]) == (Hold(5), Returned((5,), (1,)))
    assert isinstance(told[1], Done)
    assert unpack(told[1].payload).actors == (5,)


class Counter:
    def count(self) -> Iterator[int]:
        yield from range(1000)


def test_a_stream_that_its_actors_end_stops_is_no_failure_of_its_own(
    driver: DriverEnd, channel: Channel, executor: Executor, children: TaskClient
) -> None:
    told: list[Any] = []

    def read_one_item() -> None:
        told.append(driver.next())
        driver.send(Leave())

    driver.send(Invoke(1, "count", dump_arguments("count", (), {}), 1))
    consumer = threading.Thread(target=read_one_item)
    consumer.start()
    creation = Create(0, 0, b"", 0, THREADED, {DEFAULT_GROUP: 1}, {})
    ThreadedActor(executor, Counter(), creation).serve()
    consumer.join(60)
    told.append(driver.next())
    assert [type(one) for one in told] == [Items, Failed]
    assert told[1].kind == STOPPED


CALLS = 5


class CountingActor(AsyncActor):
    """Counts its glances."""

    looks = 0

    def _glance(self) -> None:
        self.looks += 1
        super()._glance()


class AsyncEcho:
    async def say(self, word: int) -> int:
        return word


@pytest.fixture
def actor(executor: Executor) -> CountingActor:
    return CountingActor(executor, AsyncEcho())


def play(actor: CountingActor, driver: DriverEnd) -> None:
    """Call it one at a time, then have it leave."""

    def call() -> None:
        for number in range(1, CALLS + 1):
            payload = dump_arguments("say", (number,), {})
            driver.send(Invoke(number, "say", payload))
            answer = driver.next()
            assert isinstance(answer, Done), answer
            answers.append(answer.task)
        driver.send(Leave())

    answers: list[int] = []
    caller = threading.Thread(target=call)
    caller.start()
    actor.serve()
    caller.join(60)
    assert answers == [*range(1, CALLS + 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_clock(ticks: Iterator[float]) -> None:
        path = "aiogpu.worker.async_actor.perf_counter"
        monkeypatch.setattr(path, lambda: next(ticks))

    return set_clock


def test_calls_in_quick_succession_find_it_polling(
    actor: CountingActor, channel: Channel, driver: DriverEnd, clock: Any
) -> None:
    channel.may_stay_awake = True
    clock(repeat(0.0))  # no wait lasts any time
    play(actor, driver)
    assert actor.looks >= CALLS - 1
