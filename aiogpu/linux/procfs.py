"""Reads memory, processes and causes of death from /proc and the cgroups.

Only memory that the kernel cannot drop counts: anonymous and shared memory, not the
page cache. Sources: proc_meminfo(5), proc_pid_status(5), proc_pid_stat(5), and the
kernel's documents on cgroup v2 (`memory.max`, `memory.stat`) and v1
(`memory.limit_in_bytes`). `ExitEvidence` reads when a node starts and when the kernel
may have killed a worker, so it costs a task nothing.
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
"""The part of a limit that can be used before the kernel begins to kill processes."""

_KIB: Final = 1024
_NO_LIMIT: Final = 1 << 62
_VERSION_1: Final = ("memory.limit_in_bytes", ("total_rss", "total_shmem"))
_VERSION_2: Final = ("memory.max", ("anon", "shmem"))


class Usage(NamedTuple):
    """The use of memory under one limit.

    Attributes:
        where: "machine", or the directory of a cgroup.
        used: bytes of anonymous and shared memory in use.
        limit: bytes that may be used.
    """

    where: str
    used: int
    limit: int

    def safe_limit(self, fraction: float = SAFE) -> int:
        """Return the bytes that can be used before the kernel may kill processes."""
        return int(self.limit * fraction)

    @property
    def room(self) -> int:
        """Bytes below the safe limit; negative if it is exceeded."""
        return self.safe_limit() - self.used


class MemoryBounds:
    """The limits for this process: the machine's, its cgroups' and their ancestors'."""

    def __init__(self, proc: StrPath = PROC) -> None:
        self._proc = proc
        self._groups: list[tuple[str, str, tuple[str, ...]]] = []
        for controller, (name, counted) in (
            (UNIFIED, _VERSION_2),
            ("memory", _VERSION_1),
        ):
            hierarchy = find_hierarchy(controller, proc)
            for group in hierarchy.groups if hierarchy is not None else ():
                if os.path.exists(f"{group}/{name}"):
                    self._groups.append((group, name, counted))

    def tightest(self) -> Usage:
        """Return the usage with the least room; reads all limits again."""
        tightest = machine = self._machine()
        for group, name, counted in self._groups:
            limit = read_limit(f"{group}/{name}")
            if limit is not None and limit < machine.limit:
                numbers = read_numbers(f"{group}/memory.stat")
                used = sum(numbers.get(each, 0) for each in counted)
                tightest = min(tightest, Usage(group, used, limit), key=_room_of)
        return tightest

    def safe_limit(self, fraction: float = SAFE) -> int:
        """Return the safe limit of the usage with the least room."""
        return self.tightest().safe_limit(fraction)

    def _machine(self) -> Usage:
        numbers = read_numbers(f"{self._proc}/meminfo")
        used = numbers.get("AnonPages", 0) + numbers.get("Shmem", 0)
        total = numbers.get("MemTotal", 0) * _KIB
        return Usage("machine", used * _KIB, total or _NO_LIMIT)

    def used_by(self, roots: Iterable[int]) -> int:
        """Return the bytes that processes and their descendants use.

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
                threads = _number(status, b"\nThreads:")
                waiting += children_of(pid, threads, self._proc)
        return total * _KIB

    def has(self, pid: int) -> bool:
        """Return True if a process exists, also as a zombie."""
        return os.path.exists(f"{self._proc}/{pid}")


def children_of(pid: int, threads: int = 0, proc: StrPath = PROC) -> list[int]:
    """Return the children of all threads of a process; none if unknown.

    `threads`: the number of its threads; 0 if unknown.
    """
    tasks = f"{proc}/{pid}/task"
    names = [str(pid)]
    if threads != 1:
        try:
            names = os.listdir(tasks)
        except OSError:
            return []
    children: list[int] = []
    for name in names:
        children += map(int, read_bytes(f"{tasks}/{name}/children").split())
    return children


def family_of(pid: int) -> list[int]:
    """Return a process and all its descendants, without reading all of /proc."""
    family = [pid]
    for member in family:  # which grows meanwhile
        family += children_of(member)
    return family


def _room_of(usage: Usage) -> int:
    return usage.room


def _number(data: bytes, name: bytes) -> int:
    """Return the number after a name, without parsing the other lines."""
    _, separator, after = data.partition(name)
    return int(after.split(None, 1)[0]) if separator else 0


DEEPEST: Final = 64
"""The most ancestors that are looked up; processes of a node have fewer."""


class Origin(NamedTuple):
    """The name and the ancestors of a live process.

    Attributes:
        name: the kernel's name for the process (`comm`).
        ancestors: its parent, its grandparent, and so on.
    """

    name: str
    ancestors: tuple[int, ...]


def origins_of(pids: Iterable[int], proc: StrPath = PROC) -> dict[int, Origin]:
    """Look up processes; ended ones are left out."""
    look_up = cache(partial(read_stat, proc=proc))
    origins: dict[int, Origin] = {}
    for pid in pids:
        stat = look_up(pid)
        if stat is None:
            continue
        ancestors: list[int] = []
        current: ProcessStat | None = stat
        while current is not None and current.parent > 1 and len(ancestors) < DEEPEST:
            ancestors.append(current.parent)
            current = look_up(current.parent)
        origins[pid] = Origin(stat.name, tuple(ancestors))
    return origins


class ProcessStat(NamedTuple):
    """The `stat` file of a process (proc(5)); the state of a zombie is "Z"."""

    pid: int
    name: str
    state: str
    parent: int
    start: int
    threads: int = 1

    @property
    def has_ended(self) -> bool:
        """True for a zombie, unless other threads of the process live on."""
        return self.state in ("Z", "X") and self.threads <= 1


def read_stat(pid: int, proc: StrPath = PROC) -> ProcessStat | None:
    """Read a process's `stat`; None if it has ended. `start` is in ticks since boot."""
    # The name is in parentheses, and may contain parentheses.
    before, _, after = read_bytes(f"{proc}/{pid}/stat").rpartition(b") ")
    fields = after.decode().split()
    if not fields:
        return None
    name = before.partition(b" (")[2].decode(errors="replace")
    start = int(fields[19]) if len(fields) > 19 else 0
    threads = int(fields[17]) if len(fields) > 17 else 1
    return ProcessStat(pid, name, fields[0], int(fields[1]), start, threads)


