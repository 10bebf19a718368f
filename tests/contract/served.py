"""An engine for tests: a node in another process, for one program alone.

Services are forked from a *forker*, in a tenth of the time of a fresh start. For each
service the forker reads a line with options and the path of a socket. It answers with
the service's process id once that listens, or with the error. The forker and all its
services end with the process that the forker watches. A service's first zygote is
forked from the service itself, unless a test is `fresh`.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import uvloop

from aiogpu.core.queue.fair_share import Limits
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine
from aiogpu.engines.registry import OF_PROGRAMS
from aiogpu.engines.remote import RemoteEngine
from aiogpu.runtime.zygote import config as zygote_config
from aiogpu.runtime.zygote.config import interpreter_flags, start_interpreter
from aiogpu.worker.zygote.main import main as zygote
from tests.support import zygote_forker
from tests.support.forked_zygotes import Forked, inherited_state, without_seed
from tests.support.program import environment

LIMIT: Final = 60.0
IMPORTED: Final = (
    *(f"aiogpu.accelerators.{kind}" for kind in ("nvidia", "amd", "ascend", "gaudi")),
    *(f"aiogpu.accelerators.{kind}" for kind in ("intel_gpu", "neuron", "tpu")),
    *("aiogpu.engines.devices", "aiogpu.engines.server_info"),
    "aiogpu.runtime.callers.programs",
)
"""Modules that each service would otherwise import as it opens, in 40 ms."""


class Forker:
    """Forks services, for all tests of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.served", str(os.getpid())],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, path: str, options: dict[str, object]) -> int:
        """Fork a service that listens at a path; raise the error if it cannot."""
        is_fresh = zygote_config.start_interpreter is start_interpreter
        request = path, {**options, "is_fresh": is_fresh}, dict(os.environ)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(pickle.dumps(request).hex() + "\n")
            self._process.stdin.flush()
            pid, error = self._process.stdout.readline().split()
        if error != "-":
            raise pickle.loads(bytes.fromhex(error))
        return int(pid)

    def close(self) -> None:
        """End the forker; each test ends its own services."""
        self._process.communicate(timeout=LIMIT)


forker: Forker | None = None
"""Set when a test of this process first needs a service."""


class ServedEngine(RemoteEngine):
    """Starts a service with a program's options, joins it, and ends it on close."""

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="ags-", dir="/tmp")
        self._all = options
        self.service = 0
        own = {name: getattr(options, name) for name in OF_PROGRAMS}
        super().__init__(f"{self._place.name}/s", NodeOptions(**own), loop)

    async def open(self) -> None:
        given = {**self._all._asdict(), "preload": (), "log_to_driver": False}
        given.pop("only_looks")
        assert forker is not None
        try:
            self.service = await asyncio.to_thread(forker.fork, self._path, given)
            await super().open()
        except BaseException:
            self._page.close()
            await self._end_service()
            raise

    @property
    def segments(self) -> int:
        """The number of shared memory segments that the service holds."""
        links = descriptors(self.service)
        return sum("memfd:aiogpu-segment" in link for link in links)

    async def close(self) -> None:
        await super().close()
        await self._end_service()

    async def _end_service(self) -> None:
        pid, self.service = self.service, 0
        if pid:
            ended = os.pidfd_open(pid)
            os.kill(pid, signal.SIGTERM)
            await asyncio.to_thread(wait_for_end, ended)
        self._place.cleanup()

    def close_now(self) -> None:
        super().close_now()
        if self.service:
            os.kill(self.service, signal.SIGKILL)


def descriptors(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process lead to."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the descriptor was closed meanwhile
            yield os.readlink(link)


def wait_for_end(pidfd: int) -> None:
    """Wait until a process has ended, and close its pidfd."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(LIMIT * 1000), "the process does not end"
    os.close(pidfd)


class Spare:
    """A fork, made before the service's loop, that becomes its first zygote."""

    def __init__(self, *passed_on: int) -> None:
        self._begins = comparable(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            for descriptor in passed_on:
                os.close(descriptor)
            become_zygote(theirs)
        theirs.close()
        zygote_config.start_interpreter = self.start

    def start(
        self,
        fields: dict[str, object],
        page: int,
        output: int,
        environ: Mapping[str, str] | None = None,
        directory: str | None = None,
        executable: str | None = None,
        flags: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Turn the fork into the zygote, or start one with another environment."""
        variables = dict(os.environ if environ is None else environ)
        request = marshal.dumps((fields, variables))
        if (
            self._socket.fileno() < 0
            or executable != sys.executable
            or list(flags) != interpreter_flags()
            or len(request) > zygote_forker.LARGEST
            or comparable(without_seed(fields, variables)) != self._begins
        ):
            return start_interpreter(
                fields, page, output, environ, directory, executable, flags
            )
        place = os.open(directory or ".", os.O_PATH | os.O_CLOEXEC)
        with self._socket:
            socket.send_fds(self._socket, [request], [page, output, place])
            self._socket.recv(4)
        os.close(place)
        return Forked(self._pid)


def become_zygote(requests: socket.socket) -> None:
    """In a fork: wait for the zygote's request, and run the zygote; never returns."""
    code = 0
    try:
        request, passed = zygote_forker.receive(requests)
        if request:
            zygote(zygote_forker.begin(requests, request, *passed))
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def comparable(environ: Mapping[str, str]) -> list[object]:
    """Return the variables that a zygote starts with, except the path."""
    return inherited_state({k: v for k, v in environ.items() if k != "PYTHONPATH"})


def main(watched: int) -> None:
    """Serve until stdin or the watched process ends."""
    zygote_forker.prepare(IMPORTED)
    ours = os.pidfd_open(os.getpid())
    for line in requests(watched):
        path, options, environ = pickle.loads(bytes.fromhex(line))
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            run_service(path, options, environ, writing, ours)
        os.close(writing)
        with open(reading, "rb") as pipe:
            error = pipe.read()
        print(f"{pid} {error.hex() or '-'}", flush=True)


def requests(watched: int) -> Iterator[str]:
    """Yield requests until stdin or the watched process ends.

    A fork of that process may keep stdin open, so its end alone does not suffice.
    """
    theirs = os.pidfd_open(watched)
    if os.getppid() != watched:
        return  # it has ended, and another process may have its id by now
    poll = select.poll()
    poll.register(theirs, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if theirs in ready or not (line := sys.stdin.readline()):
            return
        yield line


def run_service(
    path: str, options: dict[str, Any], environ: dict[str, str], ready: int, parent: int
) -> None:
    """Run a service in a fork; never returns."""
    code = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environ)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        if not environ.get("SERVICE_TALKS"):
            os.dup2(nothing, 2)
        limits = options.pop("limits", None)
        if not options.pop("is_fresh"):
            Spare(ready, parent)
        uvloop.run(serve(path, NodeOptions(**options), limits, ready, parent))
        code = 0
    except BaseException as error:
        os.write(ready, pickle.dumps(error))
    finally:
        os._exit(code)


async def serve(
    path: str, options: NodeOptions, limits: Limits | None, ready: int, parent: int
) -> None:
    """Serve a node on a socket until SIGTERM, or until the parent (a pidfd) ends."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(parent, stop.set)
    engine = LocalEngine(options, loop)
    await engine.open()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    await engine.serve(listening, limits=limits)
    os.close(ready)
    await stop.wait()
    loop.remove_reader(parent)
    await engine.close()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    main(int(sys.argv[1]))
