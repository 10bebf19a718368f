"""A system as a program of its own: the runner's side, the program, and its reaper.

`python -m benchmarks.field.process reaper COMMAND ...` runs the program and ends all of
its processes. Orphans become children of the reaper, a subreaper (prctl(2)), so no
process escapes. The reaper ends when the program does, or when its standard input is
closed, which also happens when the runner dies.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from aiogpu.linux import syscalls as kernel
from benchmarks.field.systems import UnsupportedError
from benchmarks.processes import cpu_time, descendants

ROOT: Final = Path(__file__).parents[2]
FLOOR: Final = "floor"
"""The name of the system that costs the least possible."""
PROGRAM: Final = ("-m", "benchmarks.field.process", "serve")
ENVIRONMENT: Final = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Workers of all kinds find `benchmarks.tasks`; Ray asks for no password."""
REAPS_EVERY: Final = 0.2
"""Seconds between two rounds of reaping ended orphans."""
KILLS_WITHIN: Final = 20.0
"""Seconds after which the reaper gives up on processes that survive SIGKILL."""


class FailedError(Exception):
    """The system has failed, or has not answered in time."""


class LateError(FailedError):
    """The system has not answered in time."""


class SystemProcess:
    """The runner's side of one system; `stop` ends all processes of the system.

    Attributes:
        libraries: the system's libraries with their versions.
        reaper: the parent of the system's processes; None if the system is stopped.
        workload: the workload for which the program is prepared.
    """

    def __init__(self, name: str, program: tuple[str, ...] = PROGRAM) -> None:
        self.name = name
        self.libraries: dict[str, str] = {}
        self.reaper: subprocess.Popen[bytes] | None = None
        self.workload = ""
        self._program = program

    def start(self) -> None:
        """Start the program."""
        self._connection, theirs = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        # A short path, since it holds sockets; killed processes leave files in it.
        self._directory = tempfile.TemporaryDirectory(
            prefix="agf-", dir="/tmp", ignore_cleanup_errors=True
        )
        paths = dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), self._directory.name)
        self.reaper = subprocess.Popen(
            [
                *(sys.executable, "-m", __name__, "reaper", sys.executable),
                *(*self._program, self.name, f"{theirs.fileno()}"),
            ],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **paths},
            cwd=ROOT,
        )
        theirs.close()

    def request(self, limit: float, method: str, *arguments: object) -> Any:
        """Call a method of the program's `Server`; return the result.

        Raises:
            FailedError: the method failed, or took longer than `limit` seconds.
            UnsupportedError: the system lacks this feature.
        """
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(limit):
                raise LateError(f"no answer within {limit:g} s")
            kind, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").split("\n")
            last = next(filter(str.strip, reversed(lines)), "silently")
            raise FailedError(f"its program ended: {last}") from None
        if kind == "answer":
            return answer
        raise (UnsupportedError if kind == "unsupported" else FailedError)(answer)

    def cpu_time(self) -> float:
        """Return the CPU seconds of all processes of the system so far."""
        assert self.reaper is not None
        return cpu_time(descendants(self.reaper.pid))

    def stop(self, limit: float = 0) -> None:
        """End the system with all of its processes.

        Args:
            limit: seconds that the system gets to stop by itself.
        """
        if self.reaper is None:
            return
        if limit:
            try:
                self.request(limit, "close")
            except (FailedError, UnsupportedError) as reason:
                print(f"{self.name}: closing: {reason}", file=sys.stderr)
        self._connection.close()
        assert self.reaper.stdin is not None
        self.reaper.stdin.close()
        self.reaper.wait()
        self._errors.close()
        self._directory.cleanup()
        self.reaper = None
        self.workload = ""


class Server:
    """The program's side: a system, and its current workload."""

    def __init__(self, name: str) -> None:
        from benchmarks.field.systems import load

        self._system = None if name == FLOOR else load(name)
        self._is_open = False
        self._context: Any = None
        self._block: Any = None

    async def prepare(self, workload: str) -> object:
        """End the previous workload, and prepare this one.

        Starts the system if necessary. Returns the versions of its libraries.
        """
        from benchmarks.field.workloads import WORKLOADS, Context
        from benchmarks.report import versions

        await self._leave()
        next_one, system = WORKLOADS[workload], self._system
        if system is not None:
            system.require(*next_one.features)
            if next_one.setup.is_open and not self._is_open:
                self._is_open = True
                num_cpus, num_gpus, preload, *_ = next_one.setup
                modules = None if system.lacks("preload") else preload
                await system.open(num_cpus, num_gpus, modules)
        self._context = Context(system, AsyncExitStack())
        self._block = await next_one.prepare(self._context)
        return versions(system.libraries) if system is not None else {}

    async def block(self, amount: Any) -> object:
        """Run one block; return the figures and the notes."""
        figures = await self._block(amount)
        return figures, list(self._context.notes.values())

    async def close(self) -> None:
        """End the workload and the system."""
        await self._leave()
        if self._system is not None and self._is_open:
            await self._system.close()

    async def _leave(self) -> None:
        if self._context is not None:
            context, self._context, self._block = self._context, None, None
            await context.stack.aclose()


async def serve(name: str, connection: Connection[Any, Any]) -> None:
    """Answer requests until the runner is gone."""
    server = Server(name)
    with suppress(EOFError):
        while True:
            method, arguments = await asyncio.to_thread(connection.recv)
            try:
                answer = "answer", await getattr(server, method)(*arguments)
            except UnsupportedError as reason:
                answer = "unsupported", str(reason)
            except Exception as error:  # noqa: BLE001 - reported to the runner
                answer = "failed", f"{type(error).__name__}: {error}"
            connection.send(answer)


def reap(command: list[str]) -> None:
    """Run the program until it or standard input ends; kill all remaining processes."""
    # The runner's caller may have blocked signals, on which systems rely.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    kernel.adopt_orphans()
    descriptor = int(command[-1])
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
    os.close(descriptor)
    ended = os.pidfd_open(program.pid)
    while True:
        ready, _, _ = select.select([0, ended], [], [], REAPS_EVERY)
        _reap_children()
        if ended in ready or (0 in ready and not os.read(0, 4096)):
            break  # not by the connection: orphans may hold it open
    until = monotonic() + KILLS_WITHIN
    while (below := descendants()) and monotonic() < until:
        for pid in below:
            kernel.kill(pid)
        sleep(0.01)
        _reap_children()


def _reap_children() -> None:
    """Reap the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(role: str, *words: str) -> None:
    """Run as the reaper, or as the program with the descriptor of its connection."""
    if role == "reaper":
        reap(list(words))
        return
    import uvloop

    name, descriptor = words
    os.set_inheritable(int(descriptor), False)  # not for the system's processes
    uvloop.run(serve(name, Connection(int(descriptor))))


if __name__ == "__main__":
    main(*sys.argv[1:])
