"""A node that many knock at, or that is stopped for a while, is joined all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

import aiogpu
from aiogpu.runtime.directories import BACKLOG
from tests.contract import tasks
from tests.contract.raw_client import Service, service
from tests.support.turns import turns

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service() as running:
        yield running


@contextmanager
def full_queue(path: str) -> Iterator[int]:
    """So many wait to be let in that nobody else may; nobody else knows them."""
    with ExitStack() as waiting:
        for count in range(8 * BACKLOG):
            visitor = waiting.enter_context(socket.socket(socket.AF_UNIX))
            visitor.setblocking(False)
            try:
                visitor.connect(path)
            except BlockingIOError:
                yield count
                return
        pytest.fail("the queue has no end")


async def join_and_add(path: str) -> int:
    async with aiogpu.init(address=path, log_to_driver=False):
        return await tasks.add.remote(1, 2)


async def test_a_program_waits_until_there_is_room(node: Service) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    with full_queue(node.path):
        joining = asyncio.create_task(join_and_add(node.path))
        await turns(50)
        assert not joining.done()
    os.kill(node.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        assert await joining == 3


async def test_a_program_that_gives_up_leaves_nothing(node: Service) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    with full_queue(node.path):
        joining = asyncio.create_task(join_and_add(node.path))
        await turns(50)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
    os.kill(node.pid, signal.SIGCONT)
    assert await join_and_add(node.path) == 3


async def test_as_many_may_wait_as_the_node_has_asked_for(node: Service) -> None:
    os.kill(node.pid, signal.SIGSTOP)
    with full_queue(node.path) as count:
        assert count >= BACKLOG
