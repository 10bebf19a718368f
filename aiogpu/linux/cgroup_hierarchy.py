"""Where this process stands in the machine's cgroups, and how many CPUs they allow.

A machine may have several hierarchies at once: version 1 has one for each controller,
version 2 one for all, and hybrid machines have both (cgroups(7), cgroup_namespaces(7),
proc(5)). The node's own group is used beside the keepers, not instead of them: it ends
what outlives a zygote and a keeper that were both killed. Workers do not need this
module. Paths are plain strings: a node starts some milliseconds sooner without
`pathlib`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from aiogpu.linux.cgroup import Cgroup

UNIFIED: Final = ""
"""Names the hierarchy of version 2 where a controller is asked for."""

PROC: Final = "/proc"

StrPath = str | os.PathLike[str]
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


class Hierarchy(NamedTuple):
    """One mounted hierarchy and this process's place in it.

    Attributes:
        top: where the hierarchy is mounted.
        own: directory of this process's group; `top` if its own is not to be seen.
        is_seen: whether `own` is this process's own.
        is_writable: whether it is mounted for writing.
    """

    top: str
    own: str
    is_seen: bool
    is_writable: bool

    @property
    def groups(self) -> list[str]:
        """This process's group and all above it, its own first."""
        found = [self.own]
        while found[-1] != self.top:
            found.append(os.path.dirname(found[-1]))
        return found


def read_bytes(path: StrPath) -> bytes:
    """Return what a file has, nothing if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def read_limit(path: str) -> int | None:
    """A limit; None for "max" and where there is none."""
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


def find_hierarchy(controller: str, proc: StrPath = PROC) -> Hierarchy | None:
    """The hierarchy of a controller of version 1, or of `UNIFIED`; None if not there.

    Args:
        controller: "memory", for example.
        proc: where the proc filesystem is.
    """
    groups = os.fsdecode(read_bytes(f"{proc}/self/cgroup"))
    path = _own_path(groups, controller)
    if path is None:
        return None
    for line in read_bytes(f"{proc}/self/mountinfo").splitlines():
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
    root, top = _unescape(fields[3]), _unescape(fields[4])
    below = os.path.relpath(path, root) if path.startswith(root) else ".."
    is_seen = ".." not in below.split("/") and ".." not in path.split("/")
    own = os.path.normpath(f"{top}/{below}") if is_seen else top
    is_writable = b"rw" in fields[5].split(b",")
    return Hierarchy(top, own, is_seen, is_writable)


def _unescape(field: bytes) -> str:
    return os.fsdecode(
        _ESCAPED.sub(lambda match: bytes([int(match.group(1), 8)]), field)
    )


def usable_cpus(proc: StrPath = PROC) -> float:
    """CPUs by affinity, or by the tightest cgroup quota where that is less.

    A quota may be a fraction, 1.5; it is never answered below 1, since a task asks
    for one CPU unless told otherwise. Sources: sched_getaffinity(2); the kernel's
    cgroup-v2 (`cpu.max`) and cgroup-v1 (`cpu.cfs_quota_us`) documentation.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder in cgroup_folders(proc, "cpu"):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            limits.append(quota)
    return max(1.0, min(limits))


def cgroup_folders(proc: StrPath, controller: str) -> list[str]:
    """This process's cgroups and their parents, of either version.

    They are where `/proc/self/mountinfo` says that their hierarchies are mounted.
    """
    found = (find_hierarchy(name, proc) for name in (UNIFIED, controller))
    return [
        folder
        for hierarchy in found
        if hierarchy is not None
        for folder in hierarchy.groups
    ]


def _quota_v2(folder: str) -> float | None:
    quota, _, period = read_bytes(f"{folder}/cpu.max").partition(b" ")
    return int(quota) / int(period) if quota.isdigit() and period else None


def _quota_v1(folder: str) -> float | None:
    quota = read_limit(f"{folder}/cpu.cfs_quota_us")  # -1 for none
    period = read_limit(f"{folder}/cpu.cfs_period_us")
    return quota / period if quota and period else None


MOST_CPUS: Final = 1 << 16
"""CPU numbers from here on are invalid."""

_CPUSETS: Final = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
"""Files of cgroup-v2, of cgroup-v1, and of cgroup-v1 in older kernels."""


