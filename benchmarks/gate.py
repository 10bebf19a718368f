"""Where tasks knock to say that they run. `tasks` has the other side."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """This process's gate; tasks are given its process id."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    async def entered(self) -> None:
        """Wait until one more task has knocked; it goes on at once."""
        visitor = await self.visitor()
        visitor.close()

    async def visitor(self) -> socket.socket:
        """Wait until one more task has knocked; gives what is between it and us."""
        loop = asyncio.get_running_loop()
        visitor, _ = await loop.sock_accept(self._listener)
        visitor.setblocking(False)
        return visitor


@contextmanager
def open_gate() -> Iterator[Gate]:
    """Listen until the end of the block."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0aiogpu-benchmarks-{os.getpid()}")
        listener.listen()
        listener.setblocking(False)
        yield Gate(listener)
