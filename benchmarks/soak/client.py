"""A program of the soak, as the process that started it sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, Final

from benchmarks.soak.operation import LIMIT
from benchmarks.soak.sandbox import ROOT, Sandbox

ANSWERS_WITHIN: Final = 2 * LIMIT + 60
"""Seconds; all that a program has begun may take the longest that is legal."""
SHOWN: Final = 4000
"""Characters of stderr that are shown where a program ends early."""


class SilentError(RuntimeError):
    """It has ended, or said nothing for too long."""


class Client:
    """One program.

    Attributes:
        account: what it has reported last.
    """

    def __init__(self, name: str, process: Process, sandbox: Sandbox) -> None:
        self.name = name
        self._sandbox = sandbox
        self._process = process
        self.account: dict[str, Any] = {}
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        name: str,
        address: str,
        seed: str,
        in_flight: int,
        is_mortal: bool = False,
    ) -> Client:
        """Start one, out of reach of Ctrl-C; `SilentError` if it does not get ready."""
        with sandbox.open_stderr(name) as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.soak.program"),
                *(address, f"{seed}/{name}", str(in_flight)),
                *(["mortal"] if is_mortal else []),
                env=sandbox.environ,
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        return cls(name, process, sandbox)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, word: str) -> None:
        """Tell it what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    async def received(self, event: str) -> dict[str, Any]:
        """Wait for an event; raises `SilentError`."""
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                while True:
                    found = await self._events.get()
                    if found["event"] == event:
                        return found
                    if found["event"] == "silent":
                        status = await self._process.wait()
                        output = self._sandbox.all_stderr()[-SHOWN:]
                        raise SilentError(
                            f"{self.name} ended with {status} before it was {event}: "
                            f"{output}"
                        )
        except TimeoutError:
            raise SilentError(
                f"{self.name} was not {event} after {ANSWERS_WITHIN:g} s"
            ) from None

    async def ended(self) -> int:
        """Its exit status."""
        await self._reading
        return await self._process.wait()

    async def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process.returncode is None:
            self._process.kill()
        await self.ended()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            found = json.loads(line)
            if "begun" in found:
                self.account = found
            if found["event"] != "account":
                self._events.put_nowait(found)
        self._events.put_nowait({"event": "silent"})