def unpinned_cpus(root: StrPath = "") -> frozenset[int]:
    """Return the CPUs that processes here may use if nobody has pinned them.

    Args:
        root: the directory under which `/proc` and `/sys` are.
    """
    online = read_cpus(f"{root}/sys/devices/system/cpu/online")
    for folder in cgroup_folders(f"{root}/proc", "cpuset"):
        for file in _CPUSETS:
            if found := read_cpus(f"{folder}/{file}"):
                return online & found if online else found
    return online


def read_cpus(file: str) -> frozenset[int]:
    """Read a list such as "0-3,8"; empty if it cannot be read or is malformed."""
    cpus: set[int] = set()
    try:
        for part in read_bytes(file).decode("ascii").strip().split(","):
            first, _, last = part.partition("-")
            if part:
                cpus.update(range(int(first), min(int(last or first), MOST_CPUS) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


_log: Final = logging.getLogger(__name__)

LIMIT: Final = 2.0
"""Seconds for which the end of what is in it is waited for."""

FIRST_LOOK: Final = 1e-3
"""Seconds until the first look at whether it has become empty; then twice that."""

_DELEGATE: Final = (
    "start the program by `systemd-run --user --scope`, or with a cgroup of its own "
    "that it may write to"
)


class Place(NamedTuple):
    """Where a node's cgroup can be made.

    Attributes:
        directory: this process's own cgroup, None if none can be made in it.
        reason: why not, and what to do about it.
    """

    directory: str | None
    reason: str = ""


def find_cgroup(proc: StrPath = PROC) -> Place:
    """Look for a cgroup2 that this process may make groups in; changes nothing."""
    found = find_hierarchy(UNIFIED, proc)
    if found is None:
        return Place(None, "no cgroup2 is mounted; mount one at /sys/fs/cgroup")
    own = found.own
    if not found.is_seen:
        return Place(
            None,
            f"this process's cgroup lies outside of what is mounted at {found.top}; "
            f"give the container a cgroup namespace of its own",
        )
    if not found.is_writable:
        return Place(
            None,
            f"{found.top} is mounted read-only; run the container with cgroups "
            f"writable, or do without",
        )
    for path in (own, f"{own}/cgroup.procs"):
        if not os.access(path, os.W_OK):
            return Place(None, f"{path} may not be written to; {_DELEGATE}")
    # The uppermost has no such file.
    kind = read_bytes(f"{own}/cgroup.type").decode().strip() or "domain"
    if kind != "domain":
        return Place(None, f"{own} is of type {kind!r}; {_DELEGATE}")
    return Place(own)


class NodeCgroup:
    """The cgroup of one node, with one below it for each slot.

    Attributes:
        path: where it is or would be, "" where there can be none.
        reason: why there can be none, "" if there can.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.path = ""
        self.reason = "the node has not started"
        self._loop = loop

    def __repr__(self) -> str:
        return f"<NodeCgroup {self.path or self.reason}>"

    def choose(self, node: str) -> None:
        """Say where that of a node of this name is; its zygote makes it with a slot's.

        So there is nothing to remove where a zygote ends before it has forked.
        """
        place = find_cgroup()
        self.reason = place.reason
        if place.directory is not None:
            # The process id tells a reader whose it is.
            self.path = f"{place.directory}/{node}-{os.getpid()}"

    def end_slot(self, slot: int, then: Callable[[], None]) -> None:
        """End all that is in a slot's group, its keeper too; then call back.

        At once if nobody is there; otherwise when all have gone or `LIMIT` is over.
        """
        if not self.path:
            then()
            return
        group = Cgroup(f"{self.path}/{slot}")
        group.kill()
        self._look(group, then, FIRST_LOOK, self._loop.time() + LIMIT)

    def _look(
        self, group: Cgroup, then: Callable[[], None], pause: float, deadline: float
    ) -> None:
        if group.is_populated:
            if self._loop.time() < deadline:
                # Once more, for kernels that must end them one by one.
                group.kill()
                self._loop.call_later(
                    pause, self._look, group, then, 2 * pause, deadline
                )
                return
            _log.warning(
                "! processes %s of an ended worker do not die of SIGKILL; they may "
                "hold devices",
                group.pids(),
            )
        then()

    async def remove(self) -> None:
        """End the processes that are left and remove it with all below, in `LIMIT`."""
        if not self.path:
            return
        node, self.path = Cgroup(self.path), ""
        pause, deadline = FIRST_LOOK, self._loop.time() + LIMIT
        while not node.remove():
            if self._loop.time() >= deadline:
                _log.warning("! %s cannot be removed: %s", node.path, node.all_pids())
                return
            node.kill()
            await asyncio.sleep(pause)
            pause *= 2
