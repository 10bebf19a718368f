"""Actors in a worker: threads that share a connection, streams, and polling."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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


def serve(executor: Executor, instance: object, threads: int = 1) -> None:
    creation = Create(0, 0, b"", 0, THREADED, {DEFAULT_GROUP: threads}, {})
    ThreadedActor(executor, instance, creation).serve()


def test_call_that_another_method_reads_is_started(
    driver: DriverEnd, channel: Channel, executor: Executor, children: TaskClient
) -> None:
    """The kernel does not wake a thread whose bytes another thread has read."""
    is_asleep, has_read = threading.Event(), threading.Event()
    wait = channel.wait

    def wait_for_bytes_that_a_method_reads(seconds: float | None) -> None:
        if not has_read.is_set():
            is_asleep.set()
            assert has_read.wait(60)
        wait(seconds)

    channel.wait = wait_for_bytes_that_a_method_reads  # type: ignore[method-assign]
    answers: list[Any] = []

    def read_in_a_method() -> None:
        assert is_asleep.wait(60)
        driver.send(Invoke(1, "say", dump_arguments("say", (7,), {})))
        wait(None)
        children.read()
        has_read.set()
        answers.append(driver.next())
        driver.send(Leave())

    method = threading.Thread(target=read_in_a_method)
    method.start()
    serve(executor, Echo(), threads=2)
    method.join(60)
    assert [type(answer) for answer in answers] == [Done]


class FakeHandle:
    """A handle to actor 5."""

    def __init__(self, client: TaskClient) -> None:
        self._hold = client.actor(5)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        add_actor(5, self._hold)
        return int, (5,)


class Giver:
    def __init__(self, client: TaskClient) -> None:
        self._client = client

    def give(self) -> FakeHandle:
        return FakeHandle(self._client)


def test_result_holds_the_actors_in_it_until_it_is_sent(
    driver: DriverEnd,
    channel: Channel,
    executor: Executor,
    children: TaskClient,
    page: ControlPage,
) -> None:
    """The result holds them until it is sent; the method's own loan ends earlier."""
    channel.loans = Loans("", "", page, Interrupts(page), press=bool)
    driver.send(Invoke(1, "give", dump_arguments("give", (), {})), Leave())
    serve(executor, Giver(children))
    children.report_ended_loans()
    hold, done, returned = (driver.next() for _ in range(3))
    assert (hold, returned) == (Hold(5), Returned((5,), (1,)))
    assert isinstance(done, Done)
    assert unpack(done.payload).actors == (5,)


class Counter:
    def count(self) -> Iterator[int]:
        yield from range(1000)


def test_stream_is_stopped_when_its_actor_ends(
    driver: DriverEnd, channel: Channel, executor: Executor, children: TaskClient
) -> None:
    messages: list[Any] = []

    def read_one_item() -> None:
        messages.append(driver.next())
        driver.send(Leave())

    driver.send(Invoke(1, "count", dump_arguments("count", (), {}), 1))
    consumer = threading.Thread(target=read_one_item)
    consumer.start()
    serve(executor, Counter())
    consumer.join(60)
    messages.append(driver.next())
    assert [type(message) for message in messages] == [Items, Failed]
    assert messages[1].kind == STOPPED


CALLS = 5


class CountingActor(AsyncActor):
    """An async actor that counts how often it polls."""

    polls = 0

    def _glance(self) -> None:
        self.polls += 1
        super()._glance()


class AsyncEcho:
    async def say(self, word: int) -> int:
        return word


def test_async_actor_polls_while_calls_come_quickly(
    executor: Executor,
    channel: Channel,
    driver: DriverEnd,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call() -> None:
        for number in range(1, CALLS + 1):
            payload = dump_arguments("say", (number,), {})
            driver.send(Invoke(number, "say", payload))
            answer = driver.next()
            assert isinstance(answer, Done), answer
            answers.append(answer.task)
        driver.send(Leave())

    channel.may_stay_awake = True
    monkeypatch.setattr("aiogpu.worker.async_actor.perf_counter", lambda: 0.0)
    actor, answers = CountingActor(executor, AsyncEcho()), list[int]()
    caller = threading.Thread(target=call)
    caller.start()
    actor.serve()
    caller.join(60)
    assert answers == [*range(1, CALLS + 1)]
    assert actor.polls >= CALLS - 1
