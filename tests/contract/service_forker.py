"""Forks services for tests: a service each, in a tenth of the time of a fresh start.

It reads a line for each, the options and the path of a socket, and answers with the
service's process id as soon as that listens, or with what has kept it from doing so.
It ends with the process that it is told to watch, however that ends, and what it has
forked with it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvloop

from aiogpu.core.queue.fair_share import Limits
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.local import LocalEngine


def main(watched: int) -> None:
    """Serve until stdin or the watched process ends."""
    ours = os.pidfd_open(os.getpid())
    for line in requests(watched):
        path, options, environ = pickle.loads(bytes.fromhex(line))
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            run_service(path, options, environ, writing, ours)
        os.close(writing)
        with open(reading, "rb") as said:
            told = said.read()
        print(f"{pid} {told.hex() or '-'}", flush=True)


def requests(watched: int) -> Iterator[str]:
    """What is asked for; the end of stdin alone is not seen while a fork has it."""
    theirs = os.pidfd_open(watched)
    if os.getppid() != watched:
        return  # it has ended, and the number may be another's by now
    poll = select.poll()
    poll.register(theirs, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if theirs in ready or not (line := sys.stdin.readline()):
            return
        yield line


def run_service(
    path: str,
    options: dict[str, Any],
    environ: dict[str, str],
    ready: int,
    parent: int,
) -> None:
    """A service, in a fork; never returns."""
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
        # Its parent need not wait for it.
        limits = options.pop("limits", None)
        uvloop.run(serve(path, NodeOptions(**options), limits, ready, parent))
        code = 0
    except BaseException as error:
        os.write(ready, pickle.dumps(error))
    finally:
        os._exit(code)


async def serve(
    path: str, options: NodeOptions, limits: Limits | None, ready: int, parent: int
) -> None:
    """A node on a socket, until SIGTERM or the end of the process of a pidfd."""
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
