"""Full sockets and queues: nothing is torn or lost, and all are served.

The other end does not read, or a node with many waiting programs is suspended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import aiogpu
from aiogpu.runtime.directories import BACKLOG
from aiogpu.serialization.references import SHARED_FROM
from tests.contract import backlog_tasks as tasks
from tests.contract import shared_tasks
from tests.contract import tasks as plain
from tests.contract.raw_client import LIMIT, Service, service
from tests.support.errors import raises
from tests.support.gate import Gate
from tests.support.waits import turns, wait_until_asleep

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]

LONG = 200_000
"""Bytes that fit into a frame. A socket does not take two such frames."""


async def test_frames_to_a_suspended_node_do_not_mix(no_leaks: None) -> None:
    """A frame is sent only in part before the node is suspended."""
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


async def test_answers_that_come_while_a_send_waits_are_not_lost(
    no_leaks: None, tmp_path: Path
) -> None:
    """The program sends more descriptors than the socket takes in one turn of the loop.

    The send waits until the node reads, and reads the node's earlier answers meanwhile.
    """
    fifo, many = tmp_path / "fifo", 300
    os.mkfifo(fifo)
    with service(num_cpus=2) as node:
        async with asyncio.timeout(LIMIT), aiogpu.init(address=node.path):
            assert await tasks.number.remote(0) == 0
            early = [tasks.number.remote(value) for value in range(20)]
            early.append(tasks.tell_fifo.remote(str(fifo), 20))
            await turns()
            # The loop does not turn from here on; the answers are on their way.
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
    """All threads answer at once, while the program does not read."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with asyncio.timeout(LIMIT), aiogpu.init(num_cpus=1):
        choir = tasks.Choir.remote()
        answers = [choir.large.remote(byte, LONG) for byte in range(10)]
        begun = choir.begin.remote(gate.path, str(fifo))
        await gate.entered("ready")
        # The loop does not turn from here on, until all threads sleep.
        fifo.write_bytes(b".")
        wait_until_asleep(gate.pids["ready"])
        for byte, answer in enumerate(answers):
            assert await answer == bytes([byte]) * LONG
        await begun


# More large values than the kernel queues between two processes: the descriptors travel
# before the message that names them, and are read when that message arrives.

MANY = 400
"""A Unix socket takes 278 unread messages."""


async def test_a_task_gives_many_large_results() -> None:
    """One message names them all, and comes after the last descriptor."""
    async with asyncio.timeout(60), aiogpu.init(num_cpus=1):
        task = shared_tasks.make_many.options(num_returns=MANY)
        views = await asyncio.gather(*task.remote(MANY, SHARED_FROM))
        found = [int.from_bytes(view[:4], "little") for view in views]
        assert found == [*range(MANY)]


async def test_tasks_started_in_one_turn_have_large_arguments(served: None) -> None:
    """The messages wait for the loop, as they are more than the socket takes."""
    text = "-" * SHARED_FROM
    async with aiogpu.init(address="node", num_cpus=4):
        handles = [
            shared_tasks.number_in.remote(
                text, memoryview(i.to_bytes(4, "little") + bytes(SHARED_FROM - 4))
            )
            for i in range(MANY)
        ]
        assert await asyncio.gather(*handles) == [*range(MANY)]


# Programs that wait for the node to accept their connection


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


@contextmanager
def full_queue(path: str) -> Iterator[int]:
    """Fill the queue of connections that a node has not accepted; give their number."""
    with ExitStack() as waiting:
        for count in range(8 * BACKLOG):
            connection = waiting.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            try:
                connection.connect(path)
            except BlockingIOError:
                yield count
                return
        pytest.fail("the queue has no end")


async def join_and_add(path: str) -> int:
    async with aiogpu.init(address=path, log_to_driver=False):
        return await plain.add.remote(1, 2)


async def test_a_program_waits_for_a_place_in_the_queue(node: Service) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    with full_queue(node.path) as count:
        assert count >= BACKLOG
        joining = asyncio.create_task(join_and_add(node.path))
        await turns(50)
        assert not joining.done()
    os.kill(node.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        assert await joining == 3


async def test_a_program_may_give_up_its_wait_for_the_queue(node: Service) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    with full_queue(node.path):
        joining = asyncio.create_task(join_and_add(node.path))
        await turns(50)
        joining.cancel()
        await raises(asyncio.CancelledError, joining)
    os.kill(node.pid, signal.SIGCONT)
    assert await join_and_add(node.path) == 3
