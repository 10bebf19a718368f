"""Start and stop an aiogpu service, a node of another process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LONGEST: Final = 40
"""Characters of the directory in which a socket's own directory is made: the path of
a socket has at most 107."""


@asynccontextmanager
async def service(*options: str) -> AsyncIterator[str]:
    """Run a service until the end of the block; gives the path of its socket."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) < LONGEST else "/tmp"
    with tempfile.TemporaryDirectory(prefix="agb-", dir=parent) as directory:
        path = f"{directory}/node.sock"
        await _aiogpu("start", "--head", f"--socket={path}", *options)
        try:
            yield path
        finally:
            await _aiogpu("stop", f"--socket={path}", "--drain=0")


async def _aiogpu(*words: str) -> None:
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiogpu", *words, stdout=PIPE
    )
    output, _ = await command.communicate()
    assert command.returncode == 0, output
