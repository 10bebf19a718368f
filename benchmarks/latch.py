"""A socket to which tasks connect to say that they run; `tasks` has their side."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Latch:
    """This process's latch; tasks find it by the process id."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    async def connected(self) -> socket.socket:
        """Wait until one more task runs; return the connection to it.

        It ends when the task's code has stopped; closing it releases a task that waits.
        """
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        connection.setblocking(False)
        return connection


@contextmanager
def open_latch() -> Iterator[Latch]:
    """Listen until the end of the block."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0aiogpu-benchmarks-{os.getpid()}")
        listener.listen()
        listener.setblocking(False)
        yield Latch(listener)
