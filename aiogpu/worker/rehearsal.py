"""Runs a task that does nothing, the way that real ones take.

A fork shares its parent's memory until it writes, and Python writes wherever it
reads: it counts references. So a fresh process is slow in whatever it does first;
most of a first task's time is the kernel copying pages. Code that has run before
the fork writes less. A spare that has rehearsed after it has its pages already.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from aiogpu.memory.page import ControlPage
from aiogpu.wire.frames import encode_all
from aiogpu.wire.messages import Bind, Define, Exit, Run
from aiogpu.wire.payload import dump_arguments, dump_reference
from aiogpu.worker.channel import Channel
from aiogpu.worker.context import Context, current
from aiogpu.worker.imports import Imports
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.loop import Worker
from aiogpu.worker.threads import Threads

TASKS: Final = 2
"""In each rehearsal: the first of a site, and one that finds it known."""


class Unmoved(Threads):
    """Leaves the libraries alone: in the zygote they must not start threads."""

    def adapt(self, cpus: float) -> None:
        """Nothing."""


class Deaf(Interrupts):
    """Leaves the signal to the real one."""

    def restore(self) -> None:
        """Nothing."""


def nothing(*_args: object, **_kwargs: object) -> None:
    """What the rehearsed tasks run."""


def rehearse(rounds: int) -> None:
    """Bind, define and run, on a socket, a page and a worker of its own."""
    before = {name: getattr(current, name) for name in Context.__slots__}
    streams = sys.stdout, sys.stderr
    descriptor = ControlPage.create()
    page = ControlPage.open(descriptor)
    os.close(descriptor)
    try:
        for _ in range(rounds):
            _play(page)
    finally:
        page.close()
        sys.stdout, sys.stderr = streams
        for name, value in before.items():
            setattr(current, name, value)


def _play(page: ControlPage) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        interrupts = Deaf(page)
        channel = Channel(interrupts)
        channel.use(theirs)
        payload = dump_arguments("nothing", (1, "a"), {})
        function = dump_reference(__name__, nothing.__name__)
        ours.sendall(
            encode_all(
                [
                    Bind({}, {"GPU": (0,)}),
                    Define(1, 1, "nothing", {"CPU": 1.0}, function),
                    *(Run(n + 1, 1, payload, False, n + 1) for n in range(TASKS)),
                    Exit(),
                ]
            )
        )
        Worker(channel, interrupts, Imports(), Unmoved()).serve()
