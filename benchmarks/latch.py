"""A socket to which tasks connect to say that they run; `tasks` has their side."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def open_latch() -> Iterator[socket.socket]:
    """Listen until the end of the block; tasks find the latch by the process id."""
    with socket.socket(socket.AF_UNIX) as latch:
        latch.bind(f"\0aiogpu-benchmarks-{os.getpid()}")
        latch.listen()
        latch.setblocking(False)
        yield latch


async def connected(latch: socket.socket) -> socket.socket:
    """Wait until one more task runs; return the connection to it.

    It ends when the task's code has stopped; closing it releases a task that waits.
    """
    connection, _ = await asyncio.get_running_loop().sock_accept(latch)
    connection.setblocking(False)
    return connection
