"""Tasks that start tasks: handles of children, `get`, and reported waits."""

from __future__ import annotations

import threading

import pytest

import aiogpu
from aiogpu.client.current import current
from aiogpu.errors import (
    DeserializationError,
    MisuseError,
    OptionError,
    SerializationError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.wire.messages import ChildDone, Withdraw
from aiogpu.worker.nested import TaskClient
from tests.support.waits import turns
from tests.unit.api.fakes import UNREADABLE, FakeChannel, done, start_children, started

# Plain tasks.


def test_get_reports_a_wait_for_unfinished_tasks(channel: FakeChannel) -> None:
    """The node itself notices when all of them have ended."""
    handles = start_children(3)
    channel.put(done(2, "b"))
    assert aiogpu.get(handles[1]) == "b"
    channel.put(done(1, "a"), done(3, "c"))
    assert aiogpu.get([*handles, handles[0]]) == ["a", "b", "c", "a"]
    assert channel.waits == [(2,), (1, 3, 1)]
    assert aiogpu.get(tuple(handles)) == ["a", "b", "c"]
    assert len(channel.waits) == 2, "ended tasks need no wait"


def test_get_has_a_timeout(channel: FakeChannel) -> None:
    handles = start_children(2)
    for value in (-1, True, "1", float("nan")):
        with pytest.raises(OptionError, match="timeout"):
            aiogpu.get(handles, timeout=value)  # type: ignore[arg-type]
    assert channel.waits == []
    channel.put(done(1))
    with pytest.raises(TaskTimeoutError, match=r"1 of 2 .* 0.01 s, such as child"):
        aiogpu.get(handles, timeout=0.01)
    assert channel.waits == [(1, 2), ()], "the end of the wait is reported"
    channel.put(done(2))
    assert aiogpu.get(handles, timeout=60) == [None, None]


def test_unreadable_result_raises_each_time(
    channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another thread reads it while this one waits for it and for others."""
    unreadable, other = start_children(2)

    def wait(_seconds: float | None) -> None:
        if unreadable.done():
            failure = (DeserializationError, unreadable.result)
            thread = threading.Thread(target=pytest.raises, args=failure)
            thread.start()
            thread.join(20)
            channel.put(done(2))

    monkeypatch.setattr(channel, "wait", wait)
    channel.put(ChildDone(1, UNREADABLE))
    for handles in ([unreadable, other], [unreadable], [unreadable]):
        with pytest.raises(DeserializationError):
            aiogpu.get(handles)
    assert other.done()
    assert repr(unreadable) == "<BlockingHandle child failed>"


def test_arguments_that_are_too_large_are_refused(
    channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.client.node_client.LARGEST_PAYLOAD", 2000)

    @aiogpu.remote
    def child(_data: bytes) -> object: ...

    child.remote(bytes(1500))
    with pytest.raises(SerializationError, match=r"the arguments of child\.remote"):
        child.remote(bytes(3000))
    assert channel.submitted == [1]


# Coroutines: waits are reported to the node once per turn of the loop.


async def test_child_is_waited_for_with_a_waiter(loop_channel: FakeChannel) -> None:
    one, two = start_children(2)
    waiters = [await started(one) for _ in range(2)]
    waiters[0].cancel()
    await turns(3)
    other = await started(two)
    assert loop_channel.waits == [(1,), (1, 2)]
    waiters[1].cancel()
    await turns(3)
    assert one.cancelled()
    assert Withdraw(3, 1) in loop_channel.sent
    assert loop_channel.waits[-1] == (2,)
    loop_channel.put(done(2))
    await other


async def test_callbacks_count_as_waits(loop_channel: FakeChannel) -> None:
    one, two = start_children(2)
    done_handles: list[object] = []
    one.add_done_callback(done_handles.append)
    two.add_done_callback(done_handles.append)
    await turns(3)
    assert two.remove_done_callback(done_handles.append) == 1
    await turns(3)
    assert loop_channel.waits == [(1, 2), (1,)]
    loop_channel.put(done(1))
    await one
    one.add_done_callback(done_handles.append)
    await turns(3)
    assert done_handles == [one, one]
    assert loop_channel.waits == [(1, 2), (1,)]
    two.cancel()


async def test_children_are_cancelled_with_their_task(
    loop_channel: FakeChannel,
) -> None:
    """The next task on the loop gets the results of its own children."""
    one, two = start_children(2)
    waiting = await started(one)
    assert isinstance(current.client, TaskClient)
    current.client.end_task()
    with pytest.raises(TaskCancelledError, match="because the task that started it"):
        await waiting
    assert two.done()
    with pytest.raises(MisuseError, match="after the task had ended"):
        start_children(1)
    current.task = 4
    loop_channel.sent.clear()
    (handle,) = start_children(1)
    waiting = await started(handle)
    loop_channel.put(done(3, "b"))
    assert await waiting == "b"
    assert (loop_channel.waits, loop_channel.submitted) == ([(3,)], [3])
