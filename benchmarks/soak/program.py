"""A program of the soak, and its client in the process that starts it.

`python -m benchmarks.soak.program ADDRESS SEED IN_FLIGHT [mortal]` opens or joins a
node. It reads the words "load", "idle" and "end" from stdin and answers by JSON lines.
ADDRESS is "local" for a node of its own.
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
"""Seconds, enough for all handles of a program to take the longest legal time."""
SHOWN: Final = 4000
"""Characters of stderr that are shown if a program ends early."""


class SilentError(RuntimeError):
    """A program has ended, or has not answered in time."""


class Client:
    """One program, in the process that has started the program.

    Attributes:
        account: the last report of the program.
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
        """Start a program, which Ctrl-C does not reach, and wait until it is ready."""
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
        """Send the program a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    async def received(self, event: str) -> dict[str, Any]:
        """Wait for an event of the program; raises `SilentError`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                async for line in self._process.stdout:
                    report: dict[str, Any] = json.loads(line)
                    if "begun" in report:
                        self.account = report
                    if report["event"] == event:
                        return report
        except TimeoutError:
            why = f"was not {event} after {ANSWERS_WITHIN:g} s"
            raise SilentError(f"{self.name} {why}") from None
        why = f"ended with {await self.ended()} before it was {event}"
        output = self._sandbox.all_stderr()[-SHOWN:]
        raise SilentError(f"{self.name} {why}: {output}")

    async def work(self, seconds: float) -> None:
        """Let the program work for this time, and read its reports."""
        self.send("load")
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.received("at its end")

    async def ended(self) -> int:
        """Wait for the program's end; return the exit status."""
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the program."""
        if self._process.returncode is None:
            self._process.kill()
        with suppress(SilentError):
            await self.received("at its end")


async def settled(check: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """Wait until the check returns nothing, or return the result after `LIMIT`."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + LIMIT
    while (wrong := await check()) and loop.time() < ends:
        gc.collect()
        await asyncio.sleep(POLLS_EVERY)
    return wrong


async def public_state() -> list[str]:
    """Return everything in the status that an idle node must not have."""
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
    """Return a check of an embedded node, its internal state included."""

    async def check() -> list[str]:
        driver = engine._open_driver
        scheduler = driver.scheduler
        wrong = await public_state()
        scheduler.check()
        # `tasks.keep` keeps its last view in its worker for good.
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
    """The program: obeys commands, and counts the ends of its handles.

    The tasks' output passes through aiogpu and is then discarded.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._descriptor = os.dup(1)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)

    def send(self, event: str, **facts: object) -> None:
        """Send an event."""
        line = json.dumps({"event": event, **facts}) + "\n"
        os.write(self._descriptor, line.encode())

    def on_error(self, _: object, context: dict[str, Any]) -> None:
        """Record an error of the event loop."""
        # The errors of dropped handles are never retrieved.
        if "never retrieved" not in context.get("message", ""):
            self._account.wrong.append(f"the loop: {context!r:.1000}")

    async def serve(self, words: asyncio.StreamReader, engine: Any, load: Load) -> None:
        """Obey commands until "end", or until stdin is closed."""
        reporting = asyncio.create_task(self._report())
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
                # Not on a shared node, which also holds the work of others.
                held = await settled(inner_state(engine))
            self.send("idled", held=held, **self._account.as_json())
        stop.set()
        if running is not None:
            if not word:
                running.cancel()
            await asyncio.wait([running])
        reporting.cancel()

    async def _report(self) -> None:
        """Report the account again and again."""
        while True:
            await asyncio.sleep(REPORTS_EVERY)
            self.send("account", **self._account.as_json())


async def main(address: str, seed: str, in_flight: int, is_mortal: bool) -> None:
    """Open or join a node, serve commands, and check that nothing is left."""
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
    address, seed, in_flight, *options = sys.argv[1:]
    aiogpu.run(main(address, seed, int(in_flight), "mortal" in options))
