"""Processes that belong together: those with one runtime directory, and below them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PARTS: Final = {
    "aiogpu-work": "workers",
    "aiogpu-keep": "keepers",
    "aiogpu-zygo": "zygotes",
    "aiogpu-node": "nodes",
}
"""What they are called, by how their names begin."""


class Process(NamedTuple):
    """One that has not ended."""

    pid: int
    parent: int
    name: str
    command: str

    @property
    def part(self) -> str:
        """What it is: "workers", "keepers", "zygotes", "nodes" or "others"."""
        return PARTS.get(self.name[:11], "others")

    def __str__(self) -> str:
        return f"{self.pid} ({self.name}) {self.command!r:.80}"


def belonging(place: str) -> Iterator[Process]:
    """Those whose runtime directory that is, whoever their parents are, and their own.

    Workers for a program that has joined a node have the variables of that program.
    """
    mark = f"XDG_RUNTIME_DIR={place}\0".encode()
    children: dict[int, list[Process]] = {}
    found: list[Process] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
                stat = (entry / "stat").read_text(encoding="latin-1")
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has gone meanwhile, or is another user's
            # The name in parentheses may hold anything, spaces included.
            name, _, rest = stat.partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state not in "ZX":
                process = Process(int(entry.name), int(parent), name, command)
                children.setdefault(process.parent, []).append(process)
                if mark in environ:
                    found.append(process)
    seen: set[int] = set()
    while found:
        process = found.pop()
        if process.pid not in seen:
            seen.add(process.pid)
            yield process
            found += children.get(process.pid, ())


def counted(processes: list[Process]) -> Counter[str]:
    """How many there are of each part."""
    return Counter(process.part for process in processes)


def descriptors(pid: int) -> list[str]:
    """What those of a process lead to; nothing if it has gone."""
    found = []
    try:
        links = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []
    for link in links:
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{link}"))
        except OSError:
            continue  # it was closed meanwhile
    return found


def own_memory(pid: int) -> int:
    """Bytes that a process has in memory for itself; what is shared is left out."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024
