"""The start of a worker, prepared in the zygote.

The zygote makes all objects of a worker and runs empty tasks with them, so that each
fork shares them and has little left to do. A fork shares its parent's memory until a
write, and Python writes when it reads, since it counts references. So most of a first
task's time is spent by the kernel on copying pages. `Warmup` runs empty tasks before
the fork, so that less is written after it, and again in a spare worker, which then has
its own pages.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
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
"""Tasks in a warm-up: the first of a function by name, the first by value, a repeat."""


VARIABLES: Final = ("AIOGPU_REHEARSAL_1", "AIOGPU_REHEARSAL_2")
"""As many variables as a task with a GPU gets; unset afterwards."""


class UnchangedThreads(Threads):
    """Changes no thread counts: libraries must not start threads in the zygote."""

    def adapt(self, cpus: float) -> None:
        """Nothing."""


def nothing(*_args: object, **_kwargs: object) -> None:
    """Do nothing; the function of warm-up tasks that is sent by name."""


class Warmup:
    """A warm-up: bind, define and run, with a separate socket, page and worker.

    Made in the zygote; every fork can play it.
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
        """Run the warm-up `rounds` times, and restore the state of the process."""
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
            interrupts = Interrupts(self._page)
            channel = Channel(interrupts)
            channel.use(theirs)
            ours.sendall(self._script)
            Worker(channel, interrupts, Imports(), UnchangedThreads(), nothing).serve()


ROUNDS: Final = 20
"""Warm-ups in the zygote: CPython specialises code in the first few."""


SILENCE: Final = 2e-3
"""Seconds without a message after which a worker counts as a spare."""


class WorkerTemplate:
    """The state of every worker of a node at its fork; made in the zygote."""

    def __init__(
        self,
        setup: Setup,
        page: ControlPage,
        imports: Imports,
        threads: Threads,
        customize: Callable[[], None],
    ) -> None:
        self._path = socket_path(setup.directory)
        self._interrupts = Interrupts(page)
        self._interrupts.install()
        self._interrupts.user.install()
        self._channel = Channel(self._interrupts)
        self._loans = Loans(
            path=descriptor_path(setup.directory),
            spill=setup.spill,
            page=page,
            interrupts=self._interrupts,
            press=partial(self._channel.send, READ_DESCRIPTORS),
        )
        self._imports = imports
        self._note_import = page.note_import
        self._worker = Worker(
            self._channel, self._interrupts, imports, threads, customize
        )
        self._worker.task_state.record()
        self._seeds = seeds()
        current.node = current.home = setup.node
        self._warmup = Warmup()
        self._warmup.play(ROUNDS)

    def begin(self, worker: int, slot: int, keeper: int) -> None:
        """Become worker `worker` in this fork, and never return."""
        kernel.die_with_parent(keeper)
        kernel.set_process_name(f"aiogpu-work-{worker}")
        # A session of its own: signals that user code sends to its group stay in it.
        os.setsid()
        for reseed in self._seeds:
            reseed()
        current.worker = worker
        self._interrupts.use_slot(slot)
        self._imports.note = partial(self._note_import, slot)
        self._channel.loans = self._loans
        process = self._worker
        process.begin()
        try:
            self._channel.connect(self._path, worker)
            self._imports.report = self._channel.send
            if self._channel.is_silent(SILENCE):
                self._warmup.play(1)
            process.serve()
        except BaseException:  # noqa: BLE001 - reported before the exit
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        process.end()
