"""A gate between tests and tasks: a task reports that it runs, and waits to continue.

Gates replace sleeps. `Gate` is the test's side, `pass_gate` the task's side. The task's
side imports nothing that a worker would not have, and the imports of the test's side
are late: the tests start a thousand workers that import this file.
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
"""Turns of the loop after which the last accepted connection can be closed: it has a
transport, and its task has taken the first step."""


def pass_gate(path: str, name: str) -> str:
    """In a task: report `name`, then block until the test releases it."""
    with _report(path, name) as connection:
        connection.recv(1)
    return name


async def pass_gate_softly(path: str, name: str) -> str:
    """Like `pass_gate` in a coroutine; reports `name-cancelled` if it is cancelled."""
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
    """In a task: report `name` and continue."""
    _report(path, name).close()


def _report(path: str, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(f"{name} {os.getpid()}\n".encode())
    return connection


class Gate:
    """The test's side.

    Attributes:
        path: the socket, for the tasks.
        pids: process id of each task that has reported, by name.
    """

    def __init__(self, path: str) -> None:
        import asyncio

        self.path = path
        self.pids: dict[str, int] = {}
        self._all: list[asyncio.StreamWriter] = []
        self._waiting: dict[str, asyncio.StreamWriter] = {}
        self._news = asyncio.Condition()
        self._is_closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Gate]:
        """Listen on a socket with a short path."""
        import asyncio
        import tempfile

        with tempfile.TemporaryDirectory(prefix="gate-", dir="/tmp") as directory:
            gate = cls(f"{directory}/s")
            server = await asyncio.start_unix_server(gate._on_connect, gate.path)
            yield gate
            # No more connections: asyncio loses one that comes while a server closes.
            os.unlink(gate.path)
            gate._is_closed = True
            for _ in range(TURNS):
                await asyncio.sleep(0)
            server.close()
            while gate._all:
                writer = gate._all.pop()
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    async def _on_connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._is_closed:
            writer.close()
            return  # it came while the gate was closing
        self._all.append(writer)
        words = (await reader.readline()).decode().split()
        if not words:
            return  # the task was killed while it connected
        name, pid = words
        async with self._news:
            self._waiting[name] = writer
            self.pids[name] = int(pid)
            self._news.notify_all()

    async def entered(self, *names: str) -> None:
        """Wait until all of these tasks have reported."""
        import asyncio

        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: set(names) <= set(self._waiting))

    async def holds(self, count: int) -> None:
        """Wait until this number of tasks wait at the gate."""
        import asyncio

        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: len(self.inside) >= count)

    @property
    def inside(self) -> set[str]:
        """Names of the tasks that wait at the gate."""
        return {name for name, w in self._waiting.items() if not w.is_closing()}

    def forget(self, *names: str) -> None:
        """Forget that these tasks have reported; they may report again."""
        for name in names:
            del self._waiting[name]

    def release(self, *names: str) -> None:
        """Let these tasks continue."""
        for name in names:
            self._waiting[name].write(b".")
            self._waiting[name].close()

    async def let_pass(self, *names: str) -> None:
        """Wait until all of these tasks have reported, then let them continue."""
        await self.entered(*names)
        self.release(*names)
