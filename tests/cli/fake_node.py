"""A fake node without processes, for tests of the service around a node.

`python -m tests.cli.fake_node SOCKET MODE` serves one; MODE is "calm", "deaf" (tasks
never end), "stuck" (the node cannot even close) or "slow" (it closes until it reads a
line, and extends its time meanwhile).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from aiogpu.core.queue.fair_share import Limits
from aiogpu.daemon.place import Place
from aiogpu.daemon.process import Plan, run_here
from aiogpu.engines.base import NodeOptions


class FakeNode:
    """Records the calls of its methods.

    Attributes:
        calls: the calls, in order.
        may_open, may_drain: cleared, they block the method.
        error: raised by `open`.
    """

    def __init__(
        self, options: NodeOptions, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.options = options
        self.calls: list[str] = []
        self.may_open = asyncio.Event()
        self.may_drain = asyncio.Event()
        self.may_open.set()
        self.may_drain.set()
        self.error: Exception | None = None
        self.listening: socket.socket | None = None
        self.logs = ""

    async def open(self) -> None:
        self.calls.append("open")
        await self.may_open.wait()
        if self.error is not None:
            raise self.error

    async def serve(self, listening: socket.socket, logs: str, limits: Limits) -> None:
        self.calls.append("serve")
        self.limits = limits
        self.listening, self.logs = listening, logs

    async def drain(self, patience: float) -> str:
        self.calls.append(f"drain {patience:g}")
        await self.may_drain.wait()
        return ""

    async def total(self) -> dict[str, float]:
        return {"CPU": 2.0, "GPU": 1.0}

    async def close(self, on_wait: Callable[[float], object]) -> None:
        self.calls.append("close")
        on_wait(3)

    def force_close(self) -> None:
        self.calls.append("force_close")


class PrintingNode(FakeNode):
    """Prints the calls of its methods."""

    async def drain(self, patience: float) -> str:
        print(f"drain {patience:g}", flush=True)
        if sys.argv[2] in ("calm", "slow"):
            return ""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), patience)
        return "1 task"

    async def close(self, on_wait: Callable[[float], object]) -> None:
        if sys.argv[2] == "slow":
            on_wait(60)
        print("close", flush=True)
        if sys.argv[2] == "slow":
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        if sys.argv[2] == "stuck":
            await asyncio.Event().wait()

    def force_close(self) -> None:
        print("force_close", flush=True)


if __name__ == "__main__":
    options = NodeOptions(cancel_grace=0.0)
    plan = Plan(options, Place.at(sys.argv[1]), drain=60)
    run_here(plan, lambda ready: print(f"ready {ready.pid}", flush=True), PrintingNode)
