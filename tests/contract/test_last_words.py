"""[B38] What a worker said before it died is heard, though its end is known first."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import aiogpu
from tests.contract import served
from tests.contract.last_words_tasks import Crowd
from tests.contract.raw_client import LIMIT
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.whole]

MANY = 2_000
"""Answers; the loop hears of the death before it has passed on all of them."""


@pytest.mark.parametrize("is_written_to", [False, True])
async def test_a_worker_is_gone_when_its_connection_is_read_to_the_end(
    is_written_to: bool, gate: Gate, tmp_path: Path
) -> None:
    """A write to it after its death has asyncio give up the connection, unread."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with asyncio.timeout(LIMIT), aiogpu.init(num_cpus=1, log_to_driver=False):
        crowd = Crowd.remote()
        answers = [crowd.answer.remote(number) for number in range(MANY)]
        last = crowd.answer_all_and_die.remote(gate.path, str(fifo))
        await gate.entered("ready")
        ended = os.pidfd_open(gate.pids["ready"])
        # The loop stands still from here on, until the process has ended.
        fifo.write_bytes(b".")
        served._wait(ended)
        late = [crowd.answer.remote(MANY)] if is_written_to else []
        assert await asyncio.gather(*answers) == [*range(MANY)]
        for lost in (last, *late):
            with pytest.raises(aiogpu.ActorDiedError):
                await lost
