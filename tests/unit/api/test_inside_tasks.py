"""[B12] What a task has: handles of its children, `get`, its runtime context."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import aiogpu
from aiogpu.api.results.blocking import BlockingHandle
from aiogpu.api.results.handle import ChildHandle
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
from aiogpu.worker.nested import TaskClient, task_client
from tests.support.turns import turns
from tests.unit.api.fakes import (
    UNREADABLE,
    FakeChannel,
    done,
    failed,
    start_children,
    started,
)


def client() -> TaskClient:
    assert current.client is not None
    return current.client


# Plain tasks: what is sent, and what the node is told of waits.


def test_remote_gives_a_blocking_handle(channel: FakeChannel) -> None:
    (handle,) = start_children(1)
    assert isinstance(handle, BlockingHandle)
    assert repr(handle) == "<BlockingHandle child pending>"
    assert handle.task_name == "child"
    declare, submit = channel.sent
    assert isinstance(declare, Declare)
    assert isinstance(submit, Submit)
    assert (declare.name, submit.task, submit.child) == ("child", 3, 1)
    assert declare.func == submit.func
    assert declare.payload


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


@pytest.mark.parametrize("position", [0, 1, 2])
def test_get_raises_the_first_failure(position: int, channel: FakeChannel) -> None:
    handles = start_children(3)
    channel.put(failed(position + 1, KeyError(position)))
    for _ in range(2):
        with pytest.raises(KeyError, match=str(position)):
            aiogpu.get(handles)
    assert channel.waits == [(1, 2, 3), ()], "the second time nothing is waited for"
    others = [n for n in (1, 2, 3) if n != position + 1]
    channel.put(*map(done, others))
    assert aiogpu.get([handles[n - 1] for n in others]) == [None, None]


def test_of_several_failures_get_raises_the_first_in_order(
    channel: FakeChannel,
) -> None:
    handles = start_children(3)
    for number in (3, 2):
        channel.put(failed(number, KeyError(number)))
        with pytest.raises(KeyError):
            aiogpu.get(handles[number - 1])
    with pytest.raises(KeyError, match="2"):
        aiogpu.get(handles)


def test_get_has_a_timeout(channel: FakeChannel) -> None:
    handles = start_children(2)
    for value in (0, -1, True, "1", float("nan")):
        with pytest.raises(OptionError, match="timeout"):
            aiogpu.get(handles, timeout=value)  # type: ignore[arg-type]
    assert channel.waits == []
    channel.put(done(1))
    with pytest.raises(TaskTimeoutError, match=r"1 of 2 .* 0.01 s, child for one"):
        aiogpu.get(handles, timeout=0.01)
    assert channel.waits == [(1, 2), ()], "the node is told that it is over"
    channel.put(done(2))
    assert aiogpu.get(handles, timeout=60) == [None, None]


def test_an_interrupted_get_is_told_to_be_over(
    channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float | None) -> None:
        raise KeyboardInterrupt

    handles = start_children(1)
    monkeypatch.setattr(channel, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        aiogpu.get(handles)
    assert channel.waits == [(1,), ()]


def test_a_cancelled_child(channel: FakeChannel) -> None:
    one, two = start_children(2)
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


def test_a_cancel_by_another_thread_ends_get(channel: FakeChannel) -> None:
    one, two = start_children(2)
    thread = threading.Timer(0, two.cancel)
    thread.start()
    with pytest.raises(TaskCancelledError):
        aiogpu.get([one, two])
    thread.join(20)


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


def test_children_of_a_task_that_has_ended(channel: FakeChannel) -> None:
    handles = start_children(2)
    channel.put(done(1, "in time"))
    assert aiogpu.get(handles[0]) == "in time"
    task_client().end_task()
    with pytest.raises(TaskCancelledError, match="since the task that had started it"):
        aiogpu.get(handles[1])
    assert aiogpu.get(handles[0]) == "in time"
    with pytest.raises(MisuseError, match=r"child\.remote\(\) was called after"):
        start_children(1)


def test_a_process_without_a_task() -> None:
    with pytest.raises(NodeError, match="no task of aiogpu"):
        task_client()


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


async def test_children_are_awaited_on_a_loop(loop_channel: FakeChannel) -> None:
    handles = start_children(4)
    assert all(isinstance(handle, ChildHandle) for handle in handles)
    assert isinstance(handles[0], aiogpu.Handle)
    gathered = asyncio.gather(*handles, return_exceptions=True)
    await turns(3)
    assert loop_channel.waits == [(1, 2, 3, 4)]
    loop_channel.put(done(2, "b"), done(1, "a"), failed(4, KeyError(7)), done(3))
    assert repr(await gathered) == "['a', 'b', None, KeyError(7)]"
    assert [await handles[0], handles[0].result()] == ["a", "a"]
    await turns(3)
    assert len(loop_channel.waits) == 1, "the node knows who has ended"


async def test_a_wait_that_is_over_at_once_is_not_told(
    loop_channel: FakeChannel,
) -> None:
    (handle,) = start_children(1)
    waiting = asyncio.ensure_future(handle.coro())
    loop_channel.put(done(1))
    client().read()
    await waiting
    await turns(3)
    assert loop_channel.waits == []


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


async def test_another_thread_may_read_the_answer(loop_channel: FakeChannel) -> None:
    """Callbacks run on the handle's own loop all the same."""
    handles = start_children(2)
    threads: list[int] = []
    for handle in handles:
        handle.add_done_callback(lambda _: threads.append(threading.get_ident()))
    asyncio.get_running_loop().remove_reader(loop_channel.fileno())
    loop_channel.put(done(1, "a"), failed(2, KeyError(1)))
    for _ in range(2):
        await asyncio.to_thread(client().read)
    found = await asyncio.gather(*handles, return_exceptions=True)
    assert repr(found) == "['a', KeyError(1)]"
    assert threads == [threading.get_ident()] * 2


