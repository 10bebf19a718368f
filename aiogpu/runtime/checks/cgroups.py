"""Whether a cgroup of version 2 can be made here, and ends what is in it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.runtime.checks.finding import Finding, Level

LIMIT: Final = 5.0
"""Seconds for which the end of what was killed is waited for."""
MEANS: Final = (
    "Nodes work without, by keepers; both killed at once may leave a process."
)


class Place(NamedTuple):
    """Where a cgroup may be made: a directory, or None and the reason."""

    directory: Path | None
    reason: str = ""


def find_place(proc: Path = Path("/proc")) -> Place:
    """This process's own group of version 2, if it may be written to."""
    try:
        mounts = (proc / "self/mountinfo").read_text(errors="surrogateescape")
        groups = (proc / "self/cgroup").read_text(errors="surrogateescape")
    except OSError as error:
        return Place(None, str(error))
    tops = [
        line.split()[4]
        for line in mounts.splitlines()
        if line.partition(" - ")[2].startswith("cgroup2 ")
    ]
    own = [line[3:] for line in groups.splitlines() if line.startswith("0::")]
    if not tops or not own:
        return Place(None, "no cgroup2 is mounted")
    directory = Path(tops[0]) / own[0].lstrip("/")
    if not os.access(directory, os.W_OK):
        return Place(None, f"{directory} may not be written to")
    return Place(directory)


def check_cgroup(find: Callable[[], Place] = find_place) -> Iterator[Finding]:
    """Make a group, move a sleeping process into it, kill the group, remove it."""
    place = find()
    if place.directory is None:
        yield Finding(
            "cgroup2",
            Level.WARN,
            place.reason,
            MEANS,
            "To have it, start the program by `systemd-run --user --scope`.",
        )
        return
    group = place.directory / f"aiogpu-doctor-{os.getpid()}"
    try:
        group.mkdir()
        try:
            seconds = _kill_sleeper(group)
        finally:
            _remove(group)
    except OSError as error:
        told = f"{error.filename or group}: {error.strerror}"
        yield Finding("cgroup2", Level.WARN, told, MEANS)
        return
    if seconds is None:
        told = f"{place.directory}: cgroup.kill ended nobody within {LIMIT:g} s"
        yield Finding("cgroup2", Level.WARN, told, MEANS)
        return
    told = f"{place.directory}, a group was killed in {1e3 * seconds:.0f} ms"
    yield Finding("cgroup2", Level.OK, told)


def _kill_sleeper(group: Path) -> float | None:
    """How long it took to end a process by its group; None if it did not end."""
    program = "import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as sleeper:
        try:
            (group / "cgroup.procs").write_text(str(sleeper.pid))
            begin = time.perf_counter()
            (group / "cgroup.kill").write_text("1")
            pidfd = os.pidfd_open(sleeper.pid)
            try:
                ended = select.select([pidfd], [], [], LIMIT)[0]
            finally:
                os.close(pidfd)
            return time.perf_counter() - begin if ended else None
        finally:
            sleeper.send_signal(signal.SIGKILL)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.01)  # its dead are still being counted
                continue
        return
