"""Cancelling stops the work: for each way to wait, for each waiter."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

import aiogpu
from aiogpu.types import RemoteFunction
from tests.contract import tasks
from tests.contract.tasks import run_a_loop
from tests.support.errors import raises
from tests.support.gate import Gate, say

pytestmark = [
    pytest.mark.usefixtures("no_leaks", "each_engine", "node"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_cpus=1),
]

Waiter = Callable[[aiogpu.Handle[str]], Awaitable[object]]


async def plain(handle: aiogpu.Handle[str]) -> None:
    await handle


async def with_timeout(handle: aiogpu.Handle[str]) -> None:
    async with asyncio.timeout(60):
        await handle


async def with_wait_for(handle: aiogpu.Handle[str]) -> None:
    await asyncio.wait_for(handle, 60)


async def with_gather(handle: aiogpu.Handle[str]) -> None:
    await asyncio.gather(handle)


async def with_wait(handle: aiogpu.Handle[str]) -> None:
    await asyncio.wait([handle])


async def with_shield(handle: aiogpu.Handle[str]) -> None:
    await asyncio.shield(handle)


async def with_group(handle: aiogpu.Handle[str]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(handle.coro())


async def with_as_completed(handle: aiogpu.Handle[str]) -> None:
    for done in asyncio.as_completed([handle]):
        await done


WAIT_FOR_CANCELS = sys.version_info < (3, 12)
"""Before 3.12 `wait_for` cancels what it waits for instead of its wait."""

# The fate of the work when a task that waits so is cancelled: with no other waiter, and
# while another task waits by plain `await`.
TABLE = [
    (plain, "stops", "goes on"),
    (with_timeout, "stops", "goes on"),
    (with_group, "stops", "goes on"),
    (with_wait_for, "stops", "stops" if WAIT_FOR_CANCELS else "goes on"),
    (with_gather, "stops", "stops"),
    (with_wait, "goes on", "goes on"),
    (with_shield, "goes on", "goes on"),
    (with_as_completed, "goes on", "goes on"),
]


@pytest.mark.parametrize(
    ("waiter", "alone", "beside"), TABLE, ids=[row[0].__name__ for row in TABLE]
)
@pytest.mark.aiogpu(num_cpus=2)
async def test_each_way_to_wait_stops_the_work_or_not(
    waiter: Waiter, alone: str, beside: str, gate: Gate
) -> None:
    for name, fate, others in (("alone", alone, 0), ("beside", beside, 1)):
        handle = tasks.gated_coroutine.remote(gate.path, name)
        rest = [asyncio.ensure_future(plain(handle)) for _ in range(others)]
        waiting = asyncio.ensure_future(waiter(handle))
        await gate.entered(name)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        if fate == "stops":
            await gate.entered(f"{name}-cancelled")
            assert handle.cancelled()
            for other in rest:
                await raises(asyncio.CancelledError, other)
        else:
            assert not handle.done()
            gate.release(name)
            assert await handle == name
            assert await asyncio.gather(*rest) == [None] * others


async def test_the_last_waiter_stops_the_work(gate: Gate) -> None:
    handle = tasks.gated_coroutine.remote(gate.path, "a")
    waiters = [asyncio.ensure_future(plain(handle)) for _ in range(3)]
    await gate.entered("a")
    for waiter in waiters:
        assert not handle.cancelled()
        waiter.cancel()
        await asyncio.wait([waiter])
    assert handle.cancelled()
    await gate.entered("a-cancelled")


async def test_a_callback_keeps_the_work_running(gate: Gate) -> None:
    handle = tasks.gated_coroutine.remote(gate.path, "a")
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note(done: aiogpu.Handle[str]) -> None:
        ended.set_result(done.result())

    handle.add_done_callback(note)
    waiter = asyncio.ensure_future(plain(handle))
    await gate.entered("a")
    waiter.cancel()
    await asyncio.wait([waiter])
    assert not handle.done()
    gate.release("a")
    assert await ended == "a"
    assert handle.remove_done_callback(note) == 0


@pytest.mark.needs("waiting for resources")
async def test_a_cancelled_task_leaves_the_queue(gate: Gate) -> None:
    running = tasks.gated_coroutine.remote(gate.path, "a")
    waiting = tasks.gated_coroutine.remote(gate.path, "b")
    await gate.entered("a")
    assert waiting.cancel()
    assert not waiting.cancel()
    await raises(asyncio.CancelledError, waiting)
    assert (await aiogpu.status()).waiting == ()
    gate.release("a")
    assert await running == "a"
    assert not running.cancel()
    assert "b" not in gate.pids


BLOCKED = pytest.mark.needs("wakes")
INTERRUPTED = [
    tasks.spin,
    *(
        pytest.param(task, marks=BLOCKED)
        for task in (tasks.gated, tasks.deaf_coroutine, run_a_loop)
    ),
]


@pytest.mark.needs("interrupts")
@pytest.mark.parametrize("task", INTERRUPTED, ids=lambda task: task.__name__)
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_code_is_interrupted_and_its_worker_goes_on(
    task: RemoteFunction[..., object], gate: Gate
) -> None:
    handle = task.options(num_gpus=1, max_calls=0).remote(gate.path, "a")
    await gate.entered("a")
    handle.cancel()
    if task is tasks.spin:
        await gate.entered("a-interrupted")
    pid = tasks.pid.options(num_gpus=1, max_calls=0)
    assert await pid.remote() == gate.pids["a"]


@pytest.mark.needs("processes")
@pytest.mark.parametrize("deaf", ["swallow", "block_in_c"])
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1, cancel_grace=0.3)
async def test_code_that_does_not_stop_is_killed(deaf: str, gate: Gate) -> None:
    """After the grace its process is killed; its GPU is free only then."""
    task = getattr(tasks, deaf).options(num_gpus=1, max_calls=0)
    handle = task.remote(gate.path, "a")
    await gate.entered("a")
    handle.cancel()
    await raises(asyncio.CancelledError, handle)
    assert (await aiogpu.available_resources())["GPU"] == 0.0
    other = await tasks.pid.options(num_gpus=1).remote()
    assert other != gate.pids["a"]
    assert not os.path.exists(f"/proc/{gate.pids['a']}")


async def test_a_cancelled_coroutine_may_clean_up(gate: Gate) -> None:
    """The coroutine has received the cancel, so no signal disturbs its clean-up."""
    path = gate.path

    @aiogpu.remote
    async def careful() -> None:
        say(path, "in")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)  # longer than the pause between two interrupts
            say(path, "out")

    handle = careful.remote()
    await gate.entered("in")
    handle.cancel()
    await gate.entered("out")
    assert await tasks.pid.remote() == gate.pids["out"] == gate.pids["in"]


@pytest.mark.needs("processes", "same turn")
@pytest.mark.aiogpu(num_cpus=1, num_gpus=1)
async def test_cancel_frees_the_share_while_the_process_starts() -> None:
    for _ in range(5):
        handle = tasks.add.options(num_gpus=1).remote(1)
        assert (await aiogpu.status()).tasks[0].state == "starting"
        handle.cancel()
        assert (await aiogpu.available_resources())["GPU"] == 1.0
    assert await tasks.add.options(num_gpus=1).remote(1) == 2


@pytest.mark.needs("books")
async def test_a_cancel_at_completion_gives_a_result_or_a_cancel() -> None:
    outcomes = set()
    for delay in range(60):
        handle = tasks.add.remote(1)
        for _ in range(delay % 12):
            await asyncio.sleep(0)
        handle.cancel()
        (outcome,) = await asyncio.gather(handle, return_exceptions=True)
        outcomes.add(type(outcome))
    assert outcomes <= {int, asyncio.CancelledError}
    assert await tasks.add.remote(1) == 2
    assert (await aiogpu.available_resources())["CPU"] == 1.0