async def test_awaited_children_of_a_task_that_has_ended(
    loop_channel: FakeChannel,
) -> None:
    """The next task on the loop is told of its own children."""
    one, two = start_children(2)
    waiting = await started(one)
    client().end_task()
    with pytest.raises(TaskCancelledError, match="since the task that had started it"):
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


async def test_a_loop_whose_task_has_ended_reads_no_more(
    loop_channel: FakeChannel,
) -> None:
    start_children(1)
    current.task = 0
    loop_channel.put(done(1))
    await turns()
    assert len(loop_channel.coming) == 1, "it is not this loop's to read"
    assert not asyncio.get_running_loop().remove_reader(loop_channel.fileno())


# The runtime context.

KINDS = ("GPU", "neuron_cores", "TPU", "HPU", "NPU")


def test_the_runtime_context_of_a_program() -> None:
    context = aiogpu.get_runtime_context()
    assert (context.task_id, context.worker_id, context.node_id) == (0, 0, "")
    assert context.actor_id is None
    assert context.assigned_resources == {}
    assert context.get_accelerator_ids() == {key: [] for key in KINDS}
    assert aiogpu.get_gpu_ids() == []
    assert {getattr(Context(), name) or None for name in ("node", "task")} == {None}


def test_the_runtime_context_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, Any] = {
        "task": 7,
        "name": "train",
        "resources": {"GPU": 0.5},
        "accelerators": {"GPU": (3, "GPU-abc"), "FPGA": (0,)},
    }
    for name, value in now.items():
        monkeypatch.setattr(current, name, value)
    context = aiogpu.get_runtime_context()
    assert (context.task_id, context.task_name) == (7, "train")
    ids = {"GPU": ["3", "GPU-abc"], "FPGA": ["0"]}
    assert context.get_accelerator_ids() == {key: [] for key in KINDS} | ids
    assert aiogpu.get_gpu_ids() == [3, "GPU-abc"]
    monkeypatch.setattr(current, "task", 8)
    assert context.task_id == 7, "it is of the moment that it was asked for"
