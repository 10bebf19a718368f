"""A node in this process that programs can join, for tests of its state."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiogpu
from aiogpu.api.node import Opening
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine


class Here:
    """A node in this process, which joins it by its socket as another program would.

    Attributes:
        engine: the node.
        path: of its socket.
    """

    def __init__(self, engine: LocalEngine, path: str) -> None:
        self.engine = engine
        self.path = path

    def join(self) -> Opening:
        """Join the node as a program that works there."""
        return aiogpu.init(address=self.path, log_to_driver=False)

    def looks(self) -> Opening:
        """Join the node as a program that only looks."""
        return Opening(self.path, NodeOptions(only_looks=True), False)


@asynccontextmanager
async def node_here(
    directory: Path, *, learns: bool = True, logs: Path | None = None
) -> AsyncIterator[Here]:
    """Open a node in this process; its socket is in a directory.

    Args:
        directory: where the socket is.
        learns: the zygote learns which modules tasks import.
        logs: a directory for the output of tasks, if the node keeps it.
    """
    engine = LocalEngine(
        NodeOptions(num_cpus=2, num_gpus=1, log_to_driver=False, learns=learns),
        asyncio.get_running_loop(),
    )
    await engine.open()
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(8)
        await engine.serve(listening, "" if logs is None else str(logs))
        try:
            yield Here(engine, str(path))
        finally:
            await engine.close()
            path.unlink(missing_ok=True)  # asyncio does so itself from Python 3.13 on
