"""Keeps one slot: forks its one worker, and ends what the worker leaves behind.

A keeper adopts every process that its worker orphans, so it alone can say when a
worker and all that it started have ended: when `waitpid` knows no child any more.
It imports nothing of the user's and runs none of his code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from aiogpu.wire.connection import KEEPER
from aiogpu.wire.messages import End, Ended, Fork, Forked, Message, Signal
from aiogpu.wire.setup import Setup, output_path, socket_path
from aiogpu.worker import kernel
from aiogpu.worker.watch import Watch

WorkerMain = Callable[[int, int, int], None]
"""Runs a worker in a fresh fork: its id, its slot, the keeper's process id."""


class Keeper:
    """The keeper of one slot; made in a fresh fork of the zygote."""

    def __init__(
        self, slot: int, setup: Setup, driver: int, worker_main: WorkerMain
    ) -> None:
        self._slot = slot
        self._worker_main = worker_main
        self._worker: int | None = None
        self._pid = 0
        kernel.set_process_name(f"aiogpu-keep-{slot}")
        kernel.adopt_orphans()
        for stream in (1, 2):
            # Without O_NONBLOCK a driver that died meanwhile would hang us here.
            output = os.open(
                output_path(setup.directory, slot, stream), os.O_WRONLY | os.O_NONBLOCK
            )
            os.set_blocking(output, True)
            os.dup2(output, stream)
            os.close(output)
        self._watch = Watch(KEEPER, slot, socket_path(setup.directory), driver)

    def run(self) -> None:
        """Serve until the driver closes or dies; leaves no process behind."""
        while not self._watch.is_over:
            for message in self._watch.wait():
                self._obey(message)
            self._reap()
        if self._worker is not None:
            kernel.kill(self._pid)
        end_children()
        self._watch.close()

    def _obey(self, message: Message) -> None:
        match message:
            case Fork(worker) if self._worker is None:
                self._fork(worker)
            case Signal(worker) if worker == self._worker:
                kernel.kill(self._pid, signal.SIGINT)
            case End(worker) if worker == self._worker:
                kernel.kill(self._pid)

    def _fork(self, worker: int) -> None:
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._watch.leave()
                os.close(self._watch.driver)
                self._worker_main(worker, self._slot, me)
            finally:
                os._exit(1)
        self._worker, self._pid = worker, pid
        self._watch.send(Forked(worker, pid))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid and self._worker is not None:
                end_children()
                self._watch.send(Ended(self._worker, status))
                self._worker, self._pid = None, 0


def end_children() -> None:
    """Kill all children, and those that come by their deaths, until none is left."""
    while True:
        for pid in kernel.children():
            kernel.kill(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
