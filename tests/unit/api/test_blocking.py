"""[B12] `aiogpu.get` and its handles, between a task and its worker's socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api.results.blocking import BlockingHandle
from aiogpu.client.current import Context, current
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    NodeError,
    OptionError,
    SerializationError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.wire.messages import ChildDone, Declare, Submit, Withdraw
from aiogpu.worker.nested import task_client
from tests.unit.api.paper_family import PaperChannel, done, failed, paper_children


@pytest.fixture
def channel() -> Iterator[PaperChannel]:
    """That of a worker which runs task 3."""
    before = {name: getattr(current, name) for name in Context.__slots__}
    channel = PaperChannel()
    current.task, current.client = 3, paper_children(channel)
    yield channel
    for name, value in before.items():
        setattr(current, name, value)
    channel.close()


def start(count: int) -> list[Any]:
    @aiogpu.remote
    def child() -> object: ...

    return [child.remote() for _ in range(count)]


def test_remote_gives_a_blocking_handle(channel: PaperChannel) -> None:
    (handle,) = start(1)
    assert isinstance(handle, BlockingHandle)
    assert repr(handle) == "<BlockingHandle child pending>"
    assert handle.task_name == "child"
    declare, submit = channel.sent
    assert isinstance(declare, Declare)
    assert isinstance(submit, Submit)
    assert (declare.name, submit.task, submit.child) == ("child", 3, 1)
    assert declare.func == submit.func
    assert declare.payload


def test_a_wait_is_told_and_its_end_is_not(channel: PaperChannel) -> None:
    """The driver sees for itself when all have ended."""
    handles = start(3)
    channel.put(done(3, "c"), done(1, "a"), done(2, "b"))
    assert aiogpu.get(handles) == ["a", "b", "c"]
    assert channel.waits == [(1, 2, 3)]
    assert aiogpu.get(handles[1]) == "b"
    assert aiogpu.get(tuple(handles)) == ["a", "b", "c"]
    assert channel.waits == [(1, 2, 3)], "what has ended is not waited for"


def test_only_what_has_not_ended_is_waited_for(channel: PaperChannel) -> None:
    handles = start(3)
    channel.put(done(2, "b"))
    aiogpu.get(handles[1])
    channel.put(done(1), done(3))
    aiogpu.get([*handles, handles[0]])
    assert channel.waits == [(2,), (1, 3, 1)]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_first_failure_is_raised(position: int, channel: PaperChannel) -> None:
    handles = start(3)
    channel.put(failed(position + 1, KeyError(position)))
    for _ in range(2):
        with pytest.raises(KeyError, match=str(position)):
            aiogpu.get(handles)
    assert channel.waits == [(1, 2, 3), ()], "the second time nothing is waited for"
    others = [n for n in (1, 2, 3) if n != position + 1]
    channel.put(*map(done, others))
    assert aiogpu.get([handles[n - 1] for n in others]) == [None, None]


def test_of_several_failures_the_first_in_order(channel: PaperChannel) -> None:
    handles = start(3)
    for handle, error in zip(handles, (None, KeyError(1), KeyError(2)), strict=True):
        if error is not None:
            channel.put(failed(handle.task_id, error))
            with pytest.raises(KeyError):
                aiogpu.get(handle)
    with pytest.raises(KeyError, match="1"):
        aiogpu.get(handles)


def test_a_limited_wait_is_told_to_be_over(channel: PaperChannel) -> None:
    handles = start(2)
    channel.put(done(1))
    with pytest.raises(TaskTimeoutError, match=r"1 of 2 .* 0.01 s .* child for one"):
        aiogpu.get(handles, timeout=0.01)
    assert channel.waits == [(1, 2), ()]
    channel.put(done(2))
    assert aiogpu.get(handles, timeout=60) == [None, None]


@pytest.mark.parametrize("timeout", [0, -1, True, "1", float("nan")])
def test_ill_valued_limits(timeout: Any, channel: PaperChannel) -> None:
    with pytest.raises(OptionError, match="timeout"):
        aiogpu.get(start(1), timeout=timeout)
    assert channel.waits == []


def test_an_interrupted_wait_is_told_to_be_over(
    channel: PaperChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float | None) -> None:
        raise KeyboardInterrupt

    handles = start(1)
    monkeypatch.setattr(channel, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        aiogpu.get(handles)
    assert channel.waits == [(1,), ()]


def test_cancelling(channel: PaperChannel) -> None:
    one, two = start(2)
    assert one.cancel()
    assert channel.sent[-1] == Withdraw(3, 1)
    assert (one.cancelled(), one.done(), one.cancel()) == (True, True, False)
    for look in (one.result, lambda: aiogpu.get(one), lambda: aiogpu.get([two, one])):
        with pytest.raises(TaskCancelledError, match="child was cancelled"):
            look()
    channel.put(done(1), done(2, "late"))
    assert aiogpu.get(two) == "late"
    assert two.cancel() is False
    assert one.cancelled(), "a result that comes late is nobody's"


def test_a_cancel_by_another_thread_ends_the_wait(channel: PaperChannel) -> None:
    one, two = start(2)
    thread = threading.Timer(0, two.cancel)
    thread.start()
    with pytest.raises(TaskCancelledError):
        aiogpu.get([one, two])
    thread.join(20)


def test_an_unreadable_result_is_unreadable_for_ever(channel: PaperChannel) -> None:
    (handle,) = start(1)
    channel.put(ChildDone(1, b"no pickle"))
    for _ in range(3):
        with pytest.raises(DeserializationError):
            aiogpu.get(handle)
    assert repr(handle) == "<BlockingHandle child failed>"


def test_another_thread_may_find_that_it_is_unreadable(
    channel: PaperChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so while this one waits for the same, and for more."""
    one, two = start(2)

    def look(_seconds: float | None) -> None:
        if one.done():
            thread = threading.Thread(target=pytest.raises, args=failure)
            thread.start()
            thread.join(20)
            channel.put(done(2))

    failure = (DeserializationError, one.result)
    monkeypatch.setattr(channel, "wait", look)
    channel.put(ChildDone(1, b"no pickle"))
    with pytest.raises(DeserializationError):
        aiogpu.get([one, two])
    assert two.done()


def test_what_is_left_when_the_task_ends(channel: PaperChannel) -> None:
    handles = start(2)
    channel.put(done(1, "in time"))
    assert aiogpu.get(handles[0]) == "in time"
    task_client().end_task()
    with pytest.raises(TaskCancelledError, match="since the task that had started it"):
        aiogpu.get(handles[1])
    assert aiogpu.get(handles[0]) == "in time"
    with pytest.raises(MisuseError, match=r"child\.remote\(\) was called after"):
        start(1)


def test_a_process_without_a_task() -> None:
    with pytest.raises(NodeError, match="no task of aiogpu"):
        task_client()


def test_arguments_that_are_too_large(
    channel: PaperChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.client.node_client.LARGEST_PAYLOAD", 2000)

    @aiogpu.remote
    def child(_data: bytes) -> object: ...

    child.remote(bytes(1500))
    with pytest.raises(SerializationError, match=r"the arguments of child\.remote"):
        child.remote(bytes(3000))
    assert channel.started == [1]
