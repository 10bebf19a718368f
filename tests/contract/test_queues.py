"""`aiogpu.Queue`: order, back-pressure, cancels, ends, and sharing."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import aiogpu
from tests.contract import queue_tasks as q
from tests.support.gate import Gate

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]


async def waiting(queue: aiogpu.Queue[Any], count: int = 1) -> list[Any]:
    """Start gets that wait at the queue's actor."""
    gets = [asyncio.create_task(queue.get()) for _ in range(count)]
    await asyncio.sleep(0)
    await queue.qsize()  # the actor answers after the gets have come
    return gets


async def test_items_come_in_order_and_a_full_queue_blocks() -> None:
    queue: aiogpu.Queue[Any] = aiogpu.Queue(maxsize=2)
    await queue.put("a")
    assert (await queue.empty(), await queue.full()) == (False, False)
    await queue.put("b")
    assert (await queue.qsize(), await queue.full()) == (2, True)
    with pytest.raises(aiogpu.errors.QueueFullError, match="is full with 2 items"):
        await queue.put_nowait("c")
    with pytest.raises(aiogpu.errors.QueueFullError):
        await queue.put("c", timeout=0.01)
    puts = [asyncio.create_task(queue.put(item)) for item in "cd"]
    await asyncio.sleep(0)
    assert [await queue.get() for _ in range(4)] == [*"abcd"]
    await asyncio.gather(*puts)
    with pytest.raises(LookupError):
        await queue.get_nowait()
    with pytest.raises(aiogpu.errors.QueueEmptyError, match=r"no item within 0\.01 s"):
        await queue.get(timeout=0.01)
    gets = await waiting(queue, 3)
    await queue.put_batch(["x", "y", "z"])
    assert await asyncio.gather(*gets) == ["x", "y", "z"]
    with pytest.raises(
        aiogpu.errors.QueueFullError, match="no room for 1 items"
    ) as full:
        await queue.put_batch([1, 2, 3], timeout=0)
    assert full.value.count == 2
    assert await queue.get_batch(10) == [1, 2]
    for call, message in (
        (lambda: aiogpu.Queue(-1), "maxsize=-1"),
        (lambda: queue.get(timeout=-1), "timeout=-1"),
        (lambda: queue.get_batch(0), "most=0"),
        (lambda: aiogpu.Queue(size=3), "size"),
    ):
        with pytest.raises(aiogpu.OptionError, match=message):
            await call()  # type: ignore[misc]


async def test_a_program_and_a_task_share_a_queue() -> None:
    queue: aiogpu.Queue[int] = aiogpu.Queue(maxsize=3)
    drained = q.drain.remote(queue)
    for number in range(20):
        await queue.put(number)
    await queue.shutdown()
    assert await drained == [*range(20)]


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
@pytest.mark.needs("at once")
async def test_tasks_share_a_queue_on_one_cpu(plain: bool, gate: Gate) -> None:
    """Both ends are tasks, and there is one CPU: a task that waits holds none."""
    queue: aiogpu.Queue[int] = aiogpu.Queue(maxsize=3)
    if plain:
        drained, filled = q.drain_plainly.remote(queue, gate.path), q.fill_plainly
        await gate.entered("drains")
    else:
        drained, filled = q.drain.remote(queue), q.fill
    assert await filled.remote(queue, 20) == 20
    await queue.shutdown()
    assert await drained == [*range(20)]


async def test_a_cancelled_get_loses_no_item() -> None:
    queue: aiogpu.Queue[int] = aiogpu.Queue()
    for number in range(40):
        gets = await waiting(queue, 3)
        put = asyncio.create_task(queue.put_batch([number, -number]))
        for _ in range(number):
            await asyncio.sleep(0)
        gets[0].cancel()
        gets[0].cancel()
        await asyncio.wait([gets[0]])
        first = [] if gets[0].cancelled() else [gets[0].result()]
        await put
        rest = await asyncio.gather(*gets[1:][: 2 - len(first)])
        assert sorted([*first, *rest]) == sorted([number, -number])
        for get in gets:
            get.cancel()
        await asyncio.wait(gets)
    assert await queue.empty()


@pytest.mark.parametrize("task", ["wait_for_item", "wait_for_item_plainly"])
@pytest.mark.parametrize("how", ["cancel", "kill"])
@pytest.mark.needs("processes", "interrupts")
@pytest.mark.aiogpu(num_cpus=2)
async def test_an_ended_consumer_takes_no_item(task: str, how: str, gate: Gate) -> None:
    queue: aiogpu.Queue[int] = aiogpu.Queue()
    await queue.qsize()
    consumer = getattr(q, task).options(max_retries=0).remote(queue, gate.path, "w")
    await gate.entered("w")
    if how == "cancel":
        consumer.cancel()
    else:
        os.kill(gate.pids["w"], signal.SIGKILL)
        with pytest.raises(aiogpu.WorkerDiedError):
            await consumer
    gate.forget("w")
    while any(t.name == task for t in (await aiogpu.status()).tasks):
        await asyncio.sleep(0)
    await queue.put(7)
    assert await queue.get(timeout=5) == 7


async def test_a_closed_queue_gives_what_it_holds_then_raises() -> None:
    queue: aiogpu.Queue[int] = aiogpu.Queue(maxsize=2)
    await queue.put_batch([1, 2])
    put = asyncio.create_task(queue.put(3))
    await asyncio.sleep(0)
    await queue.qsize()
    await queue.shutdown()
    with pytest.raises(aiogpu.errors.QueueClosedError, match="did not accept the item"):
        await put
    with pytest.raises(aiogpu.errors.QueueClosedError, match="did not accept the item"):
        await queue.put(4)
    assert [item async for item in queue] == [1, 2]
    with pytest.raises(aiogpu.errors.QueueClosedError, match="has no items left"):
        await queue.get()

    queue = aiogpu.Queue()
    await queue.put(1)
    [get] = await waiting(queue)
    assert await get == 1
    [get] = await waiting(queue)
    await queue.shutdown(immediate=True)
    with pytest.raises(aiogpu.errors.QueueClosedError):
        await get

    queue = aiogpu.Queue()
    [get] = await waiting(queue)
    aiogpu.kill(queue.actor)
    with pytest.raises(aiogpu.ActorDiedError):
        await get


async def test_a_queue_is_found_by_name_and_carries_handles() -> None:
    first: aiogpu.Queue[Any] = aiogpu.Queue(name="jobs")
    same: aiogpu.Queue[Any] = aiogpu.Queue(name="jobs", get_if_exists=True)
    assert await same is same
    assert await q.try_all.remote(same) == [
        "the queue had no item within 0 s.",
        "the queue had no item within 0.01 s.",
    ]
    await first.put(aiogpu.put("kept"))
    kept = await same.get()
    assert isinstance(kept, aiogpu.Handle)
    assert await kept == "kept"
