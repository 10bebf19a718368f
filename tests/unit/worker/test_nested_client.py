"""The tasks that a task starts: their numbers, waits, threads and end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aiogpu.client.current import Context
from aiogpu.client.function_spec import Function, FunctionSpec
from aiogpu.client.references import Loans
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.errors import NodeClosedError, TaskCancelledError
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.payload import unpack
from aiogpu.serialization.references import ActorReference
from aiogpu.serialization.serializer import NO_ARGUMENTS
from aiogpu.wire.messages import (
    Cancel,
    Declare,
    Hold,
    Returned,
    Submit,
    Wait,
)
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from tests.unit.worker.conftest import DriverEnd


class FakeReceiver:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.outcomes: list[object] = []

    def settle(self, outcome: object) -> None:
        is_abandoned = isinstance(outcome, TaskCancelledError)
        self.outcomes.append("abandoned" if is_abandoned else outcome)


def func(number: int = 7) -> FunctionSpec:
    spec = TaskSpec("train", Shape(Request()))
    return FunctionSpec(number, Function(1, b"function"), spec, {}, {}, False)


TRAIN = func()


@pytest.fixture
def children(channel: Channel, context: Context) -> Iterator[TaskClient]:
    """Those of task 3."""
    context.task = 3
    children = context.client = TaskClient(channel)
    yield children
    children.end_task()


def test_sites_are_declared_anew_when_there_are_many(
    children: TaskClient, driver: DriverEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.client.node_client.DECLARED", 2)
    for number in (1, 2, 1, 3, 1):
        children.submit(func(number), b"", FakeReceiver())
    said = [driver.next() for _ in range(9)]
    numbers = [one.func for one in said if isinstance(one, Declare)]
    assert numbers == [1, 2, 3, 1], "all were forgotten with the third"


def test_a_wait_of_the_main_thread_may_be_bound(
    children: TaskClient, driver: DriverEnd
) -> None:
    """Its children are named first, whichever thread says what all wait for."""
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


def test_the_tasks_loop_is_woken_by_other_readers(
    children: TaskClient, driver: DriverEnd
) -> None:
    woken: list[bool] = []
    children.submit(TRAIN, b"", FakeReceiver())
    children.wake = lambda: woken.append(True)
    driver.send(Cancel(3))
    children.wait_until(lambda: bool(woken))
    driver.hang_up()
    with pytest.raises(NodeClosedError):
        children.wait_until(lambda: False)
    assert len(woken) >= 2, "also of the driver's end"


def test_what_a_function_holds_is_held_by_each_of_its_calls(
    children: TaskClient, driver: DriverEnd, channel: Channel, page: ControlPage
) -> None:
    """The parent may have let go of it before the child has begun."""
    channel.loans = Loans("", "", page, Interrupts(page), press=bool)
    actor = ActorReference(11, children.actor(11))
    closure = replace(TRAIN, function=Function(2, b"function", (actor,)))
    del actor
    assert driver.next() == Hold(11)
    children.submit(closure, NO_ARGUMENTS, FakeReceiver())
    del closure
    children.submit(TRAIN, b"", FakeReceiver())
    outcomes = [driver.next() for _ in range(4)]
    assert [type(one) for one in outcomes[:2]] == [Declare, Submit]
    assert isinstance(outcomes[1], Submit)
    contents = unpack(outcomes[1].payload)
    assert (contents.stream, contents.actors) == (NO_ARGUMENTS, (11,))
    assert outcomes[2] == Returned((11,), (1,))


def test_no_actor_has_the_number_of_another_workers(
    channel: Channel, driver: DriverEnd, page: ControlPage, context: Context
) -> None:
    """However much the first has started before: a controller calls all day."""
    channel.loans = Loans("", "", page, Interrupts(page), press=bool)
    made = set()
    for worker, started in ((7, 1 << 20), (8, 0)):
        context.worker = worker
        context.task = 3
        client = TaskClient(channel)
        client.new_number = itertools.count(started + 1).__next__
        made.add(client.make(TRAIN, b"").id)
    assert len(made) == 2
