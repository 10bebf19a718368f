"""The first process of a container: reaps orphans, and passes signals on.

The kernel gives orphans to the first process, which must wait for them, or they stay as
zombies. The node cannot wait for any child that ends: it would take the wait status of
its zygotes from those who wait for it. So the node runs in a fork.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Final, NoReturn

from aiogpu.linux.syscalls import set_process_name

NAME: Final = "aiogpu-init"
PASSED_ON: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
)
"""Signals that are passed on to the node."""


def become_init() -> None:
    """If this is the first process, go on in a fork, and serve as its init here.

    Call this while the process has one thread.
    """
    if os.getpid() != 1:
        return
    # Blocked signals reach `sigwaitinfo`; others are ignored by a first process.
    awaited = {*PASSED_ON, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    sys.stdout.flush()
    child = os.fork()
    if child:
        _serve(child, awaited)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(child: int, awaited: set[signal.Signals]) -> NoReturn:
    """Reap and pass signals on until the child ends; end with its exit code."""
    set_process_name(NAME)
    while True:
        info = signal.sigwaitinfo(awaited)
        if info.si_signo == signal.SIGCHLD:
            _reap(child)
        elif info.si_code <= 0:
            # The kernel's signals, as for Ctrl-C, go to the whole process group.
            with suppress(ProcessLookupError):
                os.kill(child, info.si_signo)


def _reap(child: int) -> None:
    """Wait for all children that have ended; exit if the node is one of them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
