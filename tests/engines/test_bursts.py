"""A program that submits for long, in one turn of its loop, has answers heard."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import aiogpu
from tests.engines import tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


@aiogpu.remote
async def parent(number: int) -> int:
    return sum(await asyncio.gather(*(tasks.add.remote(number, n) for n in range(3))))


def submitted_until(
    is_enough: Callable[[list[aiogpu.Handle[Any]]], bool],
    submit: Callable[[int], aiogpu.Handle[Any]],
) -> list[aiogpu.Handle[Any]]:
    """Handles of what was submitted in one turn of the loop."""
    handles: list[aiogpu.Handle[Any]] = []
    deadline = time.monotonic() + 60
    while not is_enough(handles):
        assert time.monotonic() < deadline, "no answer was heard"
        handles.append(submit(len(handles)))
    return handles


def hundred_done(handles: list[aiogpu.Handle[Any]]) -> bool:
    # Not each of them each time: there may be many thousands.
    return len(handles) % 50 == 0 and sum(handle.done() for handle in handles) > 100


async def test_tasks_end_while_others_are_submitted() -> None:
    async with aiogpu.init(num_cpus=2):
        await asyncio.gather(*map(tasks.add.remote, range(200)))
        handles = submitted_until(hundred_done, tasks.add.remote)
        assert await asyncio.gather(*handles) == [*range(1, len(handles) + 1)]


async def test_tasks_say_what_they_start_while_others_are_submitted() -> None:
    """Those that they wait for may need new workers, for which the loop must turn."""
    async with aiogpu.init(num_cpus=2):
        await asyncio.gather(*map(parent.remote, range(10)))
        handles = [parent.remote(number) for number in range(500)]
        assert await asyncio.gather(*handles) == [
            3 * n + 3 for n in range(len(handles))
        ]


async def test_cancelling_and_death_amid_a_burst() -> None:
    async with aiogpu.init(num_cpus=2):
        await asyncio.gather(*map(tasks.add.remote, range(200)))

        kill = tasks.kill_self.options(max_retries=0)

        def submit(number: int) -> aiogpu.Handle[Any]:
            if number % 500 == 250:
                return kill.remote(int(signal.SIGKILL))
            handle = tasks.add.remote(number)
            if number % 10 == 7:
                handle.cancel()
            return handle

        handles = submitted_until(
            lambda handles: len(handles) > 2000 and hundred_done(handles), submit
        )
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            if number % 500 == 250:
                assert isinstance(outcome, aiogpu.WorkerDiedError), outcome
            elif number % 10 == 7:
                assert isinstance(outcome, asyncio.CancelledError), outcome
            else:
                assert outcome == number + 1
