"""[B12] What a task has: handles of its children, `get`, its runtime context."""

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
from tests.support.turns import turns
from tests.unit.api.fakes import UNREADABLE, FakeChannel, done, start_children, started


def client() -> TaskClient:
    assert current.client is not None
    return current.client


# Plain tasks: what is sent, and what the node is told of waits.


def test_get_tells_the_node_of_what_has_not_ended(channel: FakeChannel) -> None:
    """The node sees for itself when all have ended."""
    handles = start_children(3)
    channel.put(done(2, "b"))
    assert aiogpu.get(handles[1]) == "b"
    channel.put(done(1, "a"), done(3, "c"))
    assert aiogpu.get([*handles, handles[0]]) == ["a", "b", "c", "a"]
    assert channel.waits == [(2,), (1, 3, 1)]
    assert aiogpu.get(tuple(handles)) == ["a", "b", "c"]
    assert len(channel.waits) == 2, "what has ended is not waited for"


def test_get_has_a_timeout(channel: FakeChannel) -> None:
    handles = start_children(2)
    for value in (-1, True, "1", float("nan")):
        with pytest.raises(OptionError, match="timeout"):
            aiogpu.get(handles, timeout=value)  # type: ignore[arg-type]
    assert channel.waits == []
    channel.put(done(1))
    with pytest.raises(TaskTimeoutError, match=r"1 of 2 .* 0.01 s, such as child"):
        aiogpu.get(handles, timeout=0.01)
    assert channel.waits == [(1, 2), ()], "the node is told that it is over"
    channel.put(done(2))
    assert aiogpu.get(handles, timeout=60) == [None, None]


def test_a_result_that_cannot_be_read_stays_an_error(
    channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another thread finds it, while this one waits for it and for more."""
    one, two = start_children(2)

    def wait(_seconds: float | None) -> None:
        if one.done():
            failure = (DeserializationError, one.result)
            thread = threading.Thread(target=pytest.raises, args=failure)
            thread.start()
            thread.join(20)
            channel.put(done(2))

    monkeypatch.setattr(channel, "wait", wait)
    channel.put(ChildDone(1, UNREADABLE))
    for handles in ([one, two], [one], [one]):
        with pytest.raises(DeserializationError):
            aiogpu.get(handles)
    assert two.done()
    assert repr(one) == "<BlockingHandle child failed>"


def test_arguments_that_are_too_large(
    channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.client.node_client.LARGEST_PAYLOAD", 2000)

    @aiogpu.remote
    def child(_data: bytes) -> object: ...

    child.remote(bytes(1500))
    with pytest.raises(SerializationError, match=r"the arguments of child\.remote"):
        child.remote(bytes(3000))
    assert channel.submitted == [1]


# Coroutines: children are awaited, and the node is told of waits once a turn.


async def test_a_child_is_waited_for_while_it_has_a_waiter(
    loop_channel: FakeChannel,
) -> None:
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


async def test_callbacks_are_waits_too(loop_channel: FakeChannel) -> None:
    one, two = start_children(2)
    told: list[object] = []
    one.add_done_callback(told.append)
    two.add_done_callback(told.append)
    await turns(3)
    assert two.remove_done_callback(told.append) == 1
    await turns(3)
    assert loop_channel.waits == [(1, 2), (1,)]
    loop_channel.put(done(1))
    await one
    one.add_done_callback(told.append)
    await turns(3)
    assert told == [one, one]
    assert loop_channel.waits == [(1, 2), (1,)]
    two.cancel()


async def test_awaited_children_of_a_task_that_has_ended(
    loop_channel: FakeChannel,
) -> None:
    """The next task on the loop is told of its own children."""
    one, two = start_children(2)
    waiting = await started(one)
    client().end_task()
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


# The runtime context.
