"""[B15] Cancelling at the instant of completion, ten thousand times.

2 500 for each loop and each kind of task if all is run, else a fifth of that. When to
cancel is drawn by a seeded hand and counted out by a busy loop, from before the task
begins to after it has ended; for how long it counts follows what was met so far.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.backlog_tasks import count, count_softly

pytestmark = pytest.mark.usefixtures("no_leaks")

SEED = int(os.environ.get("AIOGPU_TEST_SEED", "7"))
LONGEST = 2_000
"""What a task counts to at most."""


def wait(counts: int) -> None:
    for _ in range(counts):
        pass


async def counts_of_a_call(task: aiogpu.types.RemoteFunction[[int, int], int]) -> int:
    """To what the driver counts while the longest of the calls is answered."""
    for _ in range(200):
        await task.remote(0, LONGEST)
    calls = []
    for _ in range(100):
        started = time.perf_counter()
        await task.remote(0, LONGEST)
        calls.append(time.perf_counter() - started)
    # Not their mean: others on this machine may make some of them very long.
    call = statistics.median(calls)
    started = time.perf_counter()
    wait(100_000)
    return int(100_000 * call / (time.perf_counter() - started))


@pytest.mark.parametrize("cancels", [500, pytest.param(2_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", [count, count_softly], ids=["plain", "coroutine"])
async def test_each_ends_as_a_result_or_as_cancelled(
    task: aiogpu.types.RemoteFunction[[int, int], int], cancels: int
) -> None:
    hand = random.Random(SEED)
    ends: Counter[str] = Counter()
    async with aiogpu.init(num_cpus=1, cancel_grace=20) as session:
        pid = await tasks.pid.remote()
        longest = await counts_of_a_call(task)
        for number in range(cancels):
            until = hand.randrange(hand.choice((10, 100, LONGEST)))
            handle = task.remote(number, until)
            for _ in range(hand.randrange(3)):
                await asyncio.sleep(0)
            wait(hand.randrange(2 * longest))
            for _ in range(hand.randrange(4)):
                await asyncio.sleep(0)
            handle.cancel()
            (end,) = await asyncio.gather(handle, return_exceptions=True)
            assert end == number or type(end) is asyncio.CancelledError, (SEED, end)
            ends[type(end).__name__] += 1
            # A machine that is busy now was not when the call was measured.
            longest = int(longest * (0.9 if end == number else 1.05)) + 1
            # A stray interrupt would be found in this one.
            assert await task.remote(-number, hand.randrange(LONGEST)) == -number, SEED
        assert await tasks.pid.remote() == pid, "the worker was reused"
        available = await aiogpu.available_resources()
        assert available == await aiogpu.cluster_resources()
        session._session._engine._open_driver.scheduler.check()  # type: ignore[attr-defined]
    assert ends.keys() == {"int", "CancelledError"}, ends
    assert min(ends.values()) > cancels // 50, "too seldom near the end"
