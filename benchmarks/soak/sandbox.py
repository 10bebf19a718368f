"""A sandbox for one node and its programs: directories, variables, processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from aiogpu.linux import syscalls as kernel
from benchmarks.processes import Process, belonging
from benchmarks.service import command
from benchmarks.soak.tasks import LOCKS

OPTIONS: Final[dict[str, Any]] = {
    "num_cpus": 3,
    "num_gpus": 2,
    "object_memory": 48 << 20,  # little, so that values spill
    "cancel_grace": 0.3,
}
SERVICE: Final = tuple(
    f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()
)
"""The same options for the command that starts a service."""
LIMIT_VARIABLE: Final = "AIOGPU_SOAK_LIMIT"
"""The variable with the seconds after which an operation counts as hanging."""
DEFAULT_LIMIT: Final = "120"
"""Seconds; random operations take a few at most."""
RUNTIME: Final = "AIOGPU_SOAK_RUNTIME"
"""The variable with the sandbox's runtime directory."""
POLLS_EVERY: Final = 0.1
ENDS_WITHIN: Final = 30.0
"""Seconds after which nothing may be left; on an idle machine two are promised."""
DUMPING: Final = 0.1
"""Seconds that a process gets to write its stacks."""
ROOT: Final = Path(__file__).parents[2]


class Sandbox:
    """Directories of their own for a node and its programs, and their processes.

    Attributes:
        runtime: the runtime directory; processes are found by this variable.
        environ: the variables of all processes.
        address: the socket of the service.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.runtime = f"{directory}/run"
        self._spill = f"{directory}/spill"
        for folder in (self.runtime, self._spill, f"{directory}/locks"):
            os.mkdir(folder, 0o700)
        self.address = f"{self.runtime}/aiogpu/node.sock"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        replaced = "AIOGPU_", "CUDA_"
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(replaced)},
            LIMIT_VARIABLE: os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT),
            LOCKS: f"{directory}/locks",
            RUNTIME: self.runtime,
            "XDG_RUNTIME_DIR": self.runtime,
            "TMPDIR": self._spill,
            "PYTHONPATH": path.rstrip(os.pathsep),
        }

    def processes(self) -> list[Process]:
        """Return the processes that have not ended."""
        return belonging(self.runtime)

    def node(self) -> Process:
        """Return the process of the service."""
        return next(each for each in self.processes() if each.kind == "nodes")

    def open_stderr(self, name: str) -> IO[bytes]:
        """Open the file for a program's stderr."""
        return open(f"{self._directory}/{name}.err", "wb")

    def all_stderr(self) -> str:
        """Return the stderr of all programs, and the logs of services."""
        folder = Path(self._directory)
        paths = [*folder.glob("*.err"), *folder.glob("run/aiogpu/logs/node.*")]
        return "\n".join(path.read_text(errors="replace") for path in sorted(paths))

    async def start_service(self) -> None:
        """Start a node that programs share; `RuntimeError` if the command fails."""
        await command("start", "--head", *SERVICE, environ=self.environ)

    async def stop_service(self, drain: float) -> None:
        """Stop the service after `drain` seconds at most."""
        await command("stop", f"--drain={drain:g}", environ=self.environ)

    async def left(self, except_logs: bool = False) -> list[str]:
        """Wait for the end of everything; return the processes and files that stay."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + ENDS_WITHIN
        while (processes := self.processes()) and loop.time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(POLLS_EVERY)
        files = [f"file {path}" for path in self._files(except_logs)]
        return [*(f"process {process}" for process in processes), *files]

    def _files(self, except_logs: bool) -> Iterator[str]:
        for top in (self.runtime, self._spill):
            for at, folders, names in os.walk(top):
                if except_logs:
                    folders[:] = [name for name in folders if name != "logs"]
                if not (except_logs and at == f"{self.runtime}/aiogpu"):
                    yield from (f"{at}/{name}/" for name in folders if name != "aiogpu")
                yield from (f"{at}/{name}" for name in names)


@contextmanager
def open_sandbox() -> Iterator[Sandbox]:
    """Make an empty sandbox; its processes and files end with the block."""
    # A short path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(
        prefix="ags-", dir="/tmp", ignore_cleanup_errors=True
    ) as directory:
        sandbox = Sandbox(directory)
        try:
            yield sandbox
        finally:
            for process in sandbox.processes():
                kernel.kill(process.pid)


async def dump_all_stacks() -> None:
    """Make all processes of this sandbox print the stacks of their threads to stderr.

    Programs and workers do so at a signal: see `benchmarks.soak.tasks`. The handler is
    faulthandler's, in C, so it works even if no Python code runs any more.
    """
    runtime = os.environ.get(RUNTIME)
    for process in belonging(runtime) if runtime else ():
        with suppress(OSError):  # ended meanwhile
            if _catches(process.pid):  # without a handler the signal would kill
                print(f"stacks of {process}:", file=sys.stderr, flush=True)
                os.kill(process.pid, signal.SIGUSR2)
                await asyncio.sleep(DUMPING)


def _catches(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return caught >> (signal.SIGUSR2 - 1) & 1
