"""A contestant as seen by the one who asks: it answers in time, or it is out."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.census import cpu_time, descendants
from benchmarks.field.question import Amount, Opening
from benchmarks.port import UnsupportedError

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = ("-m", "benchmarks.field.contestant")
LONGEST_LINE: Final = 1 << 26
SURROUNDINGS: Final = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""So that workers of all kinds find `benchmarks.tasks`; Ray asks for no password."""


class OutError(Exception):
    """It has failed, or did not answer in time."""


class LateError(OutError):
    """It did not answer in time."""


class Seat:
    """One contestant. Everything that it starts ends with it.

    Attributes:
        libraries: what its system is made of, and their versions.
    """

    def __init__(self, name: str, program: tuple[str, ...] = PROGRAM) -> None:
        self.name = name
        self._program = program
        self._warden: Process | None = None
        self._errors: IO[bytes] | None = None
        self.libraries: dict[str, str] = {}
        self._place: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether there is a program behind it."""
        return self._warden is not None

    async def sit(self, opening: Opening, limit: float) -> None:
        """Start the program, and the system as the opening says.

        Raises:
            OutError: it failed, or took longer than so many seconds.
            UnsupportedError: the system cannot be started so.
        """
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it ends in `leave`
        # Short, since it holds sockets; what is killed leaves its files in it.
        self._place = tempfile.TemporaryDirectory(
            prefix="agf-", dir="/tmp", ignore_cleanup_errors=True
        )
        place = {"TMPDIR": self._place.name, "RAY_TMPDIR": self._place.name}
        with theirs:
            self._warden = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.field.warden"),
                *(sys.executable, *self._program, self.name, str(theirs.fileno())),
                stdin=PIPE,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **SURROUNDINGS, **place},
                cwd=ROOT,
            )
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=ours, limit=LONGEST_LINE
        )
        if opening.is_open:
            self.libraries = await self._order(
                limit, "open", opening.num_cpus, opening.num_gpus, opening.preload
            )

    async def prepare(self, question: str, limit: float) -> None:
        """Have it get ready; raises what `sit` raises."""
        await self._order(limit, "prepare", question)

    async def block(self, amount: Amount, limit: float) -> dict[str, Any]:
        """Have it run a block; raises what `sit` raises."""
        answer: dict[str, Any] = await self._order(limit, "block", amount)
        return answer

    async def _order(self, limit: float, verb: str, *arguments: object) -> Any:
        order = json.dumps([verb, arguments]).encode()
        try:
            self._writer.write(order + b"\n")
            line = await asyncio.wait_for(self._reader.readline(), limit)
        except TimeoutError:
            raise LateError(f"no answer within {limit:g} s") from None
        except ConnectionError:
            line = b""
        if not line:
            raise OutError(f"its program ended: {self._last_words()}")
        found = json.loads(line)
        if "unsupported" in found:
            raise UnsupportedError(found["unsupported"])
        if "failed" in found:
            raise OutError(found["failed"])
        return found["answer"]

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "silently")

    def cpu_time(self) -> float:
        """Seconds of CPU that all of it has had so far."""
        assert self._warden is not None
        return cpu_time(descendants(self._warden.pid))

    async def leave(self, limit: float = 0) -> None:
        """End it with all that it has started.

        Args:
            limit: seconds that the system gets to stop by itself; at once if zero.
        """
        if self._warden is None or self._errors is None or self._place is None:
            return
        if limit:
            try:
                await self._order(limit, "close")
            except (OutError, UnsupportedError) as reason:
                print(f"{self.name}: closing: {reason}", file=sys.stderr)
        self._writer.close()
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        await self._warden.wait()
        self._errors.close()
        self._place.cleanup()
        self._warden = None
