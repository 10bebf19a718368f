"""A gate between tests and tasks: a task says that it runs, and waits to go on.

It takes the place of sleeps. `Gate` is the test's side, `pass_gate` the task's; the
latter imports nothing that a worker would not have, and what the former needs is
imported late: a thousand workers are started here that import this file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio


TURNS: Final = 10
"""Of the loop, in which who was let in last has come to where he is seen out: he has a
transport, a task, and its first step."""


def pass_gate(path: str, name: str) -> str:
    """In a task: say `name`, then block until the test lets it pass."""
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(path)
        visitor.sendall(f"{name} {os.getpid()}\n".encode())
        visitor.recv(1)
    return name


async def pass_gate_softly(path: str, name: str) -> str:
    """The same in a coroutine; says `name-cancelled` if it is cancelled meanwhile."""
    import asyncio

    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{name} {os.getpid()}\n".encode())
    try:
        await reader.read(1)
    except asyncio.CancelledError:
        say(path, f"{name}-cancelled")
        raise
    finally:
        writer.close()
    return name


def say(path: str, name: str) -> None:
    """In a task: say `name` and go on."""
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(path)
        visitor.sendall(f"{name} {os.getpid()}\n".encode())


class Gate:
    """The test's side."""

    def __init__(self, path: str) -> None:
        import asyncio

        self.path = path
        self.pids: dict[str, int] = {}
        self._all: list[asyncio.StreamWriter] = []
        self._visitors: dict[str, asyncio.StreamWriter] = {}
        self._news = asyncio.Condition()
        self._is_closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Gate]:
        """Listen in a directory with a short name."""
        import asyncio
        import tempfile

        with tempfile.TemporaryDirectory(prefix="gate-", dir="/tmp") as place:
            gate = cls(f"{place}/s")
            server = await asyncio.start_unix_server(gate._visit, gate.path)
            yield gate
            # Nobody comes any more: asyncio loses whom a server lets in as it closes.
            os.unlink(gate.path)
            gate._is_closed = True
            for _ in range(TURNS):
                await asyncio.sleep(0)
            server.close()
            while gate._all:
                visitor = gate._all.pop()
                visitor.close()
                with suppress(OSError):
                    await visitor.wait_closed()

    async def _visit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._is_closed:
            writer.close()
            return  # it was let in while the others were seen out
        self._all.append(writer)
        words = (await reader.readline()).decode().split()
        if not words:
            return  # it was killed on its way in
        name, pid = words
        async with self._news:
            self._visitors[name] = writer
            self.pids[name] = int(pid)
            self._news.notify_all()

    async def entered(self, *names: str) -> None:
        """Wait until all of these have said that they run."""
        import asyncio

        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: set(names) <= set(self._visitors))

    async def holds(self, count: int) -> None:
        """Wait until so many have come that were not let pass."""
        import asyncio

        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: len(self.inside) >= count)

    @property
    def inside(self) -> set[str]:
        """Who has come and was not let pass."""
        return {name for name, w in self._visitors.items() if not w.is_closing()}

    def forget(self, *names: str) -> None:
        """Take no notice that these have come and gone; they may come again."""
        for name in names:
            del self._visitors[name]

    def release(self, *names: str) -> None:
        """Let these pass."""
        for name in names:
            self._visitors[name].write(b".")
            self._visitors[name].close()
