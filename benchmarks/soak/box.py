"""A place of its own for a node and its programs, and what of them is there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from benchmarks.processes import Process, belonging
from benchmarks.soak import shares, stacks
from benchmarks.soak.node import SERVICE

LIMITING: Final = "AIOGPU_SOAK_LIMIT"
"""The variable that says after how many seconds an operation hangs."""
LOOK_EVERY: Final = 0.1
ENDS_WITHIN: Final = 30.0
"""Seconds after which nothing is left; two are promised, on a box that is idle."""
ROOT: Final = Path(__file__).parents[2]


class Box:
    """See above.

    Attributes:
        runtime: the runtime directory, by which its processes are known.
        environ: the variables of all of them.
        address: where its service is met.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.runtime = f"{directory}/run"
        self._spill = f"{directory}/spill"
        for place in (self.runtime, self._spill, f"{directory}/locks"):
            os.mkdir(place, 0o700)
        self.address = f"{self.runtime}/aiogpu/node.sock"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        kept = {k: v for k, v in os.environ.items() if not _is_told_apart(k)}
        self.environ = {
            **kept,
            **shares.environment(f"{directory}/locks"),
            stacks.PLACE: self.runtime,
            "XDG_RUNTIME_DIR": self.runtime,
            "TMPDIR": self._spill,
            "PYTHONPATH": path.rstrip(os.pathsep),
        }

    def processes(self) -> list[Process]:
        """All that have not ended."""
        return belonging(self.runtime)

    def complaints_of(self, name: str) -> IO[bytes]:
        """Where a program's stderr goes."""
        return open(f"{self._directory}/{name}.err", "wb")

    def all_complaints(self) -> str:
        """What all programs have written to stderr, and the services to their logs."""
        places = [
            *sorted(Path(self._directory).glob("*.err")),
            *sorted(Path(self.runtime).glob("aiogpu/logs/node.*")),
        ]
        return "\n".join(place.read_text(errors="replace") for place in places)

    async def start_service(self) -> None:
        """Start a node that programs share; `RuntimeError` if it does not start."""
        await self._aiogpu("start", "--head", *SERVICE)

    async def stop_service(self, drain: float) -> None:
        """Stop it."""
        await self._aiogpu("stop", f"--drain={drain:g}")

    async def _aiogpu(self, *words: str) -> None:
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiogpu", *words),
            env=self.environ,
            cwd=ROOT,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        told, _ = await command.communicate()
        if command.returncode:
            raise RuntimeError(f"aiogpu {' '.join(words)}: {told.decode()}")

    async def left(self, but_logs: bool = False) -> list[str]:
        """What is there still, after the time in which all should have ended."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + ENDS_WITHIN
        while found := self.processes():
            if loop.time() > ends:
                break
            await asyncio.sleep(LOOK_EVERY)
        told = [f"process {process}" for process in found]
        return told + [f"file {path}" for path in self._files(but_logs)]

    def _files(self, but_logs: bool) -> Iterator[str]:
        for top in (self.runtime, self._spill):
            for at, folders, names in os.walk(top):
                if but_logs:
                    folders[:] = [name for name in folders if name != "logs"]
                if not (but_logs and at == f"{self.runtime}/aiogpu"):
                    yield from (f"{at}/{name}/" for name in folders if name != "aiogpu")
                yield from (f"{at}/{name}" for name in names)


def _is_told_apart(name: str) -> bool:
    return name.startswith(("AIOGPU_", "CUDA_")) and name != LIMITING


@contextmanager
def box() -> Iterator[Box]:
    """One that is empty before, and removed after."""
    # A short path: a socket's has 107 bytes.
    directory = tempfile.mkdtemp(prefix="ags-", dir="/tmp")
    opened = Box(directory)
    try:
        yield opened
    finally:
        for process in opened.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
