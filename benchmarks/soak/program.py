"""`python -m benchmarks.soak.program ADDRESS SEED IN_FLIGHT [mortal]`: one program.

It opens or joins a node, and is then told "load", "idle" and "end" in turn. ADDRESS is
"local" for a node of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiogpu
from aiogpu.testing.leaks import Resources
from benchmarks.soak.operation import LIMIT, Account, Load
from benchmarks.soak.operations import OPERATIONS
from benchmarks.soak.sandbox import OPTIONS


class Channel:
    """The program's end: words on stdin, JSON lines on what was stdout.

    What tasks print goes nowhere, through all of aiogpu that it passes.
    """

    def __init__(self, reader: asyncio.StreamReader, descriptor: int) -> None:
        self._reader = reader
        self._descriptor = descriptor

    @classmethod
    async def open(cls) -> Channel:
        """Take stdin and stdout."""
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

    async def receive(self) -> str:
        """Return the next word; "" if there is nobody any more."""
        return (await self._reader.readline()).decode().strip()

    def send(self, event: str, **facts: object) -> None:
        """Send an event."""
        line = json.dumps({"event": event, **facts}) + "\n"
        os.write(self._descriptor, line.encode())


POLLS_EVERY: Final = 0.05


async def settled(check: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """Return what is still held after the longest that may pass."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + LIMIT
    while wrong := await check():
        if loop.time() > ends:
            return wrong
        gc.collect()
        await asyncio.sleep(POLLS_EVERY)
    return []


async def public_state() -> list[str]:
    """Return what the status shows that an idle node must not have."""
    status = await aiogpu.status()
    wrong = [
        f"{name}: {status.available[name]:g} of {total:g} is free"
        for name, total in status.total.items()
        if status.available[name] != total
    ]
    wrong += [f"a task is there: {task}" for task in status.tasks]
    wrong += [f"an actor is there: {actor}" for actor in status.actors]
    wrong += [f"a placement is there: {group}" for group in status.placements]
    if status.waiting_count:
        wrong.append(f"{status.waiting_count} tasks wait")
    wrong += [
        f"device {device.id} is held or out of use: {device}"
        for device in status.devices
        if device.holders
    ]
    return wrong


def inner_state(engine: Any) -> Callable[[], Awaitable[list[str]]]:
    """Return a check of an embedded node, with all that it keeps for itself."""

    async def check() -> list[str]:
        driver = engine._open_driver
        scheduler = driver.scheduler
        wrong = await public_state()
        scheduler.check()
        kept = {
            "tasks": len(scheduler.tasks),
            "leases": len(scheduler.ledger.leases),
            "calls": len(driver._calls),
            "actors": len(list(driver.actors.all())),
        }
        # A task keeps the last view that it was given in its worker, for good.
        kept_by_tasks = len(scheduler.workers)
        if len(engine.store._segments) > kept_by_tasks:
            kept["segments"] = len(engine.store._segments)
        return wrong + [
            f"{count} {what} are kept" for what, count in kept.items() if count
        ]

    return check


REPORTS_EVERY: Final = 1.0


class Program:
    """A program: does as it is told, and counts what came of it."""

    def __init__(self, channel: Channel, session: Any, load: Load) -> None:
        self._channel = channel
        self._node = session
        self._load = load
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Do as it is told, until the end."""
        self._channel.send("ready", pid=os.getpid())
        while True:
            word = await self._channel.receive()
            match word:
                case "load":
                    self._stop.clear()
                    self._running = asyncio.create_task(self._load.run(self._stop))
                case "idle":
                    held = await self._idle()
                    self._channel.send(
                        "idled", held=held, **self._load.account.as_json()
                    )
                case _:
                    if not word:
                        self._load.cancel()
                    await self._stop_load()
                    return

    async def report(self) -> None:
        """Report again and again how far it has come."""
        while True:
            await asyncio.sleep(REPORTS_EVERY)
            self._channel.send("account", **self._load.account.as_json())

    async def _stop_load(self) -> None:
        self._stop.set()
        if self._running is not None:
            await self._running

    async def _idle(self) -> list[str]:
        await self._stop_load()
        gc.collect()
        engine = self._node._session._engine
        if not hasattr(engine, "_open_driver"):
            return []  # a shared node holds what others want of it, too
        return await settled(inner_state(engine))


def exception_handler(account: Account) -> Any:
    """Return a handler for what the loop finds wrong."""

    def handle(_: object, context: dict[str, Any]) -> None:
        # Of handles that were dropped nobody asks how they have ended.
        if "never retrieved" not in context.get("message", ""):
            account.wrong.append(f"the loop: {context!r:.1000}")

    return handle


async def main(address: str, seed: str, in_flight: int, is_mortal: bool) -> None:
    """Open or join, serve, and leave nothing."""
    channel = await Channel.open()
    account = Account(is_mortal, is_joined=address != "local")
    asyncio.get_running_loop().set_exception_handler(exception_handler(account))
    before = Resources.take()
    options = OPTIONS if address == "local" else {}
    async with aiogpu.init(address=address, **options) as session:
        load = Load(OPERATIONS, seed, in_flight, account)
        program = Program(channel, session, load)
        notifier = asyncio.create_task(program.report())
        await program.serve()
        notifier.cancel()
    gc.collect()
    left = Resources.take().since(before)
    channel.send("ended", left=left, **account.as_json())


if __name__ == "__main__":
    where, drawn, flight, *how = sys.argv[1:]
    aiogpu.run(main(where, drawn, int(flight), "mortal" in how))
