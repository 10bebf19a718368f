"""Handles to actors that were pickled go along with what their own thread sends."""

from __future__ import annotations

import gc
import threading
from itertools import count

from aiogpu.client.current import Context, note_passed, take_kept, take_passing
from aiogpu.client.function_spec import Function, FunctionSpec
from aiogpu.client.node_client import NodeClient, hold_for
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.worker.connection import Channel
from aiogpu.worker.nested import TaskClient
from tests.worker.driver_end import DriverEnd

MODEL = FunctionSpec(
    1, Function(1, b""), TaskSpec("Model", Shape(Request())), {}, {}, False
)


class Dropping(NodeClient):
    """Notes which actors it holds no more."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[int] = []

    def drop(self, actor: int) -> None:
        self.dropped.append(actor)


def test_what_another_thread_sends_takes_none_along() -> None:
    others: list[object] = []
    note_passed(5, "tie")
    thread = threading.Thread(target=lambda: others.extend([*take_passing()]))
    thread.start()
    thread.join(60)
    kept = threading.Thread(target=lambda: others.extend(take_kept()))
    kept.start()
    kept.join(60)
    assert not others
    assert take_passing() == (5,)
    assert take_kept() == ["tie"]
    assert take_passing() == ()


def test_a_result_holds_until_its_handle_is_gone() -> None:
    class Handle: ...

    client = Dropping()
    handle = Handle()
    hold_for(handle, (5, 6), client)
    assert not client.dropped
    del handle
    gc.collect()
    assert sorted(client.dropped) == [5, 6]


def test_what_nobody_wants_is_let_go_at_once() -> None:
    client = Dropping()
    hold_for(None, (5,), client)
    assert client.dropped == [5]


def test_no_actor_has_the_number_of_another_workers(
    channel: Channel, driver: DriverEnd, context: Context
) -> None:
    """However much the first has started before: a controller calls all day."""
    made = set()
    for worker, started in ((7, 1 << 20), (8, 0)):
        context.worker = worker
        context.task = 3
        client = TaskClient(channel)
        client.new_number = count(started + 1).__next__
        made.add(client.make(MODEL, b""))
    assert len(made) == 2
