"""Facts from /proc about processes: memory, descriptors, sockets; see proc(5)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiogpu.linux.cgroup import read_bytes
from aiogpu.linux.procfs import ProcessStat, read_stat

KINDS: Final = {
    "aiogpu-work": "workers",
    "aiogpu-keep": "keepers",
    "aiogpu-zygo": "zygotes",
    "aiogpu-node": "nodes",
}
"""Kinds of aiogpu's processes, by how their names begin."""
INTERNET: Final = (
    *("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6"),
    *("raw", "raw6", "icmp", "icmp6"),
)
STATES: Final = {"0A": "listens", "07": "is bound", "01": "is connected"}
ACCEPTS: Final = 1 << 16
"""Flag of a Unix socket that listens."""


class Process(ProcessStat):
    """A process that has not ended."""

    @property
    def kind(self) -> str:
        """Its kind: "workers", "keepers", "zygotes", "nodes" or "others"."""
        return KINDS.get(self.name[:11], "others")

    def __str__(self) -> str:
        command = ""
        with suppress(OSError):
            command = Path(f"/proc/{self.pid}/cmdline").read_text(errors="replace")
        return f"{self.pid} ({self.name}) {command!r:.80}"


def all_processes() -> list[Process]:
    """Return the machine's processes that have not ended."""
    stats = (read_stat(int(pid)) for pid in os.listdir("/proc") if pid.isdigit())
    return [Process(*stat) for stat in stats if stat and stat.state not in "ZX"]


def descendants(root: int | None = None) -> dict[int, str]:
    """Return the processes below `root`, by default this one, with their names."""
    root = root or os.getpid()
    return {each.pid: each.name for each in _families({root}) if each.pid != root}


def belonging(runtime_directory: str) -> list[Process]:
    """Return the processes with this runtime directory, and all below them.

    Workers for a program that has joined a node have the variables of that program.
    """
    mark = f"XDG_RUNTIME_DIR={runtime_directory}\0".encode()
    roots = {
        process.pid
        for process in all_processes()
        if mark in read_bytes(f"/proc/{process.pid}/environ")
    }
    return _families(roots)


def _families(roots: set[int]) -> list[Process]:
    """Return the processes among `roots`, and all below them."""
    processes, family = all_processes(), set(roots)
    while more := {each.pid for each in processes if each.parent in family} - family:
        family |= more
    return [each for each in processes if each.pid in family]


def cpu_time(pids: Iterable[int]) -> float:
    """Return the seconds that these processes, and those they reaped, have run."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
            ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, int]:
    """Return a process's memory in bytes by the kernel's names, such as "Pss"."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    pairs = (line.partition(":") for line in text.splitlines()[1:])
    return {key: int(value.split()[0]) * 1024 for key, _, value in pairs}


def private_memory(pids: Iterable[int]) -> int:
    """Return the bytes that these processes share with no other process."""
    maps = map(memory, pids)
    return sum(each["Private_Clean"] + each["Private_Dirty"] for each in maps)


def status_bytes(key: str, pid: int | str = "self") -> int:
    """Return a figure of /proc/PID/status in bytes, such as "VmRSS" or "RssAnon"."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024


def reset_peak_memory() -> None:
    """Reset "VmHWM", the peak of this process's memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def descriptors(pid: int) -> list[str]:
    """Return the targets of a process's descriptors; none if it has ended."""
    targets = []
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                targets.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return targets


def shared_memory() -> int:
    """Return the bytes of the memfds of this process and all below it.

    A memfd that several processes hold counts once; see memfd_create(2).
    """
    sizes: dict[int, int] = {}
    for pid in (os.getpid(), *descendants()):
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    if os.readlink(entry.path).startswith("/memfd:"):
                        stat = entry.stat()
                        sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())


def internet_sockets(pids: Iterable[int]) -> list[str]:
    """Describe each socket of these processes that another machine could reach."""
    known = {
        row[9]: f"{table} {row[1]} {STATES.get(row[3], f'is in state {row[3]}')}"
        for table in INTERNET
        for row in _socket_table(table)
    }
    return [f"process {pid}: {known[i]}" for pid, i in _sockets(pids) if i in known]


def listening(pids: Iterable[int]) -> set[str]:
    """Return the paths on which these processes listen; "@…" has no file."""
    paths = {
        row[6]: row[7] if len(row) > 7 else "a socket without a name"
        for row in _socket_table("unix")
        if int(row[3], 16) & ACCEPTS
    }
    return {paths[inode] for _, inode in _sockets(pids) if inode in paths}


def _sockets(pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    for pid in pids:
        for target in descriptors(pid):
            if target.startswith("socket:["):
                yield pid, target[8:-1]


def _socket_table(table: str) -> Iterator[list[str]]:
    with suppress(FileNotFoundError):  # the kernel has no such protocol
        text = Path(f"/proc/net/{table}").read_text(encoding="utf-8")
        for line in text.splitlines()[1:]:
            yield line.split()
