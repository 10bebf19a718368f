"""Reads memory, processes and causes of death from /proc and the cgroups.

Memory counts where it cannot be dropped: anonymous and shared memory, not the page
cache. Sources: proc_meminfo(5), proc_pid_status(5), proc_pid_stat(5), and the kernel's
documents on cgroup v2 (`memory.max`, `memory.stat`) and v1 (`memory.limit_in_bytes`).
`ExitEvidence` is looked at when a node starts and when a worker has died as if by the
kernel's hand, so it costs a task nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, partial
from typing import Final, NamedTuple

from aiogpu.linux.cgroup import (
    PROC,
    UNIFIED,
    StrPath,
    find_hierarchy,
    read_bytes,
    read_limit,
    read_numbers,
)

SAFE: Final = 0.95
"""The part of a limit that may be used before the kernel begins to end processes."""

_KIB: Final = 1024
_BOUNDLESS: Final = 1 << 62
_VERSION_1: Final = ("memory.limit_in_bytes", ("total_rss", "total_shmem"))
_VERSION_2: Final = ("memory.max", ("anon", "shmem"))


class Usage(NamedTuple):
    """The use of memory under one limit.

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

    def __init__(self, proc: StrPath = PROC) -> None:
        self._proc = proc
        self._groups: list[tuple[str, str, tuple[str, ...]]] = []
        for controller, (name, counted) in (
            (UNIFIED, _VERSION_2),
            ("memory", _VERSION_1),
        ):
            found = find_hierarchy(controller, proc)
            for group in found.groups if found is not None else ():
                if os.path.exists(f"{group}/{name}"):
                    self._groups.append((group, name, counted))

    def tightest(self) -> Usage:
        """Return the limit with the least room left; limits are read anew."""
        tightest = machine = self._machine()
        for group, name, counted in self._groups:
            limit = read_limit(f"{group}/{name}")
            if limit is not None and limit < machine.limit:
                numbers = read_numbers(f"{group}/memory.stat")
                used = sum(numbers.get(each, 0) for each in counted)
                tightest = min(tightest, Usage(group, used, limit), key=_room_of)
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
        """Return whether a process is there, waited for or not."""
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


def _room_of(usage: Usage) -> int:
    return usage.room


def _number(data: bytes, name: bytes) -> int:
    """The number after a name in a large file of which little is wanted."""
    _, found, after = data.partition(name)
    return int(after.split(None, 1)[0]) if found else 0


DEEPEST: Final = 64
"""Ancestors that are looked up; who has more is somebody else's."""


class Origin(NamedTuple):
    """A process that lives.

    Attributes:
        name: the kernel's name for it: of its program, or what it calls itself.
        ancestors: its parent, the parent of that, and so on.
    """

    name: str
    ancestors: tuple[int, ...]


def origins_of(pids: Iterable[int], proc: StrPath = PROC) -> dict[int, Origin]:
    """Look up processes; ended ones are left out."""
    look_up = cache(partial(read_stat, proc=proc))
    found: dict[int, Origin] = {}
    for pid in pids:
        stat = look_up(pid)
        if stat is None:
            continue
        ancestors: list[int] = []
        above: ProcessStat | None = stat
        while above is not None and above.parent > 1 and len(ancestors) < DEEPEST:
            ancestors.append(above.parent)
            above = look_up(above.parent)
        found[pid] = Origin(stat.name, tuple(ancestors))
    return found


class ProcessStat(NamedTuple):
    """A process, as its `stat` says (proc(5)); of a zombie, the state is "Z"."""

    pid: int
    name: str
    state: str
    parent: int
    start: int


