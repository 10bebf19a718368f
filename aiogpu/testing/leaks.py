"""Finds leftovers of nodes: processes, descriptors, shared memory and cgroups.

Reads `/proc` and `/sys`. Only resources of aiogpu count: processes with its name, and
their descendants, which tasks have started.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.linux.cgroup import find_cgroup
from aiogpu.linux.procfs import descendants

_PROC: Final = Path("/proc")
_MARK: Final = "aiogpu"
_ZYGOTE: Final = "aiogpu-zygote"
_MAPPING: Final = "memfd:aiogpu"


class Resources(NamedTuple):
    """The resources of aiogpu that this process has at one moment.

    Attributes:
        processes: descriptions of aiogpu's processes below this one, by (pid, start).
        descriptors: number of this process's descriptors, by target.
        mappings: number of mappings of aiogpu's shared memory in this process.
        groups: the cgroups of this process's nodes.
    """

    processes: dict[tuple[int, int], str]
    descriptors: Counter[str]
    mappings: int
    groups: frozenset[str] = frozenset()

    @classmethod
    def take(cls) -> Resources:
        """Return the current resources."""
        return cls(_processes(), _descriptors(), _mappings(), _groups())

    def since(self, before: Resources) -> list[str]:
        """Describe each resource that did not exist at an earlier moment."""
        new = [
            f"process {description}"
            for key, description in self.processes.items()
            if key not in before.processes
        ]
        for target, count in (self.descriptors - before.descriptors).items():
            new.append(f"{count} open descriptor(s) of {target}")
        if self.mappings > before.mappings:
            new.append(f"{self.mappings - before.mappings} mapping(s) of shared memory")
        new += [f"cgroup {name}" for name in sorted(self.groups - before.groups)]
        return new


def _processes() -> dict[tuple[int, int], str]:
    processes: dict[tuple[int, int], str] = {}
    own_pids: set[int] = set()
    for process in descendants(os.getpid()):
        command = _read_command(process.pid)
        # The first process of a container gets the orphans of all others. A node must
        # reap only the zygotes that it has started.
        may_be_orphan = process.name != _ZYGOTE or os.getpid() == 1
        if command is None or (process.state == "Z" and may_be_orphan):
            continue
        # A zombie has no command line, but keeps its name.
        is_named = _MARK in process.name or _MARK in command
        if is_named or process.parent in own_pids:
            own_pids.add(process.pid)
            description = f"{process.pid} ({process.name}) {command}".rstrip()
            processes[process.pid, process.start] = description
    return processes


def _read_command(pid: int) -> str | None:
    """Read the beginning of a command line; None if the process has ended."""
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    return command.replace(b"\0", b" ").decode(errors="replace").strip()[:80]


def _descriptors() -> Counter[str]:
    targets: Counter[str] = Counter()
    for descriptor in (_PROC / "self" / "fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if f"{_MARK}-" in target or "pidfd" in target:
            targets[target] += 1
    return targets


def _mappings() -> int:
    maps = (_PROC / "self" / "maps").read_text(errors="replace")
    return sum(_MAPPING in line for line in maps.splitlines())


def _groups() -> frozenset[str]:
    place = find_cgroup().directory
    if place is None:
        return frozenset()
    return frozenset(
        name
        for name in os.listdir(place)
        if name.startswith(f"{_MARK}-") and name.endswith(f"-{os.getpid()}")
    )
