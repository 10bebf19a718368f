"""A command that runs as if its user's shell had started it: a process and its tree.

It stays in the process group in which this one is: what the terminal sends, Ctrl-C or
Ctrl-Z, the kernel sends to both, and job control is the shell's business with both.
What others send to this process alone is sent on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

from aiogpu.linux.syscalls import adopt_orphans

SENT_ON: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT),
)
"""What the command is sent that this process was sent."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those by which somebody wants this process to end."""
SETTLED: Final = 0.05
"""Seconds after which a command that has stopped counts as stopped by itself."""
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


class Signals:
    """The signals that this process gets, told on its event loop, with who sent them.

    They are blocked, and awaited by a thread: so none is lost before there is a loop,
    and it is seen which ones the command was sent as well.
    """

    def __init__(self) -> None:
        # What is ignored here was meant to be, as by nohup(1), and is in the command.
        wanted = {s for s in SENT_ON if signal.getsignal(s) is not signal.SIG_IGN}
        self._awaited = {*wanted, signal.SIGCHLD}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._awaited)
        self.on_signal: Callable[[signal.Signals, bool], object] = _ignore

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have `on_signal` told of each: which, and whether the kernel has sent it."""
        run = Thread(target=self._run, args=(loop,), name="signals", daemon=True)
        run.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            info = signal.sigwaitinfo(self._awaited)
            number, is_kernels = signal.Signals(info.si_signo), info.si_code > 0
            try:
                loop.call_soon_threadsafe(self._tell, number, is_kernels)
            except RuntimeError:
                return  # the loop is closed

    def _tell(self, number: signal.Signals, is_kernels: bool) -> None:
        self.on_signal(number, is_kernels)


def _ignore(_number: signal.Signals, _is_kernels: bool) -> None:
    """Nobody wants to know yet."""


class Command:
    """A command that runs, and all that it starts.

    Attributes:
        status: its wait status, once it has ended.
        ended: done when it has ended.
        all_ended: done when nothing is left of what it had started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        mask: Iterable[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start it.

        Args:
            arguments: its name and what it is told.
            environ: all its variables.
            mask: the signals that are blocked in it.
            loop: on which `hear` is called.

        Raises:
            OSError: it is not there, or cannot be executed.
        """
        self.status = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self.all_ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._stopping: asyncio.TimerHandle | None = None
        adopt_orphans()
        # Python ignores these two; the command is not to inherit that.
        own = (signal.SIGPIPE, signal.SIGXFSZ)
        self.pid = os.posix_spawnp(
            *(arguments[0], list(arguments), dict(environ)),
            setsigmask=tuple(mask),
            setsigdef=own,
        )

    def hear(self, number: signal.Signals, is_kernels: bool) -> None:
        """This process got a signal, as `Signals` tells it."""
        if number is signal.SIGCHLD:
            self._reap()
        elif not is_kernels and not self.ended.done():
            self.send(number)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _reap(self) -> None:
        flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                if not self.all_ended.done():
                    self.all_ended.set_result(None)
                return
            if not pid:
                return
            if pid == self.pid:
                self._note(status)

    def _note(self, status: int) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None
        if os.WIFSTOPPED(status):
            self._stopping = self._loop.call_later(SETTLED, _stop_as_well)
        elif not os.WIFCONTINUED(status):
            self.status = status
            self.ended.set_result(None)

    def left(self) -> list[int]:
        """The processes that it has started, and these, and that have not ended."""
        children: dict[int, list[int]] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    stat = Path(entry.path, "stat").read_bytes()
                    state, parent, _ = stat.rpartition(b") ")[2].split(None, 2)
                    if state != b"Z":
                        children.setdefault(int(parent), []).append(int(entry.name))
        found, looked_at = [], [os.getpid()]
        while looked_at:
            below = children.get(looked_at.pop(), [])
            found += below
            looked_at += below
        return found


def _stop_as_well() -> None:
    """The command was stopped and this process was not: its shell is to see it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def end_as(status: int) -> int:
    """End as a command has, by the same signal; gives its exit code if by none."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    import resource
    import sys

    number = os.WTERMSIG(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Its own core is of use, that of this process is not.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    return 128 + number
