"""Coroutines in a worker: cancellation by message or signal, and cleanup."""

from __future__ import annotations

import asyncio
import gc
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.messages import Cancel
from aiogpu.worker.connection import Channel
from aiogpu.worker.coroutines import Coroutines
from aiogpu.worker.interrupts import Interrupts
from tests.unit.worker.conftest import DriverEnd


@pytest.fixture
def coroutines(channel: Channel, interrupts: Interrupts) -> Iterator[Coroutines]:
    coroutines = Coroutines(channel, interrupts)
    yield coroutines
    coroutines._loop.close()
    asyncio.set_event_loop(None)


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def forever() -> None:
    await asyncio.Event().wait()


def test_coroutine_is_cancelled_when_the_driver_is_gone(
    coroutines: Coroutines, driver: DriverEnd
) -> None:
    driver.hang_up()
    with pytest.raises(asyncio.CancelledError):
        coroutines.run(forever(), 7)


def test_subtasks_and_generators_end_with_their_task(coroutines: Coroutines) -> None:
    ended = []

    async def rest() -> None:
        try:
            await forever()
        finally:
            ended.append("task")

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ended.append("generator")

    async def leave_behind() -> None:
        kept.append(asyncio.create_task(rest()))
        generator = numbers()
        kept.append(generator)
        async for _ in generator:
            break
        await asyncio.sleep(0)

    kept: list[object] = []
    coroutines.run(leave_behind(), 7)
    assert ended == ["task", "generator"]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def cancelled(interrupts: Interrupts, page: ControlPage) -> Iterator[None]:
    """Task 7 runs, and its cancellation is requested."""
    page.cancel(3, 7)
    interrupts.entered = 7
    yield
    interrupts.entered = 0


@pytest.mark.usefixtures("cancelled")
@pytest.mark.parametrize("has_message", [False, True])
def test_interrupts_of_an_idle_loop_cancel_the_task_once(
    has_message: bool, coroutines: Coroutines, driver: DriverEnd, page: ControlPage
) -> None:
    seen = []

    async def careful() -> None:
        loop = asyncio.get_running_loop()
        if has_message:
            driver.send(Cancel(7))
        for _ in range(3):
            # The handler runs in the calling frame, which belongs to asyncio.
            loop.call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await forever()
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            seen.append("cleaned up")

    loop = coroutines._loop
    with pytest.raises(asyncio.CancelledError):
        coroutines.run(careful(), 7)
    assert seen == ["cleaned up"]
    assert page.acknowledged(3) == 7
    assert coroutines._loop is loop, "the next task can use the loop"


@pytest.mark.usefixtures("cancelled")
def test_blocked_loop_is_interrupted(coroutines: Coroutines, page: ControlPage) -> None:
    """The first interrupt asks the loop to cancel, which the loop cannot do."""
    heard = []

    def hold() -> None:
        interrupt()
        heard.append(page.acknowledged(3))
        interrupt()
        raise AssertionError

    async def outer() -> None:
        asyncio.get_running_loop().call_soon(hold)
        await forever()

    with pytest.raises(KeyboardInterrupt):
        coroutines.run(outer(), 7)
    assert heard == [0], "so the driver asks again"


@pytest.mark.usefixtures("cancelled")
def test_interrupt_closes_loop(coroutines: Coroutines, interrupts: Interrupts) -> None:
    async def busy() -> None:
        interrupt()

    loop = coroutines._loop
    with pytest.raises(KeyboardInterrupt):
        coroutines.run(busy(), 7)
    interrupts.entered = 0
    assert loop.is_closed()
    assert coroutines.run(answer(2), 8) == 2


@pytest.mark.usefixtures("cancelled")
def test_subtask_that_does_not_end_is_abandoned_with_the_loop(
    coroutines: Coroutines, interrupts: Interrupts
) -> None:
    """Its interrupt after the cancellation must not hit the next task."""
    seen = []

    async def ignore_cancellation() -> None:
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                seen.append("cancelled")
                asyncio.get_running_loop().call_soon(interrupt)

    async def leave_behind() -> None:
        kept.append(asyncio.create_task(ignore_cancellation()))
        await asyncio.sleep(0)

    kept: list[asyncio.Task[None]] = []
    with pytest.raises(KeyboardInterrupt):
        coroutines.run(leave_behind(), 7)
    interrupts.entered = 0
    assert coroutines.run(answer(3), 8) == 3
    assert seen == ["cancelled"]
    assert not kept[0].done()


class Interrupted(Coroutines):
    """Coroutines that a signal interrupts before the first step."""

    def __init__(self) -> None: ...

    def run(self, coroutine: Any, task_id: int) -> Any:
        raise KeyboardInterrupt


def test_stream_interrupted_before_its_first_step_leaves_no_coroutine() -> None:
    flow: Any = type("Flow", (), {"task": 1})()
    items: Any = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            Interrupted().send_items(items, flow)
        gc.collect()
    assert not caught
