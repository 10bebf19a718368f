"""Directories, variables and processes of one node and its programs; their stacks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.processes import Process, belonging
from benchmarks.service import command
from benchmarks.soak.tasks import LOCKS

OPTIONS: Final[dict[str, Any]] = {
    "num_cpus": 3,
    "num_gpus": 2,
    "object_memory": 48 << 20,  # little, so that values are spilled
    "cancel_grace": 0.3,
}
SERVICE: Final = tuple(
    f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()
)
"""The same for the command that starts a service."""
LIMIT_VARIABLE: Final = "AIOGPU_SOAK_LIMIT"
"""The variable that says after how many seconds an operation hangs."""
RUNTIME: Final = "AIOGPU_SOAK_RUNTIME"
"""The variable that holds the runtime directory of all of them."""
POLLS_EVERY: Final = 0.1
ENDS_WITHIN: Final = 30.0
"""Seconds after which nothing is left; two are promised, on an idle machine."""
DUMPING: Final = 0.1
"""Seconds in which a process has written its stacks."""
ROOT: Final = Path(__file__).parents[2]


class Sandbox:
    """Directories of their own for a node and its programs, and their processes.

    Attributes:
        runtime: the runtime directory, by which its processes are known.
        environ: the variables of all of them.
        address: the socket of its service.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.runtime = f"{directory}/run"
        self._spill = f"{directory}/spill"
        for folder in (self.runtime, self._spill, f"{directory}/locks"):
            os.mkdir(folder, 0o700)
        self.address = f"{self.runtime}/aiogpu/node.sock"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        kept = {k: v for k, v in os.environ.items() if not _is_replaced(k)}
        self.environ = {
            **kept,
            LOCKS: f"{directory}/locks",
            RUNTIME: self.runtime,
            "XDG_RUNTIME_DIR": self.runtime,
            "TMPDIR": self._spill,
            "PYTHONPATH": path.rstrip(os.pathsep),
        }

    def processes(self) -> list[Process]:
        """Return all that have not ended."""
        return belonging(self.runtime)

    def node(self) -> Process:
        """Return the process of its service."""
        return next(each for each in self.processes() if each.part == "nodes")

    def open_stderr(self, name: str) -> IO[bytes]:
        """Open the file for a program's stderr."""
        return open(f"{self._directory}/{name}.err", "wb")

    def all_stderr(self) -> str:
        """Return what all programs wrote to stderr, and services to their logs."""
        places = [
            *sorted(Path(self._directory).glob("*.err")),
            *sorted(Path(self.runtime).glob("aiogpu/logs/node.*")),
        ]
        return "\n".join(place.read_text(errors="replace") for place in places)

    async def start_service(self) -> None:
        """Start a node that programs share; `RuntimeError` if it does not start."""
        await command("start", "--head", *SERVICE, environ=self.environ)

    async def stop_service(self, drain: float) -> None:
        """Stop it."""
        await command("stop", f"--drain={drain:g}", environ=self.environ)

    async def left(self, except_logs: bool = False) -> list[str]:
        """Return what is there still, after the time in which all should have ended."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + ENDS_WITHIN
        while found := self.processes():
            if loop.time() > ends:
                break
            await asyncio.sleep(POLLS_EVERY)
        files = [f"file {path}" for path in self._files(except_logs)]
        return [*(f"process {process}" for process in found), *files]

    def _files(self, except_logs: bool) -> Iterator[str]:
        for top in (self.runtime, self._spill):
            for at, folders, names in os.walk(top):
                if except_logs:
                    folders[:] = [name for name in folders if name != "logs"]
                if not (except_logs and at == f"{self.runtime}/aiogpu"):
                    yield from (f"{at}/{name}/" for name in folders if name != "aiogpu")
                yield from (f"{at}/{name}" for name in names)


def _is_replaced(name: str) -> bool:
    return name.startswith(("AIOGPU_", "CUDA_")) and name != LIMIT_VARIABLE


@contextmanager
def open_sandbox() -> Iterator[Sandbox]:
    """Make an empty sandbox; its processes and files end with the block."""
    # A short path: a socket's has 107 bytes.
    directory = tempfile.mkdtemp(prefix="ags-", dir="/tmp")
    opened = Sandbox(directory)
    try:
        yield opened
    finally:
        for process in opened.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


async def dump_all_stacks() -> None:
    """Have all processes of this sandbox print the stacks of their threads to stderr.

    Programs and workers do so at a signal: see `benchmarks.soak.tasks`. The handler is
    faulthandler's, in C, and so works where no Python code runs any more.
    """
    runtime = os.environ.get(RUNTIME)
    for process in belonging(runtime) if runtime else ():
        with suppress(OSError):  # it has ended meanwhile
            if _catches(process.pid):  # or it would die of the signal
                print(f"stacks of {process}:", file=sys.stderr, flush=True)
                os.kill(process.pid, signal.SIGUSR2)
                await asyncio.sleep(DUMPING)


def _catches(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return caught >> (signal.SIGUSR2 - 1) & 1
