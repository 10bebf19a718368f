"""Ten thousand tasks with kills, cancels, timeouts, failures and children, all drawn.

`AIOGPU_TEST_SEED=5 pytest …` draws the same again; a failure says its seed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil
import pytest

import aiogpu
from aiogpu.testing.leaks import Resources
from tests.faults import storm_tasks

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

SEED = int(os.environ.get("AIOGPU_TEST_SEED", "11"))
IN_FLIGHT = 30
GROWS = 16 << 20
"""Bytes by which the driver may grow between its first third and its end."""
ZYGOTE_EVERY = 4.0
"""Seconds between two deaths of a zygote: three in ten seconds are its limit."""

KINDS = {
    "quick": 30,
    "soft": 20,
    "slow": 15,
    "failing": 8,
    "dying": 3,
    "deaf": 2,
    "nested": 10,
    "nested_softly": 6,
    "forgetful": 2,
}


class Storm:
    """One node, and what came of its tasks."""

    def __init__(self, session: Any, hand: random.Random) -> None:
        self.ends: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.driver = session._session._engine._open_driver
        self._hand = hand
        self._loop = asyncio.get_running_loop()
        self._last_zygote = self._loop.time()

    async def run(self, number: int) -> None:
        """Start one task, maybe cancel it, and see how it ends."""
        hand = self._hand
        (kind,) = hand.choices(list(KINDS), KINDS.values())
        options: dict[str, Any] = {"max_retries": hand.choice((0, 3))}
        if hand.random() < 0.3:
            options["num_gpus"] = hand.choice((0.25, 0.5, 1))
            options["max_calls"] = hand.choice((None, 0, 2))
        if hand.random() < 0.08 or kind == "deaf":
            options["timeout"] = hand.choice((0.001, 0.01, 0.05))
        if kind == "deaf":
            options["cancel_grace"] = hand.choice((0, 0.02))
        is_cancelled, turns = hand.random() < 0.12, hand.randrange(200)
        handle = getattr(storm_tasks, kind).options(**options).remote(number)
        if is_cancelled:
            for _ in range(turns):
                await asyncio.sleep(0)
            handle.cancel()
        (end,) = await asyncio.gather(handle, return_exceptions=True)
        allowed = self._allowed(kind, number, is_cancelled, "timeout" in options)
        assert end == number or type(end) in allowed, (SEED, number, kind, options, end)
        self.ends["result" if end == number else type(end).__name__] += 1

    def _allowed(
        self, kind: str, number: int, is_cancelled: bool, is_timed: bool
    ) -> set[type]:
        allowed: set[type] = set()
        if is_cancelled:
            allowed.add(asyncio.CancelledError)
        if is_timed:
            allowed.add(aiogpu.TaskTimeoutError)
        if kind == "failing":
            allowed.add(ValueError)
        if kind == "dying" or self.kills.total():
            allowed.add(aiogpu.WorkerDiedError)
        return allowed

    def strike(self) -> None:
        """Kill one process of the node's, whatever it does."""
        names = {"aiogpu-work": 6, "aiogpu-keep": 2, "aiogpu-zygote": 1}
        (name,) = self._hand.choices(list(names), names.values())
        if name == "aiogpu-zygote":
            if self._loop.time() < self._last_zygote + ZYGOTE_EVERY:
                return
            self._last_zygote = self._loop.time()
        processes = Resources.take().processes
        found = [pid for (pid, _), told in processes.items() if f"({name}" in told]
        if found:
            self.kills[name] += 1
            with suppress(ProcessLookupError):
                os.kill(self._hand.choice(found), signal.SIGKILL)

    async def rest(self) -> None:
        """Until nothing runs, then look through the books."""
        scheduler = self.driver.scheduler
        async with asyncio.timeout(60):
            while scheduler.tasks or scheduler.ledger.leases:
                await asyncio.sleep(0)
        scheduler.check()
        assert len(self.driver._calls) == 0, SEED


async def blow(storm: Storm, numbers: range, hand: random.Random) -> None:
    """So many tasks, of which only some are in flight at a time."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int) -> None:
        try:
            await storm.run(number)
        finally:
            places.release()

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            await places.acquire()
            group.create_task(one(number))
            if hand.random() < 0.03:
                storm.strike()
    await storm.rest()


def weight() -> tuple[int, int, int]:
    """Bytes, descriptors and processes of this program."""
    gc.collect()
    me = psutil.Process()
    return me.memory_info().rss, me.num_fds(), len(Resources.take().processes)


@pytest.mark.parametrize("count", [750, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_all_are_accounted_for(count: int) -> None:
    """On either loop; so many tasks, so many ends, and nothing grows."""
    hand = random.Random(SEED)
    async with (
        asyncio.timeout(120),
        aiogpu.init(
            num_cpus=3, num_gpus=2, cancel_grace=0.2, log_to_driver=False
        ) as session,
    ):
        storm = Storm(session, hand)
        await blow(storm, range(1, count // 3), hand)
        before = weight()
        await blow(storm, range(count // 3, count + 1), hand)
        after = weight()
        assert await storm_tasks.quick.remote(1) == 1, SEED
    assert storm.ends.total() == count, (SEED, storm.ends)
    assert storm.ends["result"] > count // 2, (SEED, storm.ends)
    assert storm.ends.keys() >= {"ValueError", "CancelledError", "TaskTimeoutError"}
    assert storm.kills.total() > count // 100, (SEED, storm.kills)
    grown = after[0] - before[0]
    assert grown < GROWS, (SEED, f"{grown >> 20} MB more")
    # A keeper and a worker more or less may be kept for what comes next.
    assert after[1] - before[1] < 60, (SEED, before, after)
    assert after[2] - before[2] < 30, (SEED, before, after)
