"""How much memory may be used here, and how much is: machine, cgroups, processes.

Counted is what cannot be dropped: anonymous and shared memory, not the page cache.
Sources: proc_meminfo(5), proc_pid_status(5), and the kernel's documents on cgroup-v2
(`memory.max`, `memory.stat`) and cgroup-v1 (`memory.limit_in_bytes`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.runtime.hierarchy import PROC, UNIFIED, find_hierarchy

SAFE: Final = 0.95
"""The part of a limit that may be used before the kernel begins to end processes."""

_KIB: Final = 1024
_BOUNDLESS: Final = 1 << 62
_VERSION_1: Final = ("memory.limit_in_bytes", ("total_rss", "total_shmem"))
_VERSION_2: Final = ("memory.max", ("anon", "shmem"))


class Usage(NamedTuple):
    """How full memory is, at one place that limits it.

    Attributes:
        where: "machine", or the directory of a cgroup.
        used: bytes of anonymous and shared memory in use there.
        limit: bytes that may be used there.
    """

    where: str
    used: int
    limit: int

    def safe_limit(self, fraction: float = SAFE) -> int:
        """Bytes that may be used before it becomes dangerous."""
        return int(self.limit * fraction)

    @property
    def room(self) -> int:
        """Bytes left to the safe limit; negative where it is passed."""
        return self.safe_limit() - self.used


class MemoryBounds:
    """The limits that hold for this process: the machine's, its cgroups', theirs."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._groups: list[tuple[str, str, tuple[str, ...]]] = []
        for controller, (name, counted) in (
            (UNIFIED, _VERSION_2),
            ("memory", _VERSION_1),
        ):
            found = find_hierarchy(controller, proc)
            for group in found.groups if found is not None else ():
                if (group / name).exists():
                    self._groups.append((str(group), name, counted))

    def tightest(self) -> Usage:
        """The place with the least room left, now; limits may change meanwhile."""
        tightest = machine = self._machine()
        for group, name, counted in self._groups:
            limit = read_limit(f"{group}/{name}")
            if limit is not None and limit < machine.limit:
                numbers = read_numbers(f"{group}/memory.stat")
                used = sum(numbers.get(each, 0) for each in counted)
                tightest = min(tightest, Usage(group, used, limit), key=room_of)
        return tightest

    def safe_limit(self, fraction: float = SAFE) -> int:
        """Bytes that may be used safely, where there is the least room left."""
        return self.tightest().safe_limit(fraction)

    def _machine(self) -> Usage:
        numbers = read_numbers(f"{self._proc}/meminfo")
        used = numbers.get("AnonPages", 0) + numbers.get("Shmem", 0)
        total = numbers.get("MemTotal", 0) * _KIB
        return Usage("machine", used * _KIB, total or _BOUNDLESS)

    def used_by(self, roots: Iterable[int]) -> int:
        """Bytes that processes and all below them use, each counted once.

        Pages that a fork shares with the zygote are counted for every fork.
        """
        total, seen, waiting = 0, set[int](), list(roots)
        while waiting:
            pid = waiting.pop()
            if pid not in seen:
                seen.add(pid)
                status = read_bytes(f"{self._proc}/{pid}/status")
                total += _number(status, b"\nRssAnon:") + _number(
                    status, b"\nRssShmem:"
                )
                waiting += self._children(pid, _number(status, b"\nThreads:"))
        return total * _KIB

    def has(self, pid: int) -> bool:
        """Whether a process is there, waited for or not."""
        return os.path.exists(f"{self._proc}/{pid}")

    def _children(self, pid: int, threads: int) -> list[int]:
        """Children of all threads of a process; none where the kernel does not say."""
        tasks = f"{self._proc}/{pid}/task"
        names = [str(pid)]
        if threads != 1:
            try:
                names = os.listdir(tasks)
            except OSError:
                return []
        found: list[int] = []
        for name in names:
            found += map(int, read_bytes(f"{tasks}/{name}/children").split())
        return found


def room_of(usage: Usage) -> int:
    """The room of a place, for comparing places."""
    return usage.room


def read_bytes(path: str) -> bytes:
    """What a file has, nothing if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def read_limit(path: str) -> int | None:
    """A limit in bytes; None for "max" and where there is none."""
    data = read_bytes(path).strip()
    return int(data) if data.isdigit() else None


def read_numbers(path: str) -> dict[str, int]:
    """The numbers of a file of lines as `name 12` or `Name:   12 kB`."""
    numbers: dict[str, int] = {}
    for line in read_bytes(path).decode("ascii", "replace").splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            numbers[words[0].rstrip(":")] = int(words[1])
    return numbers


def _number(data: bytes, name: bytes) -> int:
    """The number after a name in a large file of which little is wanted."""
    _, found, after = data.partition(name)
    return int(after.split(None, 1)[0]) if found else 0
