"""Start and stop an aiogpu service, a node of another process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping
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
        await command("start", "--head", f"--socket={path}", *options)
        try:
            yield path
        finally:
            await command("stop", f"--socket={path}", "--drain=0")


async def command(*words: str, environ: Mapping[str, str] | None = None) -> None:
    """Run `aiogpu`, out of reach of Ctrl-C; `RuntimeError` if it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiogpu", *words),
        env=environ,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"aiogpu {' '.join(words)}: {output.decode()}")
