"""What the kernel tells of a process that it has ended: counters, and its log.

Looked at twice: when a node starts, and when a worker has died as if by the kernel's
hand. So it costs a task nothing.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.runtime.hierarchy import PROC, UNIFIED, find_hierarchy

KMSG: Final = Path("/dev/kmsg")
RECORDS: Final = 1000
"""Lines of the kernel's log that are looked at after a death, the first ones."""
RECORD: Final = 8192


class Findings(NamedTuple):
    """What there was to find.

    Attributes:
        group_kills: processes of this program's cgroups that the kernel has ended
            for want of memory, since the node's start or the last such death.
        machine_kills: the same for the whole machine, which may be others'.
        log: what the kernel's log says of the process, "" if nothing.
    """

    group_kills: int = 0
    machine_kills: int = 0
    log: str = ""


class Autopsy:
    """Compares what the kernel says now with what it said before."""

    def __init__(self, proc: Path = PROC, kmsg: Path = KMSG) -> None:
        self._proc = proc
        self._kmsg = kmsg
        self._log = -1
        self._has_begun = False
        self._counters: list[tuple[Path, str]] = []
        self._group_kills = self._machine_kills = 0

    def begin(self) -> None:
        """Note what has been before; what cannot be read stays unknown."""
        unified = find_hierarchy(UNIFIED, self._proc)
        memory = find_hierarchy("memory", self._proc)
        if unified is not None:
            self._counters.append((unified.own / "memory.events", "oom_kill"))
        if memory is not None:
            self._counters.append((memory.own / "memory.oom_control", "oom_kill"))
        self._group_kills, self._machine_kills = self._count()
        self._has_begun = True
        with suppress(OSError):
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._log = os.open(self._kmsg, flags)
            # The next record that will be written (dev-kmsg of the kernel's ABI).
            os.lseek(self._log, 0, os.SEEK_END)

    def examine(self, pid: int) -> Findings:
        """What there is about a worker that has just died; each kill counts once."""
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
        group = sum(read_counter(path, name) for path, name in self._counters)
        return group, read_counter(self._proc / "vmstat", "oom_kill")

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


def read_counter(path: Path, name: str) -> int:
    """A number from a file of names and numbers, 0 if it is not there."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def message_of(record: bytes) -> str:
    """The text of a record of /dev/kmsg: after its fields, before its details."""
    _, _, text = record.decode("utf-8", "backslashreplace").partition(";")
    return text.partition("\n")[0]


def names(text: str, pid: int) -> bool:
    """Whether a line of the log tells of this process's end.

    `Out of memory: Killed process 4711 (python) ...`,
    `python[4711]: segfault at 0 ip ...`, `traps: python[4711] ...`.
    """
    return f"Killed process {pid} (" in text or f"[{pid}]" in text
