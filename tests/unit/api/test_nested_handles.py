"""[B12] Handles of a task's children on an event loop: who is told of which waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api.results.handle import ChildHandle
from aiogpu.client.current import Context, current
from aiogpu.errors import TaskCancelledError
from aiogpu.wire.messages import Withdraw
from aiogpu.worker.nested import TaskClient
from tests.unit.api.paper_family import PaperChannel, done, failed, paper_children


@pytest.fixture
async def channel() -> AsyncIterator[PaperChannel]:
    """That of a worker which runs task 3, on a loop of the task's own."""
    before = {name: getattr(current, name) for name in Context.__slots__}
    channel = PaperChannel()
    current.task, current.client = 3, paper_children(channel)
    yield channel
    asyncio.get_running_loop().remove_reader(channel.fileno())
    for name, value in before.items():
        setattr(current, name, value)
    channel.close()


def start(count: int) -> list[Any]:
    @aiogpu.remote
    def child() -> object: ...

    return [child.remote() for _ in range(count)]


async def turn() -> None:
    """Let the loop come round."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_remote_gives_a_handle(channel: PaperChannel) -> None:
    (handle,) = start(1)
    assert isinstance(handle, ChildHandle)
    assert isinstance(handle, aiogpu.Handle)
    channel.put(done(1, "a"))
    assert await handle == "a"
    assert await handle == "a"
    assert handle.result() == "a"


async def test_waits_are_told_once_a_turn(channel: PaperChannel) -> None:
    handles = start(3)
    gathered = asyncio.gather(*handles)
    await turn()
    assert channel.waits == [(1, 2, 3)]
    channel.put(done(2), done(1), done(3))
    assert await gathered == [None] * 3
    await turn()
    assert channel.waits == [(1, 2, 3)], "the driver knows who has ended"


async def test_a_wait_that_is_over_at_once_is_not_told(channel: PaperChannel) -> None:
    (handle,) = start(1)
    waiting = asyncio.ensure_future(handle.coro())
    channel.put(done(1))
    family().read()
    await waiting
    await turn()
    assert channel.waits == []


async def test_two_waiters_of_one_child(channel: PaperChannel) -> None:
    one, two = start(2)
    waiters = [asyncio.ensure_future(one.coro()) for _ in range(2)]
    await turn()
    waiters[0].cancel()
    await turn()
    other = asyncio.ensure_future(two.coro())
    await turn()
    assert channel.waits == [(1,), (1, 2)]
    waiters[1].cancel()
    await turn()
    assert one.cancelled()
    assert Withdraw(3, 1) in channel.sent
    assert channel.waits[-1] == (2,)
    channel.put(done(2))
    await other


async def test_a_failure(channel: PaperChannel) -> None:
    one, two = start(2)
    channel.put(failed(1, KeyError(7)), done(2))
    found = await asyncio.gather(one, two, return_exceptions=True)
    assert repr(found) == "[KeyError(7), None]"


async def test_callbacks_are_waits_too(channel: PaperChannel) -> None:
    one, two = start(2)
    told: list[object] = []
    one.add_done_callback(told.append)
    two.add_done_callback(told.append)
    await turn()
    assert two.remove_done_callback(told.append) == 1
    await turn()
    assert channel.waits == [(1, 2), (1,)]
    channel.put(done(1))
    await one
    await turn()
    assert told == [one]
    one.add_done_callback(told.append)
    await turn()
    assert told == [one, one]
    assert channel.waits == [(1, 2), (1,)]
    two.cancel()


async def test_another_thread_may_read_the_answer(channel: PaperChannel) -> None:
    """It is told on its own loop all the same."""
    handles = start(2)
    threads: list[int] = []
    for handle in handles:
        handle.add_done_callback(lambda _: threads.append(threading.get_ident()))
    asyncio.get_running_loop().remove_reader(channel.fileno())
    channel.put(done(1, "a"), failed(2, KeyError(1)))

    def read() -> None:
        for _ in range(2):
            family().read()

    await asyncio.to_thread(read)
    found = await asyncio.gather(*handles, return_exceptions=True)
    assert repr(found) == "['a', KeyError(1)]"
    assert threads == [threading.get_ident()] * 2


def family() -> TaskClient:
    assert current.client is not None
    return current.client


async def test_what_is_left_when_the_task_ends(channel: PaperChannel) -> None:
    one, two = start(2)
    waiting = asyncio.ensure_future(one.coro())
    await turn()
    family().end_task()
    with pytest.raises(TaskCancelledError, match="since the task that had started it"):
        await waiting
    assert two.done()
    with pytest.raises(aiogpu.errors.MisuseError, match="after the task had ended"):
        start(1)


async def test_the_next_task_is_told_of_its_own(channel: PaperChannel) -> None:
    start(1)
    family().end_task()
    current.task = 4
    channel.sent.clear()
    (handle,) = start(1)
    waiting = asyncio.ensure_future(handle.coro())
    await turn()
    channel.put(done(2, "b"))
    assert await waiting == "b"
    assert channel.waits == [(2,)]
    assert channel.started == [2]


async def test_a_loop_whose_task_has_ended_reads_no_more(channel: PaperChannel) -> None:
    start(1)
    current.task = 0
    channel.put(done(1))
    await turn()
    assert len(channel.coming) == 1, "it is not this loop's to read"
    assert not asyncio.get_running_loop().remove_reader(channel.fileno())
