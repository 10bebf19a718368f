"""Coroutines in a worker: cancelled by message or signal, and nothing left running."""

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


def test_without_a_driver_it_is_cancelled(
    coroutines: Coroutines, driver: DriverEnd
) -> None:
    driver.hang_up()
    with pytest.raises(asyncio.CancelledError):
        coroutines.run(forever(), 7)


def test_nothing_of_a_task_goes_on(coroutines: Coroutines) -> None:
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
def asked(interrupts: Interrupts, page: ControlPage) -> Iterator[None]:
    """Task 7 runs, and is to stop."""
    page.ask(3, 7)
    interrupts.entered = 7
    yield
    interrupts.entered = 0


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("is_told", [False, True])
def test_interrupts_of_a_loop_that_rests_are_one_cancel(
    is_told: bool, coroutines: Coroutines, driver: DriverEnd, page: ControlPage
) -> None:
    seen = []

    async def careful() -> None:
        loop = asyncio.get_running_loop()
        if is_told:
            driver.send(Cancel(7))
        for _ in range(3):
            # The handler runs in the frame that calls this, which is asyncio's.
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
    assert page.heard(3) == 7
    assert coroutines._loop is loop, "another task may have it"


@pytest.mark.usefixtures("asked")
def test_code_that_holds_the_loop_is_interrupted(
    coroutines: Coroutines, page: ControlPage
) -> None:
    """The first time its loop is asked to cancel; it does not come to that."""
    heard = []

    def hold() -> None:
        interrupt()
        heard.append(page.heard(3))
        interrupt()
        raise AssertionError

    async def outer() -> None:
        asyncio.get_running_loop().call_soon(hold)
        await forever()

    with pytest.raises(KeyboardInterrupt):
        coroutines.run(outer(), 7)
    assert heard == [0], "so that the driver asks again"


def test_an_interrupt_costs_the_loop(
    coroutines: Coroutines, interrupts: Interrupts, page: ControlPage
) -> None:
    async def busy() -> None:
        interrupt()

    page.ask(3, 7)
    interrupts.entered = 7
    loop = coroutines._loop
    with pytest.raises(KeyboardInterrupt):
        coroutines.run(busy(), 7)
    interrupts.entered = 0
    assert loop.is_closed()
    assert coroutines.run(answer(2), 8) == 2


def test_a_rest_that_does_not_end_is_left_behind_with_the_loop(
    coroutines: Coroutines, interrupts: Interrupts, page: ControlPage
) -> None:
    """It hears no cancel; the interrupt that follows must spare the next task."""
    page.ask(3, 7)
    seen = []

    async def deaf() -> None:
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                seen.append("cancelled")
                asyncio.get_running_loop().call_soon(interrupt)

    async def leave_behind() -> None:
        kept.append(asyncio.create_task(deaf()))
        await asyncio.sleep(0)

    kept: list[asyncio.Task[None]] = []
    interrupts.entered = 7
    with pytest.raises(KeyboardInterrupt):
        coroutines.run(leave_behind(), 7)
    interrupts.entered = 0
    assert coroutines.run(answer(3), 8) == 3
    assert seen == ["cancelled"]
    (left,) = kept
    assert not left.done()


class Interrupted(Coroutines):
    """Where the signal lands before the first step."""

    def __init__(self) -> None: ...

    def run(self, coroutine: Any, task_id: int) -> Any:
        raise KeyboardInterrupt


def test_a_stream_interrupted_before_its_first_step_leaves_no_coroutine() -> None:
    flow: Any = type("Flow", (), {"task": 1})()
    items: Any = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            Interrupted().send_items(items, flow)
        gc.collect()
    assert not told
