"""[B17] The producer's end of a stream in a worker, over a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from aiogpu.errors import NodeClosedError
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.serializer import load_result
from aiogpu.wire.messages import Demand, Exit, Items
from aiogpu.worker.actors import ThreadWindow
from aiogpu.worker.connection import Channel
from aiogpu.worker.execute import MainThreadWindow
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.invoke import StreamSender, UnsendableError, send_all, send_all_async
from tests.unit.worker.conftest import DriverEnd


class Numbers:
    """A generator that says what becomes of it."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.yielded = 0
        self.how = ""

    def plain(self) -> Iterator[int]:
        try:
            while self.yielded < self.end:
                self.yielded += 1
                yield self.yielded
        except BaseException as error:
            self.how = type(error).__name__
            raise

    async def soft(self) -> AsyncIterator[int]:
        try:
            while self.yielded < self.end:
                self.yielded += 1
                yield self.yielded
        except BaseException as error:
            self.how = type(error).__name__
            raise


def taken(driver: DriverEnd, count: int) -> list[object]:
    """The next items that have come, each in a message of its own."""
    found = []
    for _ in range(count):
        message = driver.next()
        assert type(message) is Items
        assert message.task == 7
        (payload,) = message.payloads
        found.append(load_result(payload))
    return found


def test_items_are_sent_one_by_one_and_those_of_before_are_skipped(
    channel: Channel, driver: DriverEnd
) -> None:
    numbers = Numbers(5)
    send_all(
        numbers.plain(), StreamSender(channel.send, 7, limit=9, skip=2), lambda: None
    )
    assert taken(driver, 3) == [3, 4, 5]
    assert numbers.how == ""


def test_a_held_one_reads_until_there_is_demand(
    channel: Channel, driver: DriverEnd, interrupts: Interrupts
) -> None:
    numbers, flow = Numbers(5), StreamSender(channel.send, 7, limit=2, skip=0)
    items = numbers.plain()
    holding = MainThreadWindow(channel, interrupts, flow)
    for _ in range(2):
        flow.send(next(items))
    assert flow.is_held
    driver.send(Demand(8, 9), Demand(7, 1), Demand(7, 3), Exit())
    holding.hold()
    assert not flow.is_held, "neither another's demand nor an older one counts"
    assert flow.limit == 3
    assert taken(driver, 2) == [1, 2]
    assert channel.next() == Exit(), "what is not for it stays"


def test_one_that_is_cancelled_while_it_is_held_is_closed_at_its_yield(
    channel: Channel, driver: DriverEnd, interrupts: Interrupts, page: ControlPage
) -> None:
    numbers, flow = Numbers(5), StreamSender(channel.send, 7, limit=2, skip=0)
    interrupts.entered = 7
    page.ask(3, 7)
    with pytest.raises(KeyboardInterrupt, match="task 7"):
        send_all(
            numbers.plain(), flow, MainThreadWindow(channel, interrupts, flow).hold
        )
    assert numbers.how == "GeneratorExit"
    assert numbers.yielded == 1
    assert page.heard(3) == 7
    assert interrupts.entered == 0, "no second interrupt lands in its finally"


def test_one_whose_driver_has_gone_is_closed(
    channel: Channel, driver: DriverEnd, interrupts: Interrupts
) -> None:
    numbers, flow = Numbers(5), StreamSender(channel.send, 7, limit=2, skip=0)

    def hang_up_and_hold() -> None:
        if flow.is_held:
            driver.hang_up()
        MainThreadWindow(channel, interrupts, flow).hold()

    with pytest.raises(NodeClosedError):
        send_all(numbers.plain(), flow, hang_up_and_hold)
    assert numbers.how == "GeneratorExit"


def test_an_item_that_cannot_be_sent_names_its_place(
    channel: Channel, driver: DriverEnd
) -> None:
    flow = StreamSender(channel.send, 7, limit=9, skip=0)
    with pytest.raises(UnsendableError, match=r"item 2 .*generator"):
        send_all(iter([1, (each for each in ())]), flow, lambda: None)
    assert taken(driver, 1) == [1]


def test_one_in_a_thread_waits_for_the_thread_that_reads(
    channel: Channel, driver: DriverEnd
) -> None:
    numbers = Numbers(5)
    holding = ThreadWindow(StreamSender(channel.send, 7, limit=1, skip=0))
    caught: list[BaseException] = []

    def run() -> None:
        try:
            send_all(numbers.plain(), holding.flow, holding.hold)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert taken(driver, 1) == [1]
    holding.flow.rise(3)
    assert taken(driver, 2) == [2, 3]
    holding.stop()
    thread.join(timeout=60)
    assert [type(error) for error in caught] == [GeneratorExit]
    assert numbers.how == "GeneratorExit"


@pytest.mark.parametrize("kind", ["plain", "soft"])
async def test_on_a_loop_others_run_while_it_is_held(
    channel: Channel, driver: DriverEnd, kind: str
) -> None:
    numbers, flow = Numbers(3), StreamSender(channel.send, 7, limit=1, skip=0)
    loop = asyncio.get_running_loop()
    items = numbers.plain() if kind == "plain" else numbers.soft()
    task = loop.create_task(send_all_async(items, flow, loop.create_future))
    while not flow.is_held:
        await asyncio.sleep(0)
    assert numbers.yielded == 1
    flow.rise(2)
    while not flow.is_held:
        await asyncio.sleep(0)
    assert taken(driver, 2) == [1, 2]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert numbers.how == "GeneratorExit"
    assert numbers.yielded == 2
