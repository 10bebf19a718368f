"""Thousands of random tasks with kills, cancels, timeouts, failures and children.

`AIOGPU_TEST_SEED=5 pytest …` makes the same choices again; a failure names its seed.
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
"""Bytes by which the driver may grow from the first third of the tasks to the end."""
ZYGOTE_EVERY = 4.0
"""Seconds between two kills of a zygote: a node ends after three in ten seconds."""

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
    """One node, with counts of its tasks' ends and of the kills."""

    def __init__(self, session: Any, rng: random.Random) -> None:
        self.ends: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.driver = session._session._engine._open_driver
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._last_zygote = self._loop.time()

    async def run(self, number: int) -> None:
        """Start one task, cancel some, and check the end."""
        rng = self._rng
        (kind,) = rng.choices(list(KINDS), KINDS.values())
        options: dict[str, Any] = {"max_retries": rng.choice((0, 3))}
        if rng.random() < 0.3:
            options["num_gpus"] = rng.choice((0.25, 0.5, 1))
            options["max_calls"] = rng.choice((None, 0, 2))
        if rng.random() < 0.08 or kind == "deaf":
            options["timeout"] = rng.choice((0.001, 0.01, 0.05))
        if kind == "deaf":
            options["cancel_grace"] = rng.choice((0, 0.02))
        is_cancelled, turns = rng.random() < 0.12, rng.randrange(200)
        handle = getattr(storm_tasks, kind).options(**options).remote(number)
        if is_cancelled:
            for _ in range(turns):
                await asyncio.sleep(0)
            handle.cancel()
        (end,) = await asyncio.gather(handle, return_exceptions=True)
        allowed = self._allowed(kind, is_cancelled, "timeout" in options)
        assert end == number or type(end) in allowed, (SEED, number, kind, options, end)
        self.ends["result" if end == number else type(end).__name__] += 1

    def _allowed(self, kind: str, is_cancelled: bool, is_timed: bool) -> set[type]:
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

    def kill_one(self) -> None:
        """Kill one of the node's processes, whatever it is doing."""
        names = {"aiogpu-work": 6, "aiogpu-keep": 2, "aiogpu-zygote": 1}
        (name,) = self._rng.choices(list(names), names.values())
        if name == "aiogpu-zygote":
            if self._loop.time() < self._last_zygote + ZYGOTE_EVERY:
                return
            self._last_zygote = self._loop.time()
        processes = Resources.take().processes
        pids = [pid for (pid, _), text in processes.items() if f"({name}" in text]
        if pids:
            self.kills[name] += 1
            with suppress(ProcessLookupError):
                os.kill(self._rng.choice(pids), signal.SIGKILL)

    async def settle(self) -> None:
        """Wait until nothing runs, then check the scheduler's state."""
        scheduler = self.driver.scheduler
        async with asyncio.timeout(60):
            while scheduler.tasks or scheduler.ledger.leases:
                await asyncio.sleep(0)
        scheduler.check()
        assert len(self.driver._calls) == 0, SEED


async def run_tasks(storm: Storm, numbers: range, rng: random.Random) -> None:
    """Run tasks, `IN_FLIGHT` of them at a time, and kill processes meanwhile."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int) -> None:
        try:
            await storm.run(number)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            await slots.acquire()
            group.create_task(one(number))
            if rng.random() < 0.03:
                storm.kill_one()
    await storm.settle()


def usage() -> tuple[int, int, int]:
    """Bytes, descriptors and processes of this program."""
    gc.collect()
    me = psutil.Process()
    return me.memory_info().rss, me.num_fds(), len(Resources.take().processes)


@pytest.mark.parametrize("count", [750, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_each_task_of_a_storm_ends_once(count: int) -> None:
    """There are as many ends as tasks, and nothing grows."""
    rng = random.Random(SEED)
    async with (
        asyncio.timeout(120),
        aiogpu.init(
            num_cpus=3, num_gpus=2, cancel_grace=0.2, log_to_driver=False
        ) as session,
    ):
        storm = Storm(session, rng)
        await run_tasks(storm, range(1, count // 3), rng)
        before = usage()
        await run_tasks(storm, range(count // 3, count + 1), rng)
        after = usage()
        assert await storm_tasks.quick.remote(1) == 1, SEED
    assert storm.ends.total() == count, (SEED, storm.ends)
    assert storm.ends["result"] > count // 2, (SEED, storm.ends)
    assert storm.ends.keys() >= {"ValueError", "CancelledError", "TaskTimeoutError"}
    assert storm.kills.total() > count // 100, (SEED, storm.kills)
    grown = after[0] - before[0]
    assert grown < GROWS, (SEED, f"{grown >> 20} MB more")
    # One more keeper and worker may be kept for the next task.
    assert after[1] - before[1] < 60, (SEED, before, after)
    assert after[2] - before[2] < 30, (SEED, before, after)
