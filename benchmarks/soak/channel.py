"""How a program of the soak is told what to do, and tells what came of it.

Words come by lines on stdin, one by one; answers leave as lines of JSON on what was
stdout. What tasks print goes nowhere, through all of aiogpu that it passes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys


class Channel:
    """The program's end."""

    def __init__(self, reader: asyncio.StreamReader, descriptor: int) -> None:
        self._reader = reader
        self._descriptor = descriptor

    @classmethod
    async def open(cls) -> Channel:
        """Take stdin and stdout for it."""
        descriptor = os.dup(1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        return cls(reader, descriptor)

    async def hear(self) -> str:
        """The next word; "" if there is nobody any more."""
        return (await self._reader.readline()).decode().strip()

    def tell(self, event: str, **told: object) -> None:
        """Say what came of it."""
        line = json.dumps({"event": event, **told}) + "\n"
        os.write(self._descriptor, line.encode())
