"""Sockets that are full, as their other end does not read: nothing is torn or lost.

[B2] [B45]
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import aiogpu
from aiogpu.serialization.references import SHARED_FROM
from tests.contract import full_socket_tasks as tasks
from tests.contract.raw_client import LIMIT, service
from tests.support.gate import Gate
from tests.support.idle import wait_until_asleep
from tests.support.turns import turns

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

LONG = 200_000
"""Bytes that fit into a frame, twice of which no socket takes; see `SHARED_FROM`."""


async def test_frames_of_a_program_do_not_mix(no_leaks: None) -> None:
    """Its node is stopped, so that a frame has gone in part only."""
    with service(num_cpus=2) as node:
        async with asyncio.timeout(LIMIT), aiogpu.init(address=node.path):
            assert await tasks.number.remote(0) == 0
            os.kill(node.pid, signal.SIGSTOP)
            handles = []
            for value in range(0, 40, 4):
                text = bytes([value]) * LONG
                handles.append(tasks.number_behind.remote(text, value))
                await turns()
                handles.append(tasks.number.remote(value + 1))
                handles.append(tasks.number.remote(value + 2))
                await turns()
                handles.append(tasks.number.remote(value + 3))
            os.kill(node.pid, signal.SIGCONT)
            assert await asyncio.gather(*handles) == [*range(40)]


async def test_what_comes_while_plain_code_waits_for_room_is_not_lost(
    no_leaks: None, tmp_path: Path
) -> None:
    """More descriptors than their socket takes are sent in one turn of the loop.

    Its node reads them when it is told, and what it has answered before is read first.
    """
    fifo, many = tmp_path / "fifo", 300
    os.mkfifo(fifo)
    with service(num_cpus=2) as node:
        async with asyncio.timeout(LIMIT), aiogpu.init(address=node.path):
            assert await tasks.number.remote(0) == 0
            early = [tasks.number.remote(value) for value in range(20)]
            early.append(tasks.tell_fifo.remote(str(fifo), 20))
            await turns()
            # The loop stands still from here on; the answers are on their way.
            fifo.read_bytes()
            text, rest = b"-" * LONG, bytes(SHARED_FROM - 4)
            large = [
                tasks.first_of.remote(
                    memoryview(value.to_bytes(4, "little") + rest), text
                )
                for value in range(many)
            ]
            assert await asyncio.gather(*early) == [*range(21)]
            assert await asyncio.gather(*large) == [*range(many)]


async def test_frames_of_threads_do_not_mix(gate: Gate, tmp_path: Path) -> None:
    """All answer at once, while the program does not read."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with asyncio.timeout(LIMIT), aiogpu.init(num_cpus=1):
        choir = tasks.Choir.remote()
        answers = [choir.large.remote(byte, LONG) for byte in range(10)]
        begun = choir.begin.remote(gate.path, str(fifo))
        await gate.entered("ready")
        # The loop stands still from here on, until no thread has anything to do.
        fifo.write_bytes(b".")
        wait_until_asleep(gate.pids["ready"])
        for byte, answer in enumerate(answers):
            assert await answer == bytes([byte]) * LONG
        await begun
