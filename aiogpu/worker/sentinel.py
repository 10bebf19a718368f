"""Ends a zygote that imports what may never return, once the driver has died.

While it imports what a user has named it hears nothing, and an extension may keep the
interpreter for ever. So a fork of it waits in its place, and clears up in its place.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from aiogpu.linux import syscalls as kernel
from aiogpu.linux.cgroup import end_node
from aiogpu.wire.messages import Setup
from aiogpu.worker.keeper import remove_directory


@contextmanager
def watched_over(
    setup: Setup, driver: int, leave: Callable[[], None]
) -> Iterator[None]:
    """In the block the driver's death ends this process, whatever it is doing.

    Args:
        setup: says what is to be removed then.
        driver: pidfd of the driver.
        leave: called in the fork, to give up what is this process's alone.
    """
    watched = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            leave()
            _wait(setup, driver, watched)
        finally:
            os._exit(0)
    # What is imported may collect children that are not its own.
    sentinel = os.pidfd_open(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(sentinel, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(sentinel)


def _wait(setup: Setup, driver: int, watched: int) -> None:
    kernel.set_process_name("aiogpu-sentinel")
    ends = select.poll()
    ends.register(driver, select.POLLIN)
    with suppress(ProcessLookupError):
        zygote = os.pidfd_open(watched)
        ends.register(zygote, select.POLLIN)
    # If its number is another's by now, it has ended, as it has without one.
    is_alive = os.getppid() == watched
    ended = [process for process, _ in ends.poll(None if is_alive else 0)]
    if driver not in ended:
        return
    if is_alive:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(zygote, signal.SIGKILL)
    end_node(setup.cgroup)
    remove_directory(setup.directory)
