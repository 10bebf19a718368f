"""Keeps one slot: forks its one worker, and ends what the worker leaves behind.

A keeper adopts every process that its worker orphans, so it alone can say when a
worker and all that it started have ended: when `waitpid` knows no child any more.
Where there is a cgroup it lives in one of its own, which holds what forks faster
than it can be killed and what may not be signalled. It imports nothing of the
user's and runs none of his code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from typing import Final

from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import SlotCgroup
from aiogpu.wire.connection import KEEPER
from aiogpu.wire.messages import (
    End,
    Ended,
    Fork,
    Forked,
    Message,
    Setup,
    Signal,
    Unforked,
    output_path,
    socket_path,
)
from aiogpu.worker.parent_link import Watch, remove_directory

WorkerMain = Callable[[int, int, int], None]
"""Runs a worker in a fresh fork: its id, its slot, the keeper's process id."""


PATIENCE: Final = 64
"""Children that are ended one by one before all are ended in one step."""


class Keeper:
    """The keeper of one slot; made in a fresh fork of the zygote."""

    def __init__(
        self, slot: int, setup: Setup, driver: int, worker_main: WorkerMain
    ) -> None:
        self._slot = slot
        self._directory = setup.directory
        self._worker_main = worker_main
        self._worker: int | None = None
        self._pid = 0
        self._zygote = os.getppid()
        kernel.resume_with_parents_end()
        kernel.set_process_name(f"aiogpu-keep-{slot}")
        kernel.adopt_orphans()
        self._cgroup = SlotCgroup(setup.cgroup, slot)
        self._score = kernel.OomScore()
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
        self._end_rest()
        self._clear_up(has_zygote=os.getppid() == self._zygote)
        self._watch.close()

    def _clear_up(self, has_zygote: bool) -> None:
        """Remove what the node has left if its driver has died, and has not done so.

        The zygote does so as well, after this process. But one that seems to be there
        may have been killed, and wait for a CPU to end on.
        """
        within = 0.1 if has_zygote else 2.0
        is_left = not self._watch.is_asked and self._watch.driver_has_left(within)
        if is_left or not has_zygote:
            self._cgroup.remove()
        if is_left:
            remove_directory(self._directory)

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
        # The kernel is to take a worker, never the driver.
        self._score.expose()
        try:
            pid = os.fork()
        except OSError as error:
            self._score.restore()
            self._watch.send(Unforked(worker, kernel.why_not_forked(error)))
            return
        if pid == 0:
            try:
                self._watch.leave()
                self._cgroup.forget()
                self._score.close()
                os.close(self._watch.driver)
                self._worker_main(worker, self._slot, me)
            finally:
                os._exit(1)
        self._score.restore()
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
                self._end_rest()
                self._watch.send(Ended(self._worker, status))
                self._worker, self._pid = None, 0

    def _end_rest(self) -> None:
        end_children(self._cgroup.end_others)
        if self._cgroup.has_others:
            self._cgroup.end_others()
            end_children(self._cgroup.end_others)


def _nothing() -> None:
    """There is no other way to end them."""


def end_children(end_others: Callable[[], None] = _nothing) -> None:
    """Kill all children, and those that come by their deaths, until none is left.

    Args:
        end_others: ends also those that may not be signalled, or fork too fast.
    """
    for attempt in count(1):
        killed = [kernel.kill(pid) for pid in kernel.children()]
        if attempt % PATIENCE == 0 or not all(killed):
            end_others()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
