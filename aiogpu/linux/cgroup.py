"""Cgroups: find this process's groups, read limits, kill the processes of a group.

A machine may have several hierarchies at once: version 1 has one for each controller,
version 2 has one for all, and hybrid machines have both (cgroups(7),
cgroup_namespaces(7), proc(5)). Paths are plain strings: without `pathlib` a node starts
some milliseconds earlier.

A process cannot leave its group by forking, by starting a session or by losing its
parent, and a group is killed in one step that no fork can outrun. So a group is more
reliable than a process tree. A keeper and its workers are born in the group of their
slot, at no cost; the keeper leaves the group while the group is killed. Driver and
keepers both kill groups, since either may die before the other.
(Documentation/admin-guide/cgroup-v2.rst of Linux.)
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import time
from contextlib import suppress
from typing import Final, NamedTuple

UNIFIED: Final = ""
"""Stands for the hierarchy of version 2 in place of a controller's name."""

PROC: Final = "/proc"

StrPath = str | os.PathLike[str]
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")


class Hierarchy(NamedTuple):
    """One mounted hierarchy and this process's place in it.

    Attributes:
        top: the mount point.
        own: directory of this process's group; `top` if that is not visible.
        is_visible: this process's group is visible.
        is_writable: the hierarchy is mounted for writing.
    """

    top: str
    own: str
    is_visible: bool
    is_writable: bool

    @property
    def groups(self) -> list[str]:
        """This process's group and all its ancestors, its own first."""
        groups = [self.own]
        while groups[-1] != self.top:
            groups.append(os.path.dirname(groups[-1]))
        return groups


def read_bytes(path: StrPath) -> bytes:
    """Return the content of a file; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def read_limit(path: str) -> int | None:
    """Read a limit; None for "max" and if there is none."""
    data = read_bytes(path).strip()
    return int(data) if data.isdigit() else None


def read_numbers(path: str) -> dict[str, int]:
    """Read the numbers of a file with lines such as `name 12` or `Name:   12 kB`."""
    numbers: dict[str, int] = {}
    for line in read_bytes(path).decode("ascii", "replace").splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            numbers[words[0].rstrip(":")] = int(words[1])
    return numbers


def find_hierarchy(controller: str, proc: StrPath = PROC) -> Hierarchy | None:
    """Return the hierarchy of a controller; None if it is not mounted.

    Args:
        controller: a controller of version 1, such as "memory", or `UNIFIED`.
        proc: the mount point of the proc filesystem.
    """
    groups = os.fsdecode(read_bytes(f"{proc}/self/cgroup"))
    path = _own_path(groups, controller)
    if path is None:
        return None
    for line in read_bytes(f"{proc}/self/mountinfo").splitlines():
        hierarchy = _match(line, controller, path)
        if hierarchy is not None:
            return hierarchy
    return None


def _own_path(groups: str, controller: str) -> str | None:
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _match(line: bytes, controller: str, path: str) -> Hierarchy | None:
    """Parse a line of mountinfo; return None for another hierarchy or filesystem."""
    before, _, after = line.partition(b" - ")
    fields, kinds = before.split(b" "), after.split(b" ")
    if len(fields) < 6 or len(kinds) < 3:
        return None
    if controller == UNIFIED:
        matches = kinds[0] == b"cgroup2"
    else:
        names = os.fsdecode(kinds[2]).split(",")
        matches = kinds[0] == b"cgroup" and controller in names
    if not matches:
        return None
    root, top = _unescape(fields[3]), _unescape(fields[4])
    below = os.path.relpath(path, root) if path.startswith(root) else ".."
    is_visible = ".." not in below.split("/") and ".." not in path.split("/")
    own = os.path.normpath(f"{top}/{below}") if is_visible else top
    is_writable = b"rw" in fields[5].split(b",")
    return Hierarchy(top, own, is_visible, is_writable)


def _unescape(field: bytes) -> str:
    return os.fsdecode(
        _ESCAPED.sub(lambda match: bytes([int(match.group(1), 8)]), field)
    )


def usable_cpus(proc: StrPath = PROC) -> float:
    """Return the number of usable CPUs: by affinity or, if less, by cgroup quota.

    A quota may be a fraction, such as 1.5. The result is at least 1, since a task asks
    for one CPU by default. Sources: sched_getaffinity(2); the kernel's cgroup-v2
    (`cpu.max`) and cgroup-v1 (`cpu.cfs_quota_us`) documentation.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder in cgroup_folders(proc, "cpu"):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            limits.append(quota)
    return max(1.0, min(limits))


