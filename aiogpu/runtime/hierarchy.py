"""Where this process stands in the machine's cgroups, of either version.

A machine may have several hierarchies at once: version 1 has one for each
controller, version 2 one for all, and hybrid machines have both. (cgroups(7),
cgroup_namespaces(7) and proc(5), `/proc/pid/mountinfo`.)
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

UNIFIED: Final = ""
"""Names the hierarchy of version 2 where a controller is asked for."""
PROC: Final = Path("/proc")

_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


class Hierarchy(NamedTuple):
    """One mounted hierarchy and this process's place in it.

    Attributes:
        top: where the hierarchy is mounted.
        own: directory of this process's group; `top` if its own is not to be seen.
        is_seen: whether `own` is this process's own.
        is_writable: whether it is mounted for writing.
    """

    top: Path
    own: Path
    is_seen: bool
    is_writable: bool

    @property
    def groups(self) -> list[Path]:
        """This process's group and all above it, its own first."""
        found = [self.own]
        while found[-1] != self.top:
            found.append(found[-1].parent)
        return found


def find_hierarchy(controller: str, proc: Path = PROC) -> Hierarchy | None:
    """The hierarchy of a controller of version 1, or of `UNIFIED`; None if not there.

    Args:
        controller: "memory", for example.
        proc: where the proc filesystem is.
    """
    try:
        groups = (proc / "self/cgroup").read_bytes()
        mounts = (proc / "self/mountinfo").read_bytes()
    except OSError:
        return None
    path = _own_path(os.fsdecode(groups), controller)
    if path is None:
        return None
    for line in mounts.splitlines():
        found = _match(line, controller, path)
        if found is not None:
            return found
    return None


def _own_path(groups: str, controller: str) -> str | None:
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _match(line: bytes, controller: str, path: str) -> Hierarchy | None:
    """What a line of mountinfo says of the hierarchy, None if it is of another."""
    before, _, after = line.partition(b" - ")
    fields, kinds = before.split(b" "), after.split(b" ")
    if len(fields) < 6 or len(kinds) < 3:
        return None
    if controller == UNIFIED:
        is_meant = kinds[0] == b"cgroup2"
    else:
        names = os.fsdecode(kinds[2]).split(",")
        is_meant = kinds[0] == b"cgroup" and controller in names
    if not is_meant:
        return None
    root, top = _unescape(fields[3]), Path(_unescape(fields[4]))
    below = os.path.relpath(path, root) if path.startswith(root) else ".."
    is_seen = ".." not in below.split("/") and ".." not in path.split("/")
    own = top / below if is_seen else top
    is_writable = b"rw" in fields[5].split(b",")
    return Hierarchy(top, own, is_seen, is_writable)


def _unescape(field: bytes) -> str:
    return os.fsdecode(
        _ESCAPED.sub(lambda match: bytes([int(match.group(1), 8)]), field)
    )