def descendants(pid: int) -> list[ProcessStat]:
    """Return all descendants of a process, parents before their children."""
    children: dict[int, list[ProcessStat]] = {}
    for name in os.listdir(PROC):
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            children.setdefault(stat.parent, []).append(stat)
    result = children.get(pid, [])
    for stat in result:  # which grows meanwhile
        result += children.get(stat.pid, [])
    return result


KMSG: Final = "/dev/kmsg"

RECORDS: Final = 1000
"""The most records of the kernel's log that are read after a death."""

RECORD: Final = 8192


class Findings(NamedTuple):
    """The evidence about a process's death.

    Attributes:
        group_kills: processes of this program's cgroup that the kernel has killed for
            lack of memory and that are not attributed to an earlier death.
        machine_kills: the same for the whole machine, including other programs.
        log: the line of the kernel's log about the process, "" if there is none.
    """

    group_kills: int = 0
    machine_kills: int = 0
    log: str = ""


class ExitEvidence:
    """Reads the kernel's counters and log, and compares them with earlier values."""

    def __init__(self, proc: StrPath = PROC, kmsg: StrPath = KMSG) -> None:
        self._proc = proc
        self._kmsg = kmsg
        self._log = -1
        self._has_begun = False
        self._counters: list[tuple[str, str]] = []
        self._group_kills = self._machine_kills = 0

    def begin(self) -> None:
        """Read the initial values; files that cannot be read are ignored."""
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
            # To the next record that will be written (dev-kmsg of the kernel's ABI).
            os.lseek(self._log, 0, os.SEEK_END)

    def examine(self, pid: int) -> Findings:
        """Return the evidence about a worker that has just died; a kill counts once."""
        if not self._has_begun:
            return Findings()
        group, machine = self._count()
        findings = Findings(
            max(0, group - self._group_kills),
            max(0, machine - self._machine_kills),
            self._search_log(pid),
        )
        # Each death uses up one kill: the deaths of two workers are examined in turn.
        self._group_kills += min(1, findings.group_kills)
        self._machine_kills += min(1, findings.machine_kills)
        return findings

    def close(self) -> None:
        """Close the log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _count(self) -> tuple[int, int]:
        group = sum(read_numbers(path).get(name, 0) for path, name in self._counters)
        return group, read_numbers(f"{self._proc}/vmstat").get("oom_kill", 0)

    def _search_log(self, pid: int) -> str:
        last = ""
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
                last = text
        return last


def message_of(record: bytes) -> str:
    """Return the text of a /dev/kmsg record: after its fields, before its details."""
    _, _, text = record.decode("utf-8", "backslashreplace").partition(";")
    return text.partition("\n")[0]


def names(text: str, pid: int) -> bool:
    """Return True if a line of the kernel log reports the end of a process.

    `Out of memory: Killed process 4711 (python) ...`,
    `python[4711]: segfault at 0 ip ...`, `traps: python[4711] ...`.
    """
    return f"Killed process {pid} (" in text or f"[{pid}]" in text
