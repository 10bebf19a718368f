"""From a bare fork to a worker that can be assigned.

Whatever a worker is made of is made once, in the zygote, and has run there: then
the fork shares it, and little is left that each fresh worker pays.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Final

from aiogpu.linux import syscalls as kernel
from aiogpu.memory.control_page import ControlPage
from aiogpu.wire.messages import READ_DESCRIPTORS, Setup, descriptor_path, socket_path
from aiogpu.worker.channel import Channel
from aiogpu.worker.context import current
from aiogpu.worker.environ import seeds
from aiogpu.worker.imports import Imports
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.loans import Loans
from aiogpu.worker.loop import Worker
from aiogpu.worker.rehearsal import Rehearsal
from aiogpu.worker.threads import Threads

ROUNDS: Final = 20
"""Rehearsals in the zygote: CPython adapts code to its use in the first few."""
SILENCE: Final = 2e-3
"""Seconds after which a worker to which nothing came is a spare, and has time."""


class Birth:
    """What every worker of a node begins from; made in the zygote."""

    def __init__(
        self, setup: Setup, page: ControlPage, imports: Imports, threads: Threads
    ) -> None:
        self._path = socket_path(setup.directory)
        self._interrupts = Interrupts(page)
        self._interrupts.install()
        self._channel = Channel(self._interrupts)
        self._loans = Loans(
            descriptor_path(setup.directory), setup.spill, page, self._interrupts
        )
        self._loans.press = partial(self._channel.send, READ_DESCRIPTORS)
        self._worker = Worker(self._channel, self._interrupts, imports, threads)
        self._worker.footing.find()
        self._seeds = seeds()
        current.node = current.home = setup.node
        self._rehearsal = Rehearsal()
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
        current.loans = self._channel.loans = self._loans
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
