"""Preloaded into a zygote: forks fail, as if the user may have no more processes.

The variable `SCARCE` limits the number of processes below the zygote, until the file
exists that `MORE_ROOM` names.
"""

import errno
import os
from collections.abc import Callable

from aiogpu.linux import syscalls as kernel

MOST = int(os.environ.get("SCARCE", "1000"))
MORE_ROOM = os.environ.get("MORE_ROOM", "")
ZYGOTE = os.getpid()


def below(pid: int) -> int:
    """Count the processes below a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            pids = [int(word) for word in file.read().split()]
    except OSError:
        return 0
    return len(pids) + sum(map(below, pids))


def bounded(fork: Callable[..., int]) -> Callable[..., int]:
    """Let a fork fail once the limit is reached."""

    def fork_if_allowed(*group: int) -> int:
        if below(ZYGOTE) >= MOST and not os.path.exists(MORE_ROOM):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork(*group)

    return fork_if_allowed


os.fork = bounded(os.fork)
kernel.fork_into = bounded(kernel.fork_into)
