"""A system as a program of its own: the runner's end, the program, and its reaper.

`python -m benchmarks.field.process reaper COMMAND ...` runs the program and ends all
that it has started. What a program leaves behind becomes a child of the nearest process
that asked for orphans (PR_SET_CHILD_SUBREAPER, prctl(2)), so nothing gets away from
there. All of it ends with the program, or with the reaper's standard input, which also
ends when the runner dies.
"""

from __future__ import annotations

import asyncio
import ctypes
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

from benchmarks.field.systems import UnsupportedError
from benchmarks.processes import cpu_time, descendants

ROOT: Final = Path(__file__).parents[2]
FLOOR: Final = "floor"
"""The name of the system that does the least that could be done."""
PROGRAM: Final = ("-m", "benchmarks.field.process", "serve")
ENVIRONMENT: Final = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""So that workers of all kinds find `benchmarks.tasks`; Ray asks for no password."""
PR_SET_CHILD_SUBREAPER: Final = 36
REAPS_EVERY: Final = 0.2
"""Seconds after which orphans that have ended are reaped."""
KILLS_WITHIN: Final = 20.0
"""Seconds after which processes are left that do not even die of SIGKILL."""


class FailedError(Exception):
    """The system has failed, or did not answer in time."""


class LateError(FailedError):
    """The system did not answer in time."""


class SystemProcess:
    """One system as the runner sees it. Everything that it starts ends with it.

    Attributes:
        libraries: what the system is made of, and their versions.
        reaper: the process above all of it; None if it does not run.
        workload: for which the program is prepared.
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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it ends in `stop`
        # Short, since it holds sockets; what is killed leaves its files in it.
        self._directory = tempfile.TemporaryDirectory(
            prefix="agf-", dir="/tmp", ignore_cleanup_errors=True
        )
        place = {"TMPDIR": self._directory.name, "RAY_TMPDIR": self._directory.name}
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
            env={**os.environ, **ENVIRONMENT, **place},
            cwd=ROOT,
        )
        theirs.close()

    def request(self, limit: float, method: str, *arguments: object) -> Any:
        """Have the program do something.

        Raises:
            FailedError: it failed, or took longer than so many seconds.
            UnsupportedError: the system cannot.
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
        """Return the seconds of CPU that all of it has used so far."""
        assert self.reaper is not None
        return cpu_time(descendants(self.reaper.pid))

    def stop(self, limit: float = 0) -> None:
        """End it with all that it has started.

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
    """The program's end: a system, and the workload that it runs now."""

    def __init__(self, name: str) -> None:
        from benchmarks.field.systems import load

        self._system = None if name == FLOOR else load(name)
        self._is_open = False
        self._context: Any = None
        self._block: Any = None

    async def prepare(self, workload: str) -> object:
        """End the workload before, and get ready for this one.

        Starts the system if need be; without the modules, if it preloads none. Returns
        the versions of what it is made of.
        """
        from benchmarks.field.workloads import WORKLOADS, Context
        from benchmarks.report import versions

        await self._leave()
        asked, system = WORKLOADS[workload], self._system
        if system is not None:
            system.require(*asked.features)
            if asked.setup.is_open and not self._is_open:
                self._is_open = True
                num_cpus, num_gpus, preload, *_ = asked.setup
                modules = None if system.lacks("preload") else preload
                await system.open(num_cpus, num_gpus, modules)
        self._context = Context(system, AsyncExitStack())
        self._block = await asked.prepare(self._context)
        return versions(system.libraries) if system is not None else {}

    async def block(self, amount: Any) -> object:
        """Run one block; return its figures, and notes."""
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
            except Exception as error:  # noqa: BLE001 - it is reported, and the run goes on
                answer = "failed", f"{type(error).__name__}: {error}"
            connection.send(answer)


def reap(command: list[str]) -> None:
    """Run the program until it ends, or the standard input does; kill what is left."""
    # The runner's caller may have blocked signals, on which systems rely.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    descriptor = int(command[-1])
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])
    os.close(descriptor)
    ended = os.pidfd_open(program.pid)
    while True:
        ready, _, _ = select.select([0, ended], [], [], REAPS_EVERY)
        _reap_children()
        if ended in ready or (0 in ready and not os.read(0, 4096)):
            break  # what the program has left may hold its connection open
    until = monotonic() + KILLS_WITHIN
    while (below := descendants()) and monotonic() < until:
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(0.01)
        _reap_children()


def _reap_children() -> None:
    """Reap the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(what: str, *words: str) -> None:
    """Be a program, on a descriptor that nothing it starts shall have; or a reaper."""
    if what == "reaper":
        reap(list(words))
        return
    import uvloop

    name, descriptor = words
    os.set_inheritable(int(descriptor), False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(name, Connection(int(descriptor))))


if __name__ == "__main__":
    main(*sys.argv[1:])
