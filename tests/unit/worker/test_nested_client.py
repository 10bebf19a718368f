"""The client of a task that starts tasks: declarations, waits, threads, actors."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aiogpu.client.current import Context
from aiogpu.client.function_spec import Function, FunctionSpec
from aiogpu.client.references import Loans
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.errors import NodeClosedError
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.payload import unpack
from aiogpu.serialization.references import ActorReference
from aiogpu.serialization.serializer import NO_ARGUMENTS
from aiogpu.wire.messages import Cancel, Declare, Hold, Returned, Submit, Wait
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from tests.unit.worker.conftest import DriverEnd


class FakeReceiver:
    """A receiver that ignores its result."""

    def settle(self, outcome: object) -> None: ...


def func(number: int = 7) -> FunctionSpec:
    spec = TaskSpec("train", Shape(Request()))
    return FunctionSpec(number, Function(1, b"function"), spec, {}, {}, False)


TRAIN = func()


@pytest.fixture
def children(channel: Channel, context: Context) -> Iterator[TaskClient]:
    """The client of task 3."""
    context.task = 3
    children = context.client = TaskClient(channel)
    yield children
    children.end_task()


def test_functions_are_declared_again_when_there_are_too_many(
    children: TaskClient, driver: DriverEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.client.node_client.DECLARED", 2)
    for number in (1, 2, 1, 3, 1):
        children.submit(func(number), b"", FakeReceiver())
    messages = [driver.next() for _ in range(9)]
    numbers = [message.func for message in messages if isinstance(message, Declare)]
    assert numbers == [1, 2, 3, 1], "the third one displaced the others"


def test_wait_message_lists_bound_children_of_the_main_thread_first(
    children: TaskClient, driver: DriverEnd
) -> None:
    """Its children come first, whichever thread reports the waits."""
    main = threading.get_ident()
    children.note_wait("thread", (1,), is_bound=True)
    children.note_wait(main, (2, 3), is_bound=True)
    children.note_wait("thread", (4,))
    children.note_wait(main, (2,))
    children.note_wait(main, (3,), is_bound=True)
    children.end_wait(main)
    children.note_wait("thread", ())
    assert [driver.next() for _ in range(6)] == [
        Wait(3, (1,), 0),
        Wait(3, (2, 3, 1), 2),
        Wait(3, (2, 3, 4), 2),
        Wait(3, (4, 2), 0),
        Wait(3, (3, 4), 1),
        Wait(3, (), 0),
    ]


async def test_a_loop_that_waits_for_more_does_not_name_all_again(
    children: TaskClient, driver: DriverEnd
) -> None:
    """A task may wait for thousands of children, each time for another one."""
    waits = children.waits

    async def turn(*begun: int, settled: int = 0, given_up: int = 0) -> None:
        for child in begun:
            waits.begin_wait(child)
        waits.settle(settled)
        waits.end_wait(given_up)
        await asyncio.sleep(0)

    await turn(1, 2)
    await turn(3, settled=1)
    await turn(4, settled=4)
    children.note_wait("thread", (9,))
    await turn(5)
    await turn(6, given_up=2)
    await turn(given_up=6)
    for child in (3, 5):
        await turn(settled=child)
    await turn(7)
    await turn(given_up=7)
    await turn(8)
    assert [driver.next() for _ in range(9)] == [
        Wait(3, (1, 2)),
        Wait(3, (3,), is_more=True),
        Wait(3, (2, 3, 9)),
        Wait(3, (5,), is_more=True),
        Wait(3, (9, 3, 5, 6)),
        Wait(3, (9, 3, 5)),
        Wait(3, (7,), is_more=True),
        Wait(3, (9,)),
        Wait(3, (9, 8)),
    ]


def test_loop_is_woken_by_any_reader(children: TaskClient, driver: DriverEnd) -> None:
    woken: list[bool] = []
    children.submit(TRAIN, b"", FakeReceiver())
    children.wake = lambda: woken.append(True)
    driver.send(Cancel(3))
    children.wait_until(lambda: bool(woken))
    driver.hang_up()
    with pytest.raises(NodeClosedError):
        children.wait_until(lambda: False)
    assert len(woken) >= 2, "the end of the driver wakes the loop too"


def test_call_holds_the_actors_that_its_function_refers_to(
    children: TaskClient, driver: DriverEnd, channel: Channel, page: ControlPage
) -> None:
    """The parent may drop the actor before the child starts."""
    channel.loans = Loans("", "", page, Interrupts(page), press=bool)
    actor = ActorReference(11, children.actor(11))
    closure = replace(TRAIN, function=Function(2, b"function", (actor,)))
    del actor
    assert driver.next() == Hold(11)
    children.submit(closure, NO_ARGUMENTS, FakeReceiver())
    del closure
    children.submit(TRAIN, b"", FakeReceiver())
    declare, submit, returned, _ = (driver.next() for _ in range(4))
    assert isinstance(declare, Declare)
    assert isinstance(submit, Submit)
    contents = unpack(submit.payload)
    assert (contents.stream, contents.actors) == (NO_ARGUMENTS, (11,))
    assert returned == Returned((11,), (1,))


def test_actors_of_two_workers_have_different_numbers(
    channel: Channel, driver: DriverEnd, page: ControlPage, context: Context
) -> None:
    """A worker that started a million tasks before uses other numbers too."""
    channel.loans = Loans("", "", page, Interrupts(page), press=bool)
    actor_ids = set()
    for worker, started in ((7, 1 << 20), (8, 0)):
        context.worker = worker
        context.task = 3
        client = TaskClient(channel)
        client.new_number = itertools.count(started + 1).__next__
        actor_ids.add(client.make(TRAIN, b"").id)
    assert len(actor_ids) == 2
