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

from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.serializer import (
    dump_arguments,
    dump_function,
    dump_reference,
)
from aiogpu.wire.codec import encode_all
from aiogpu.wire.messages import Bind, Define, Exit, Run
from aiogpu.worker.channel import Channel
from aiogpu.worker.context import Context, current
from aiogpu.worker.environ import drop
from aiogpu.worker.imports import Imports
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.loop import Worker
from aiogpu.worker.threads import Threads

TASKS: Final = 3
"""In each rehearsal: the first of a site by name, of one by value, a known one."""
VARIABLES: Final = ("AIOGPU_REHEARSAL_1", "AIOGPU_REHEARSAL_2")
"""As many as a task with a GPU is given; they are gone afterwards."""


class Unmoved(Threads):
    """Leaves the libraries alone: in the zygote they must not start threads."""

    def adapt(self, cpus: float) -> None:
        """Nothing."""


class Deaf(Interrupts):
    """Leaves the signal to the real one."""

    def restore(self) -> None:
        """Nothing."""


def nothing(*_args: object, **_kwargs: object) -> None:
    """What the rehearsed tasks run, sent by its name."""


class Rehearsal:
    """Bind, define and run, on a socket, a page and a worker of its own.

    Made in the zygote; all its forks can play it.
    """

    def __init__(self) -> None:
        descriptor = ControlPage.create()
        self._page = ControlPage.open(descriptor)
        os.close(descriptor)
        by_name = dump_reference(__name__, nothing.__name__)
        by_value = dump_function("nothing", lambda *_args: None)
        payload = dump_arguments("nothing", (1, "a"), {})
        assert isinstance(payload, bytes)
        self._script = encode_all(
            [
                Bind(dict.fromkeys(VARIABLES, "1"), {"GPU": (0,)}),
                Define(1, 1, "nothing", {"CPU": 1.0}, by_name),
                Define(2, 2, "nothing", {"CPU": 1.0}, by_value),
                *(Run(n + 1, n % 2 + 1, payload, False, n + 1) for n in range(TASKS)),
                Exit(),
            ]
        )

    def play(self, rounds: int) -> None:
        """Go through all of it so often, and leave the process as it was."""
        before = {name: getattr(current, name) for name in Context.__slots__}
        streams = sys.stdout, sys.stderr
        try:
            for _ in range(rounds):
                self._play()
        finally:
            sys.stdout, sys.stderr = streams
            for name, value in before.items():
                setattr(current, name, value)
            for name in VARIABLES:
                drop(name)

    def _play(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            interrupts = Deaf(self._page)
            channel = Channel(interrupts)
            channel.use(theirs)
            ours.sendall(self._script)
            Worker(channel, interrupts, Imports(), Unmoved()).serve()
