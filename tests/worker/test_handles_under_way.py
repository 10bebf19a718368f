"""Handles to actors that were pickled go along with what their own thread sends."""

from __future__ import annotations

import gc
import threading
from itertools import count

from aiogpu.wire.messages import Declare, Make
from aiogpu.worker.connection import Channel
from aiogpu.worker.context import Context, note_passed, take_kept, take_passing
from aiogpu.worker.nested import Children, hold_for
from tests.worker.driver_end import DriverEnd


def make(actor: int) -> Make:
    return Make(actor, 1, b"", "", "", False)


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

    dropped: list[int] = []
    handle = Handle()
    hold_for(handle, (5, 6), dropped.append)
    assert not dropped
    del handle
    gc.collect()
    assert sorted(dropped) == [5, 6]


def test_what_nobody_wants_is_let_go_at_once() -> None:
    dropped: list[int] = []
    hold_for(None, (5,), dropped.append)
    assert dropped == [5]


def test_no_actor_has_the_number_of_another_workers(
    channel: Channel, driver: DriverEnd, context: Context
) -> None:
    """However much the first has started before: a controller calls all day."""
    made = set()
    for worker, started in ((7, 1 << 20), (8, 0)):
        context.worker = worker
        children = Children(channel)
        children._numbers = count(started + 1)
        made.add(children.make(make, 1, lambda: Declare(1, "Model", b"", b"")))
    assert len(made) == 2
