"""`python -m tests.cli.service.paper_daemon SOCKET HOW`: a node of paper, as a process.

HOW is "calm", "deaf" (what runs never ends) or "stuck" (it cannot even close).
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from aiogpu.daemon.place import Place
from aiogpu.daemon.process import Plan, run_here
from aiogpu.engines.base import NodeOptions
from tests.cli.service.paper_node import PaperNode

HOW = sys.argv[2]


class Daemon(PaperNode):
    """Says on its terminal what it is asked."""

    async def drain(self, patience: float) -> str:
        print(f"drain {patience:g}", flush=True)
        if HOW == "calm":
            return ""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), patience)
        return "1 task"

    async def close(self) -> None:
        print("close", flush=True)
        if HOW == "stuck":
            await asyncio.Event().wait()

    def force_close(self) -> None:
        print("force_close", flush=True)


if __name__ == "__main__":
    options = NodeOptions(cancel_grace=0.0)
    plan = Plan(options, Place.at(sys.argv[1]), drain=60)
    run_here(plan, lambda ready: print(f"ready {ready.pid}", flush=True), Daemon)