def cgroup_folders(proc: StrPath, controller: str) -> list[str]:
    """Return the directories of this process's cgroups and their ancestors.

    Of both versions, at the mount points in `/proc/self/mountinfo`.
    """
    hierarchies = (find_hierarchy(name, proc) for name in (UNIFIED, controller))
    return [
        folder
        for hierarchy in hierarchies
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
    """Return the CPUs that unpinned processes of this cgroup may use.

    Args:
        root: the parent directory of `/proc` and `/sys`.
    """
    online = read_cpus(f"{root}/sys/devices/system/cpu/online")
    for folder in cgroup_folders(f"{root}/proc", "cpuset"):
        for file in _CPUSETS:
            if cpus := read_cpus(f"{folder}/{file}"):
                return online & cpus if online else cpus
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


_DELEGATE: Final = (
    "start the program with `systemd-run --user --scope`, or in a cgroup of its own "
    "that it can write to"
)


class ParentCgroup(NamedTuple):
    """The parent cgroup for a node's cgroup.

    Attributes:
        directory: this process's own cgroup; None if it cannot have children.
        reason: why not, and what the user can do.
    """

    directory: str | None
    reason: str = ""


def find_cgroup(proc: StrPath = PROC) -> ParentCgroup:
    """Find a cgroup2 in which this process can make groups; changes nothing."""
    hierarchy = find_hierarchy(UNIFIED, proc)
    if hierarchy is None:
        return ParentCgroup(None, "no cgroup2 is mounted; mount one at /sys/fs/cgroup")
    own = hierarchy.own
    if not hierarchy.is_visible:
        return ParentCgroup(
            None,
            f"this process's cgroup is outside the hierarchy at {hierarchy.top}; "
            f"give the container a cgroup namespace of its own",
        )
    if not hierarchy.is_writable:
        return ParentCgroup(
            None,
            f"{hierarchy.top} is mounted read-only; run the container with writable "
            f"cgroups, or do without",
        )
    for path in (own, f"{own}/cgroup.procs"):
        if not os.access(path, os.W_OK):
            return ParentCgroup(None, f"{path} is not writable; {_DELEGATE}")
    # The root group has no such file.
    kind = read_bytes(f"{own}/cgroup.type").decode().strip() or "domain"
    if kind != "domain":
        return ParentCgroup(None, f"{own} is of type {kind!r}; {_DELEGATE}")
    return ParentCgroup(own)


AGAIN: Final = 0.02
"""Seconds between two checks if the kernel does not notify that a group is empty."""

CHUNK: Final = 1 << 16


class Cgroup:
    """A group of the cgroup2 filesystem.

    It need not exist: a removed group has no processes.

    Attributes:
        path: the group's directory.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<Cgroup {self.path}>"

    def child(self, name: str) -> Cgroup:
        """Return the child group of a name."""
        return Cgroup(f"{self.path}/{name}")

    def children(self) -> list[Cgroup]:
        """Return all child groups."""
        try:
            with os.scandir(self.path) as entries:
                return [Cgroup(entry.path) for entry in entries if entry.is_dir()]
        except OSError:
            return []

    def make(self) -> None:
        """Make the group and its missing ancestors; raises `OSError` on failure."""
        os.makedirs(self.path, exist_ok=True)

    def enter(self) -> None:
        """Move this process into the group; its later forks begin there.

        The first move after a while waits for a grace period of the kernel, some
        6 to 13 ms: too slow for every task.

        Raises:
            OSError: the group was removed, or this user may not enter, or the kernel
                allows no processes in the group.
        """
        self._write("cgroup.procs", b"0")

    def pids(self) -> list[int]:
        """Return the group's own processes; 0 for one outside this PID namespace."""
        return [int(pid) for pid in self._read("cgroup.procs").split()]

    def all_pids(self) -> list[int]:
        """Return the processes of the group and of its descendants."""
        below = [child.all_pids() for child in self.children()]
        return sum(below, self.pids())

    @property
    def is_populated(self) -> bool:
        """True if the group or a descendant has processes, not counting zombies."""
        return b"populated 1" in self._read("cgroup.events")

    def kill(self) -> None:
        """Kill all processes of the group and its descendants, also this one."""
        try:
            self._write("cgroup.kill", b"1")
        except OSError as error:
            if not _is_gone(error):
                raise
            # The group was removed, or the kernel is older than 5.14.
            self._kill_each()

    def wait_until_empty(self, timeout: float) -> bool:
        """Block until the group and its descendants are empty, at most `timeout` s."""
        deadline = time.monotonic() + timeout
        try:
            events = os.open(f"{self.path}/cgroup.events", os.O_RDONLY)
        except OSError as error:
            if not _is_gone(error):
                raise
            return True
        try:
            changes = select.poll()
            changes.register(events, select.POLLPRI)
            while b"populated 1" in os.pread(events, CHUNK, 0):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                changes.poll(min(remaining, AGAIN) * 1000)
        except OSError as error:
            if not _is_gone(error):
                raise
            # The group was removed meanwhile.
        finally:
            os.close(events)
        return True

    def remove(self) -> bool:
        """Remove the empty group and its descendants; False if that failed."""
        for child in self.children():
            child.remove()
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _kill_each(self) -> None:
        """Kill the processes one by one; children forked meanwhile are missed."""
        for pid in self.all_pids():
            if pid not in (0, os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _read(self, name: str) -> bytes:
        try:
            with open(f"{self.path}/{name}", "rb") as file:
                return file.read()
        except OSError as error:
            if _is_gone(error):
                return b""
            raise

    def _write(self, name: str, value: bytes) -> None:
        descriptor = os.open(f"{self.path}/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, value)
        finally:
            os.close(descriptor)


def _is_gone(error: OSError) -> bool:
    """Return True if an error means that the group was removed."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ENODEV


LIMIT: Final = 2.0
"""Seconds to wait until a slot's group is empty, before it is killed again."""

NODE_LIMIT: Final = 30.0
"""Seconds to wait until the group of a node is empty after its driver has died."""


class SlotCgroup:
    """The cgroup of one slot, if cgroups are available; its keeper enters it."""

    def __init__(self, node: str, slot: int) -> None:
        self._node = Cgroup(node)
        self._group = self._node.child(str(slot))
        self._origin = Cgroup(os.path.dirname(node))
        self._alone = b"%d\n" % os.getpid()
        self._members = -1
        if node:
            procs = f"{self._group.path}/cgroup.procs"
            with suppress(OSError):
                self._group.make()
                self._members = os.open(procs, os.O_RDONLY)
                if self.has_others:
                    self._group.enter()

    @property
    def has_others(self) -> bool:
        """True if the group has processes besides the keeper."""
        if self._members < 0:
            return False
        return os.pread(self._members, CHUNK, 0) != self._alone

    def end_others(self) -> None:
        """Kill all processes of the group except the keeper; return when they ended.

        The keeper's own children remain zombies until it waits for them.
        """
        if self._members < 0:
            return
        try:
            self._origin.enter()
        except OSError:
            self._end_each()
            return
        while not self._is_empty():
            pass
        try:
            self._group.enter()
        except OSError:
            # Later workers have no group.
            self.forget()

    def _is_empty(self) -> bool:
        self._group.kill()
        return self._group.wait_until_empty(LIMIT)

    def _end_each(self) -> None:
        """Kill the others one by one, without leaving the group."""
        from aiogpu.linux.syscalls import kill

        while others := [pid for pid in self._group.pids() if pid != os.getpid()]:
            for pid in others:
                kill(pid)
            time.sleep(AGAIN)

    def forget(self) -> None:
        """Close this process's descriptor of the group, in a worker."""
        if self._members >= 0:
            os.close(self._members)
            self._members = -1

    def remove(self) -> None:
        """Leave the group, and remove it and, if possible, the node's group."""
        if self._members >= 0:
            self.forget()
            with suppress(OSError):
                self._origin.enter()
                # Groups of slots whose keepers ended long ago exist as well.
                self._node.remove()


def fork_into_slot(node: str, slot: int) -> int:
    """Fork a slot's keeper, into the slot's cgroup if possible.

    Returns:
        The keeper's process id; 0 in the keeper.
    """
    if node:
        group = Cgroup(node).child(str(slot))
        # A group that was killed once may kill new processes (see `_fork_into`).
        group.remove()
        with suppress(OSError):
            group.make()
            pid = _fork_into(group)
            if pid is not None:
                return pid
    # The keeper tries to enter the group itself, which is slower.
    return os.fork()


def _fork_into(group: Cgroup) -> int | None:
    """Fork into a group; None if the kernel has killed the child at once.

    Linux (6.18 at least) does so if only one of the two groups was ever killed, because
    it compares the wrong counters (`kill_seq` in kernel/cgroup/cgroup.c).
    """
    # Imported late, as above: the driver uses this module without `ctypes`.
    from aiogpu.linux.syscalls import fork_into

    directory = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY)
    reading, writing = os.pipe()
    try:
        pid = fork_into(directory)
        if pid == 0:
            os.write(writing, b".")
            return 0
        os.close(writing)
        writing = -1
        if os.read(reading, 1):
            return pid
        os.waitpid(pid, 0)
        return None
    finally:
        for descriptor in (directory, reading, writing):
            if descriptor >= 0:
                os.close(descriptor)


def end_node(path: str) -> None:
    """Kill all processes in a node's cgroup and remove it, in bounded time."""
    if path:
        node = Cgroup(path)
        node.kill()
        # A long wait delays no one, and a group that is not removed now never is.
        node.wait_until_empty(NODE_LIMIT)
        node.remove()


def remove_closed_node(directory: str, path: str) -> None:
    """Remove a node's cgroup if the node's directory is gone: its driver closes it.

    The driver does so as well, after all zygotes have ended, but may be killed or
    interrupted before. No process is killed: if anyone else has removed the directory,
    the node is still alive.
    """
    if path and not os.path.exists(directory):
        Cgroup(path).remove()


def end_slot(node: str, slot: int) -> None:
    """Kill all processes of a slot after its keeper has died."""
    if node:
        Cgroup(node).child(str(slot)).kill()
