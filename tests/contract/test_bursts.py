"""A program that submits for long, in one turn of its loop, has answers heard."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks

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


async def filled() -> list[aiogpu.Handle[Any]]:
    """What a node of one CPU is busy with; more of it waits."""
    await tasks.add.remote(0)
    return [tasks.add.remote(number) for number in range(100)]


async def test_those_that_wait_are_known_at_once() -> None:
    async with aiogpu.init(num_cpus=1) as node:
        await node.status()  # what it needs is imported before time counts
        handles = await filled()
        seen = await node.status()
        known = [*range(handles[0].task_id, handles[-1].task_id + 1)]
        assert [handle.task_id for handle in handles] == known
        # The rest was sent ahead, or has ended by now.
        assert seen.waiting_count >= 25
        last = tasks.add.remote(1)
        assert (await last.why()).state == "waiting"
        assert await asyncio.gather(*handles, last) == [*range(1, 101), 2]


async def test_those_that_wait_are_cancelled_at_once() -> None:
    async with aiogpu.init(num_cpus=1) as node:
        handles = await filled()
        cancelled = {handle for handle in handles[::2] if handle.cancel()}
        assert handles[-2] in cancelled
        assert (await node.status()).waiting_count <= 100 - len(cancelled)
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        for number, handle in enumerate(handles):
            if handle in cancelled:
                assert isinstance(outcomes[number], asyncio.CancelledError)
            else:
                assert outcomes[number] == number + 1


async def test_all_kinds_of_tasks_keep_their_turn() -> None:
    """One process runs them all, and counts."""
    kinds = [
        number_here,
        number_here.options(name="another"),
        number_here.options(timeout=60),
        number_here.options(priority=0, name="a third"),
    ]
    async with aiogpu.init(num_cpus=1):
        start = await number_here.remote()
        handles = []
        for number in range(200):
            kind = kinds[0] if number % 40 < 25 else kinds[number % 4]
            handles.append(kind.remote())
        numbers = await asyncio.gather(*handles)
        assert numbers == [*range(start + 1, start + 201)]


async def test_a_node_that_closes_amid_a_row() -> None:
    async with aiogpu.init(num_cpus=1) as node:
        handles = await filled()
        await node.shutdown()
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
    failed = [one for one in outcomes if not isinstance(one, int)]
    assert len(failed) >= 50
    assert {type(one) for one in failed} == {aiogpu.errors.NodeClosedError}


_numbers: list[int] = [0]


@aiogpu.remote
def number_here() -> int:
    _numbers[0] += 1
    return _numbers[0]
