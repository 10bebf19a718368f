"""A program of the soak, as the one that has started it sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, Final

from benchmarks.soak.box import ROOT, Box
from benchmarks.soak.operation import LIMIT

PATIENCE: Final = 2 * LIMIT + 60
"""Seconds in which it answers: all it has begun may take the longest that is legal."""
COMPLAINED: Final = 4000
"""Letters of what programs have complained of that are told."""


class SilentError(RuntimeError):
    """It has ended, or said nothing for too long."""


class Client:
    """See above.

    Attributes:
        told: what it has said last of its account.
    """

    def __init__(self, name: str, process: Process, box: Box) -> None:
        self.name = name
        self._box = box
        self._process = process
        self.told: dict[str, Any] = {}
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        box: Box,
        name: str,
        address: str,
        seed: str,
        in_flight: int,
        is_mortal: bool = False,
    ) -> Client:
        """Start one, out of reach of Ctrl-C; `SilentError` if it does not get ready."""
        with box.complaints_of(name) as complaints:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.soak.program"),
                *(address, f"{seed}/{name}", str(in_flight)),
                *(["mortal"] if is_mortal else []),
                env=box.environ,
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                stderr=complaints,
                start_new_session=True,
            )
        return cls(name, process, box)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def say(self, word: str) -> None:
        """Tell it what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    async def heard(self, event: str) -> dict[str, Any]:
        """What it says of that; raises `SilentError`."""
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    found = await self._events.get()
                    if found["event"] == event:
                        return found
                    if found["event"] == "silent":
                        status = await self._process.wait()
                        complaints = self._box.all_complaints()[-COMPLAINED:]
                        raise SilentError(
                            f"{self.name} ended with {status} before it was {event}: "
                            f"{complaints}"
                        )
        except TimeoutError:
            raise SilentError(
                f"{self.name} was not {event} after {PATIENCE:g} s"
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
                self.told = found
            if found["event"] != "account":
                self._events.put_nowait(found)
        self._events.put_nowait({"event": "silent"})
