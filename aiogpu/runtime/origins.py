"""Where processes come from: the name of each, and those that it descends from.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.runtime.hierarchy import PROC
from aiogpu.runtime.memory_bounds import read_bytes

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


def origins_of(pids: Iterable[int], proc: Path = PROC) -> dict[int, Origin]:
    """Look up processes; those that have ended meanwhile are left out."""
    known: dict[int, tuple[str, int] | None] = {}
    found: dict[int, Origin] = {}
    for pid in pids:
        ancestors: list[int] = []
        looked_at = _stat(pid, proc, known)
        if looked_at is None:
            continue
        name, parent = looked_at
        while parent > 1 and len(ancestors) < DEEPEST:
            ancestors.append(parent)
            above = _stat(parent, proc, known)
            parent = 0 if above is None else above[1]
        found[pid] = Origin(name, tuple(ancestors))
    return found


def _stat(
    pid: int, proc: Path, known: dict[int, tuple[str, int] | None]
) -> tuple[str, int] | None:
    """The name and the parent of a process, None if there is none of that id."""
    if pid not in known:
        stat = read_bytes(f"{proc}/{pid}/stat")
        # The name stands in parentheses, and may have some of its own.
        before, _, after = stat.rpartition(b") ")
        name = before.partition(b" (")[2].decode(errors="replace")
        fields = after.split(None, 2)
        known[pid] = (name, int(fields[1])) if len(fields) > 1 else None
    return known[pid]
