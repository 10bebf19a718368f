"""[B15] SIGINT in a worker whose task was cancelled: when it is heard, and when not.

The driver sends it again until the worker has noted that it heard; one may arrive late.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import aiogpu
from tests.contract import interrupt_tasks, tasks
from tests.contract.raw_client import LIMIT
from tests.support.gate import Gate
from tests.support.idle import wait_until_asleep

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

GRACE = 60.0


@pytest.mark.parametrize("kind", ["task", "method"])
async def test_a_second_one_does_not_cut_finally(
    kind: str, gate: Gate, tmp_path: Path
) -> None:
    cleaned = tmp_path / "cleaned"
    async with asyncio.timeout(LIMIT), aiogpu.init(num_cpus=1, cancel_grace=GRACE):
        if kind == "task":
            actor, clean_up = None, interrupt_tasks.clean_up
        else:
            actor = interrupt_tasks.CleanerActor.remote()
            clean_up = actor.clean_up
        running = clean_up.remote(gate.path, str(cleaned))
        await gate.entered("runs")
        running.cancel()
        await gate.entered("cleans")
        for _ in range(3):
            os.kill(gate.pids["cleans"], signal.SIGINT)
        gate.release("cleans")
        # What comes after it begins when it has ended.
        if actor is None:
            assert await tasks.pid.remote() == gate.pids["cleans"]
        else:
            await actor.rest.remote()
        assert cleaned.exists()


async def test_one_that_was_put_off_over_a_write_is_heard_after_it(
    gate: Gate, tmp_path: Path
) -> None:
    """The write takes as long as the program does not read."""
    went_on = tmp_path / "went on"
    options = {"num_cpus": 1, "cancel_grace": GRACE, "log_to_driver": False}
    async with asyncio.timeout(LIMIT), aiogpu.init(**options):
        write = interrupt_tasks.write_and_go_on.remote
        running = write(gate.path, 4 << 20, str(went_on))
        await gate.entered("writes")
        # The loop stands still from here on, so that nothing of it is read.
        worker = gate.pids["writes"]
        wait_until_asleep(worker)
        running.cancel()
        os.kill(worker, signal.SIGINT)
        wait_until_asleep(worker)
        # It is read now, and what is printed comes whole.
        assert await tasks.pid.remote() == worker
        assert not went_on.exists()
