"""From a bare fork to a worker that can be assigned.

Runs in the child of a keeper, before anything of the user's; what it does is paid
by every fresh worker.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from aiogpu.memory.page import ControlPage
from aiogpu.wire.setup import Setup, socket_path
from aiogpu.worker import kernel
from aiogpu.worker.channel import Channel
from aiogpu.worker.context import current
from aiogpu.worker.environ import renew_randomness
from aiogpu.worker.imports import Imports
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.loop import Worker
from aiogpu.worker.threads import Threads


class Birth:
    """What every worker of a node begins from."""

    def __init__(
        self, setup: Setup, page: ControlPage, imports: Imports, threads: Threads
    ) -> None:
        self._setup = setup
        self._page = page
        self._imports = imports
        self._threads = threads

    def begin(self, worker: int, slot: int, keeper: int) -> None:
        """Become worker `worker` in this fork, and never return."""
        kernel.die_with_parent(keeper)
        kernel.set_process_name(f"aiogpu-work-{worker}")
        # A session of its own: signals that user code sends to its group stay here.
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()
        renew_randomness()
        current.worker, current.node = worker, self._setup.node
        interrupts = Interrupts(self._page, slot)
        channel = Channel(socket_path(self._setup.directory), worker, interrupts)
        process = Worker(channel, interrupts, self._imports, self._threads)
        try:
            process.serve()
        except BaseException:  # noqa: BLE001 - the last word of a broken worker
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        process.end()