def read_stat(pid: int, proc: StrPath = PROC) -> ProcessStat | None:
    """Look at a process; None if it has ended. `start` is in ticks since boot."""
    # The name stands in parentheses, and may contain some.
    before, _, after = read_bytes(f"{proc}/{pid}/stat").rpartition(b") ")
    fields = after.decode().split()
    if not fields:
        return None
    name = before.partition(b" (")[2].decode(errors="replace")
    start = int(fields[19]) if len(fields) > 19 else 0
    return ProcessStat(pid, name, fields[0], int(fields[1]), start)


def descendants(pid: int) -> list[ProcessStat]:
    """All processes below one, parents before their children."""
    children: dict[int, list[ProcessStat]] = {}
    for name in os.listdir(PROC):
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            children.setdefault(stat.parent, []).append(stat)
    found = children.get(pid, [])
    for stat in found:
        found += children.get(stat.pid, [])
    return found


KMSG: Final = "/dev/kmsg"

RECORDS: Final = 1000
"""Lines of the kernel's log that are looked at after a death, the first ones."""

RECORD: Final = 8192


class Findings(NamedTuple):
    """The evidence about a process's death.

    Attributes:
        group_kills: processes of this program's cgroups that the kernel has ended
            for want of memory, since the node's start or the last such death.
        machine_kills: the same for the whole machine, which may be others'.
        log: what the kernel's log says of the process, "" if nothing.
    """

    group_kills: int = 0
    machine_kills: int = 0
    log: str = ""


class ExitEvidence:
    """Compares what the kernel says now with what it said before."""

    def __init__(self, proc: StrPath = PROC, kmsg: StrPath = KMSG) -> None:
        self._proc = proc
        self._kmsg = kmsg
        self._log = -1
        self._has_begun = False
        self._counters: list[tuple[str, str]] = []
        self._group_kills = self._machine_kills = 0

    def begin(self) -> None:
        """Note what has been before; what cannot be read stays unknown."""
        unified = find_hierarchy(UNIFIED, self._proc)
        memory = find_hierarchy("memory", self._proc)
        if unified is not None:
            self._counters.append((f"{unified.own}/memory.events", "oom_kill"))
        if memory is not None:
            self._counters.append((f"{memory.own}/memory.oom_control", "oom_kill"))
        self._group_kills, self._machine_kills = self._count()
        self._has_begun = True
        with suppress(OSError):
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._log = os.open(self._kmsg, flags)
            # The next record that will be written (dev-kmsg of the kernel's ABI).
            os.lseek(self._log, 0, os.SEEK_END)

    def examine(self, pid: int) -> Findings:
        """Return the evidence about a worker that has just died; a kill counts once."""
        if not self._has_begun:
            return Findings()
        group, machine = self._count()
        found = Findings(
            max(0, group - self._group_kills),
            max(0, machine - self._machine_kills),
            self._search_log(pid),
        )
        # Two workers that died of two kills are told of one after the other.
        self._group_kills += min(1, found.group_kills)
        self._machine_kills += min(1, found.machine_kills)
        return found

    def close(self) -> None:
        """Close the log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _count(self) -> tuple[int, int]:
        group = sum(read_numbers(path).get(name, 0) for path, name in self._counters)
        return group, read_numbers(f"{self._proc}/vmstat").get("oom_kill", 0)

    def _search_log(self, pid: int) -> str:
        found = ""
        for _ in range(RECORDS if self._log >= 0 else 0):
            try:
                record = os.read(self._log, RECORD)
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                break
            if not record:
                break
            text = message_of(record)
            if names(text, pid):
                found = text
        return found


def message_of(record: bytes) -> str:
    """The text of a record of /dev/kmsg: after its fields, before its details."""
    _, _, text = record.decode("utf-8", "backslashreplace").partition(";")
    return text.partition("\n")[0]


def names(text: str, pid: int) -> bool:
    """Return whether a line of the kernel log reports the end of this process.

    `Out of memory: Killed process 4711 (python) ...`,
    `python[4711]: segfault at 0 ip ...`, `traps: python[4711] ...`.
    """
    return f"Killed process {pid} (" in text or f"[{pid}]" in text
