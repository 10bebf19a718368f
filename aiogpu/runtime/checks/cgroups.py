"""Whether a cgroup of version 2 can be made here, and ends what is in it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from aiogpu.linux.cgroup import Cgroup
from aiogpu.linux.cgroup_hierarchy import Place, find_cgroup
from aiogpu.runtime.checks.finding import Finding, Level

LIMIT: Final = 5.0
"""Seconds for which the end of what was killed is waited for."""
MEANS: Final = (
    "Nodes work without, by keepers; both killed at once may leave a process."
)


def check_cgroup(find: Callable[[], Place] = find_cgroup) -> Iterator[Finding]:
    """Make a group, move a sleeping process into it, kill the group, remove it."""
    place = find()
    if place.directory is None:
        # The reason says what to do as well.
        yield Finding("cgroup2", Level.WARN, place.reason, MEANS)
        return
    group = Cgroup(f"{place.directory}/aiogpu-doctor-{os.getpid()}")
    try:
        group.make()
        try:
            seconds = _kill_sleeper(group)
        finally:
            group.wait_until_empty(LIMIT)
            is_gone = group.remove()
    except OSError as error:
        told = f"{error.filename or group.path}: {error.strerror}"
        yield Finding("cgroup2", Level.WARN, told, MEANS)
        return
    if seconds is None:
        told = f"{place.directory}: killing a group ended nobody within {LIMIT:g} s"
        yield Finding("cgroup2", Level.WARN, told, MEANS)
    elif not is_gone:
        yield Finding("cgroup2", Level.WARN, f"{group.path} cannot be removed", MEANS)
    else:
        told = f"{place.directory}, a group was killed in {1e3 * seconds:.0f} ms"
        yield Finding("cgroup2", Level.OK, told)


def _kill_sleeper(group: Cgroup) -> float | None:
    """Return how long it took to end a process by its group; None if it did not end."""
    program = "import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as sleeper:
        try:
            Path(group.path, "cgroup.procs").write_text(str(sleeper.pid))
            begin = time.perf_counter()
            group.kill()
            pidfd = os.pidfd_open(sleeper.pid)
            try:
                ended = select.select([pidfd], [], [], LIMIT)[0]
            finally:
                os.close(pidfd)
            return time.perf_counter() - begin if ended else None
        finally:
            sleeper.send_signal(signal.SIGKILL)
