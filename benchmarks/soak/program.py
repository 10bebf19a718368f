"""A program of the soak: as it runs, and as the process that started it sees it.

`python -m benchmarks.soak.program ADDRESS SEED IN_FLIGHT [mortal]` opens or joins a
node, and is then told "load", "idle" and "end" in turn, by words on stdin; it answers
by JSON lines. ADDRESS is "local" for a node of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import aiogpu
from aiogpu.testing.leaks import Resources
from benchmarks.soak.operation import LIMIT, Account, Load
from benchmarks.soak.operations import OPERATIONS
from benchmarks.soak.sandbox import OPTIONS, ROOT, Sandbox

POLLS_EVERY: Final = 0.05
REPORTS_EVERY: Final = 1.0
ANSWERS_WITHIN: Final = 2 * LIMIT + 60
"""Seconds; all that a program has begun may take the longest that is legal."""
SHOWN: Final = 4000
"""Characters of stderr that are shown where a program ends early."""


class SilentError(RuntimeError):
    """A program has ended, or said nothing for too long."""


class Client:
    """One program, as the process that started it sees it.

    Attributes:
        account: what it has reported last.
    """

    def __init__(self, name: str, process: Process, sandbox: Sandbox) -> None:
        self.name = name
        self.pid = process.pid
        self.account: dict[str, Any] = {}
        self._sandbox = sandbox
        self._process = process

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        name: str,
        seed: str,
        address: str,
        in_flight: int = 8,
        is_mortal: bool = False,
    ) -> Client:
        """Start one, out of reach of Ctrl-C; `SilentError` if it does not get ready."""
        with sandbox.open_stderr(name) as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.soak.program"),
                *(address, f"{seed}/{name}", f"{in_flight}"),
                *(["mortal"] if is_mortal else []),
                env=sandbox.environ,
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        client = cls(name, process, sandbox)
        await client.received("ready")
        return client

    def send(self, word: str) -> None:
        """Tell it what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    async def received(self, event: str) -> dict[str, Any]:
        """Wait for an event; raises `SilentError`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                async for line in self._process.stdout:
                    found: dict[str, Any] = json.loads(line)
                    if "begun" in found:
                        self.account = found
                    if found["event"] == event:
                        return found
        except TimeoutError:
            why = f"was not {event} after {ANSWERS_WITHIN:g} s"
            raise SilentError(f"{self.name} {why}") from None
        why = f"ended with {await self.ended()} before it was {event}"
        output = self._sandbox.all_stderr()[-SHOWN:]
        raise SilentError(f"{self.name} {why}: {output}")

    async def work(self, seconds: float) -> None:
        """Have it work for so long, and hear what it reports."""
        self.send("load")
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.received("at its end")

    async def ended(self) -> int:
        """Its exit status."""
        return await self._process.wait()

    async def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process.returncode is None:
            self._process.kill()
        with suppress(SilentError):
            await self.received("at its end")


async def settled(check: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """Return what is still held after the longest that may pass."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + LIMIT
    while (wrong := await check()) and loop.time() < ends:
        gc.collect()
        await asyncio.sleep(POLLS_EVERY)
    return wrong


async def public_state() -> list[str]:
    """Return what the status shows that an idle node must not have."""
    status = await aiogpu.status()
    wrong = [
        f"{name}: {status.available[name]:g} of {total:g} is free"
        for name, total in status.total.items()
        if status.available[name] != total
    ]
    for what, present in (
        ("task", status.tasks),
        ("actor", status.actors),
        ("placement", status.placements),
        ("held device", [each for each in status.devices if each.holders]),
    ):
        wrong += [f"a {what} is there: {each}" for each in present]
    if status.waiting_count:
        wrong.append(f"{status.waiting_count} tasks wait")
    return wrong


def inner_state(engine: Any) -> Callable[[], Awaitable[list[str]]]:
    """Return a check of an embedded node, with all that it keeps for itself."""

    async def check() -> list[str]:
        driver = engine._open_driver
        scheduler = driver.scheduler
        wrong = await public_state()
        scheduler.check()
        # A task keeps the last view that it was given in its worker, for good.
        segments = len(engine.store._segments)
        kept = {
            "tasks": len(scheduler.tasks),
            "leases": len(scheduler.ledger.leases),
            "calls": len(driver._calls),
            "actors": len(list(driver.actors.all())),
            "segments": segments if segments > len(scheduler.workers) else 0,
        }
        return wrong + [
            f"{count} {what} are kept" for what, count in kept.items() if count
        ]

    return check


class Program:
    """A program: does as it is told, and counts what came of it.

    What tasks print goes nowhere, through all of aiogpu that it passes.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._descriptor = os.dup(1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)

    def send(self, event: str, **facts: object) -> None:
        """Send an event."""
        line = json.dumps({"event": event, **facts}) + "\n"
        os.write(self._descriptor, line.encode())

    def on_error(self, _: object, context: dict[str, Any]) -> None:
        """Note what the loop finds wrong."""
        # Of handles that were dropped nobody asks how they have ended.
        if "never retrieved" not in context.get("message", ""):
            self._account.wrong.append(f"the loop: {context!r:.1000}")

    async def serve(self, words: asyncio.StreamReader, engine: Any, load: Load) -> None:
        """Do as it is told, until the end, or until there is nobody any more."""
        notifier = asyncio.create_task(self._report())
        stop, running = asyncio.Event(), None
        self.send("ready")
        while (word := (await words.readline()).decode().strip()) in ("load", "idle"):
            if word == "load":
                stop.clear()
                running = asyncio.create_task(load.run(stop))
                continue
            stop.set()
            if running is not None:
                await running
            gc.collect()
            held = []
            if hasattr(engine, "_open_driver"):
                # A shared node holds what others want of it, too.
                held = await settled(inner_state(engine))
            self.send("idled", held=held, **self._account.as_json())
        stop.set()
        if running is not None:
            if not word:
                running.cancel()
            await asyncio.wait([running])
        notifier.cancel()

    async def _report(self) -> None:
        """Report again and again how far it has come."""
        while True:
            await asyncio.sleep(REPORTS_EVERY)
            self.send("account", **self._account.as_json())


async def main(address: str, seed: str, in_flight: int, is_mortal: bool) -> None:
    """Open or join, serve, and leave nothing."""
    account = Account(is_mortal, is_joined=address != "local")
    program = Program(account)
    loop, words = asyncio.get_running_loop(), asyncio.StreamReader()
    loop.set_exception_handler(program.on_error)
    protocol = asyncio.StreamReaderProtocol(words)
    await loop.connect_read_pipe(lambda: protocol, sys.stdin)
    load = Load(OPERATIONS, seed, in_flight, account)
    before = Resources.take()
    options = OPTIONS if address == "local" else {}
    async with aiogpu.init(address=address, **options) as session:
        node: Any = session
        await program.serve(words, node._session._engine, load)
    del session, node
    gc.collect()
    left = Resources.take().since(before)
    program.send("ended", left=left, **account.as_json())


if __name__ == "__main__":
    where, drawn, flight, *how = sys.argv[1:]
    aiogpu.run(main(where, drawn, int(flight), "mortal" in how))
