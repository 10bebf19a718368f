"""Very many floors: workers as bare as the one of `floor`, forked from one process.

So what a call costs where each goes to another process than the last, whoever has
made them: the kernel wakes one that has slept long, and its caches are others' by now.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from benchmarks.floor import Floor, work


@asynccontextmanager
async def open_floors(count: int) -> AsyncIterator[list[Floor]]:
    """So many floors, each with a process of its own."""
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [far.fileno() for _, far in pairs]
    crowd = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *map(str, theirs), pass_fds=theirs
    )
    loop = asyncio.get_running_loop()
    opened = []
    for ours, far in pairs:
        far.close()
        opened.append(await loop.create_unix_connection(Floor, sock=ours))
    try:
        yield [floor for _, floor in opened]
    finally:
        for transport, _ in opened:
            transport.close()
        await crowd.wait()


def fork_all(connections: Sequence[int]) -> None:
    """One worker for each; returns when all have ended."""
    for connection in connections:
        if not os.fork():
            work(socket.socket(fileno=connection))
            os._exit(0)
    for _ in connections:
        os.wait()


if __name__ == "__main__":
    fork_all([int(number) for number in sys.argv[1:]])
