"""Run the `aiogpu` command; start and stop a service, a node of another process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager


@asynccontextmanager
async def service(*options: str) -> AsyncIterator[str]:
    """Run a service until the end of the block; yield the path of its socket."""
    # A socket's path has at most 107 bytes, so not below $TMPDIR.
    with tempfile.TemporaryDirectory(prefix="agb-", dir="/tmp") as directory:
        path = f"{directory}/node.sock"
        await command("start", "--head", f"--socket={path}", *options)
        try:
            yield path
        finally:
            await command("stop", f"--socket={path}", "--drain=0")


async def command(*words: str, environ: Mapping[str, str] | None = None) -> None:
    """Run `aiogpu` in a session of its own, which Ctrl-C does not reach.

    Raises:
        RuntimeError: the command failed.
    """
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
