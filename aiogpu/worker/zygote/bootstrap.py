"""From a bare fork to a worker that can be assigned.

What a worker is made of is made once, in the zygote, and has run there: then the fork
shares it, and little is left that each fresh worker pays. A fork shares its parent's
memory until it writes, and Python writes wherever it reads: it counts references. So a
fresh process is slow in whatever it does first; most of a first task's time is the
kernel copying pages. `Warmup` runs a task that does nothing before the fork, so that
less is written after it; a spare that has rehearsed after the fork has its pages
already.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from typing import Final

from aiogpu.client.current import Context, current
from aiogpu.client.references import Loans
from aiogpu.linux import syscalls as kernel
from aiogpu.memory.control_page import ControlPage
from aiogpu.serialization.serializer import (
    dump_arguments,
    dump_function,
    dump_reference,
)
from aiogpu.wire.codec import encode_all
from aiogpu.wire.messages import (
    READ_DESCRIPTORS,
    Bind,
    Define,
    Exit,
    Run,
    Setup,
    descriptor_path,
    socket_path,
)
from aiogpu.worker.connection import Channel
from aiogpu.worker.environment import Threads, drop, seeds
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.loop import Worker
from aiogpu.worker.zygote.preload import Imports

TASKS: Final = 3
"""In each rehearsal: the first of a function by name, of one by value, a known one."""


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
    """The function of warm-up tasks, sent by its name."""


class Warmup:
    """A warm-up: bind, define and run, with a separate socket, page and worker.

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


ROUNDS: Final = 20
"""Rehearsals in the zygote: CPython adapts code to its use in the first few."""


SILENCE: Final = 2e-3
"""Seconds after which a worker to which nothing came is a spare, and has time."""


class Birth:
    """The state from which every worker of a node is forked; made in the zygote."""

    def __init__(
        self, setup: Setup, page: ControlPage, imports: Imports, threads: Threads
    ) -> None:
        self._path = socket_path(setup.directory)
        self._interrupts = Interrupts(page)
        self._interrupts.install()
        self._channel = Channel(self._interrupts)
        self._loans = Loans(
            *(descriptor_path(setup.directory), setup.spill, page, self._interrupts),
            partial(self._channel.send, READ_DESCRIPTORS),
        )
        self._worker = Worker(self._channel, self._interrupts, imports, threads)
        self._worker.task_state.find()
        self._seeds = seeds()
        current.node = current.home = setup.node
        self._rehearsal = Warmup()
        self._rehearsal.play(ROUNDS)

    def begin(self, worker: int, slot: int, keeper: int) -> None:
        """Become worker `worker` in this fork, and never return."""
        kernel.die_with_parent(keeper)
        kernel.set_process_name(f"aiogpu-work-{worker}")
        # A session of its own: signals that user code sends to its group stay here.
        os.setsid()
        for renew in self._seeds:
            renew()
        current.worker = worker
        self._interrupts.attend(slot)
        self._channel.loans = self._loans
        process = self._worker
        process.begin()
        try:
            self._channel.connect(self._path, worker)
            if self._channel.is_silent(SILENCE):
                self._rehearsal.play(1)
            process.serve()
        except BaseException:  # noqa: BLE001 - the last word of a broken worker
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        process.end()
