"""A node without processes, for what is around it.

`python -m tests.cli.paper_node SOCKET HOW` serves as one; HOW is "calm", "deaf" (what
runs never ends) or "stuck" (it cannot even close).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress

from aiogpu.core.queue.fair_share import Limits
from aiogpu.daemon.place import Place
from aiogpu.daemon.process import Plan, run_here
from aiogpu.engines.base import NodeOptions


class PaperNode:
    """Notes what is asked of it.

    Attributes:
        asked: the questions, in order.
        may_open, may_drain: set for it to go on; an error, to fail.
    """

    def __init__(
        self, options: NodeOptions, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.options = options
        self.asked: list[str] = []
        self.may_open = asyncio.Event()
        self.may_drain = asyncio.Event()
        self.may_open.set()
        self.may_drain.set()
        self.error: Exception | None = None
        self.listening: socket.socket | None = None
        self.logs = ""

    async def open(self) -> None:
        self.asked.append("open")
        await self.may_open.wait()
        if self.error is not None:
            raise self.error

    async def serve(self, listening: socket.socket, logs: str, limits: Limits) -> None:
        self.asked.append("serve")
        self.limits = limits
        self.listening, self.logs = listening, logs

    async def drain(self, patience: float) -> str:
        self.asked.append(f"drain {patience:g}")
        await self.may_drain.wait()
        return ""

    async def total(self) -> dict[str, float]:
        return {"CPU": 2.0, "GPU": 1.0}

    async def close(self) -> None:
        self.asked.append("close")

    def force_close(self) -> None:
        self.asked.append("force_close")


class Daemon(PaperNode):
    """Says on its terminal what it is asked."""

    async def drain(self, patience: float) -> str:
        print(f"drain {patience:g}", flush=True)
        if sys.argv[2] == "calm":
            return ""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), patience)
        return "1 task"

    async def close(self) -> None:
        print("close", flush=True)
        if sys.argv[2] == "stuck":
            await asyncio.Event().wait()

    def force_close(self) -> None:
        print("force_close", flush=True)


if __name__ == "__main__":
    options = NodeOptions(cancel_grace=0.0)
    plan = Plan(options, Place.at(sys.argv[1]), drain=60)
    run_here(plan, lambda ready: print(f"ready {ready.pid}", flush=True), Daemon)
