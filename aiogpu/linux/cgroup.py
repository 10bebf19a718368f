"""Cgroups: where this process is in them, what they allow, and ending all in a group.

A machine may have several hierarchies at once: version 1 has one for each controller,
version 2 one for all, and hybrid machines have both (cgroups(7), cgroup_namespaces(7),
proc(5)). Paths are plain strings: a node starts some milliseconds sooner without
`pathlib`.

A process cannot leave its group by forking, by a session of its own or by losing its
parent, and a group is killed in one step that no fork can outrun. So it holds what a
process tree cannot. A keeper is born in the group of its slot, and so are its workers,
at no cost; the keeper steps out for the moment in which the group is killed. Driver and
keepers both use it, each where the other may have died.
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
    """Parse a line of mountinfo; return None if it is of another hierarchy."""
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
    """Return the CPUs that unpinned processes of this cgroup may use.

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


AGAIN: Final = 0.02
"""Seconds between two looks where the kernel does not say that a group is empty."""

CHUNK: Final = 1 << 16


class Cgroup:
    """A directory of the cgroup2 filesystem.

    It need not exist: one that has gone has nobody in it.

    Attributes:
        path: where it is.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<Cgroup {self.path}>"

    def child(self, name: str) -> Cgroup:
        """The group of that name below this one."""
        return Cgroup(f"{self.path}/{name}")

    def children(self) -> list[Cgroup]:
        """All groups directly below this one."""
        try:
            with os.scandir(self.path) as entries:
                return [Cgroup(entry.path) for entry in entries if entry.is_dir()]
        except OSError:
            return []

    def make(self) -> None:
        """Make it and what is missing above; raises `OSError` if that is impossible."""
        os.makedirs(self.path, exist_ok=True)

    def enter(self) -> None:
        """Move this process into it; its later forks begin there.

        The first move after a while waits for a grace period of the kernel, some
        6 to 13 ms: no step that is taken for every task.

        Raises:
            OSError: it has gone, or this user may not, or the kernel will not have
                processes in it.
        """
        self._write("cgroup.procs", b"0")

    def pids(self) -> list[int]:
        """Return the processes in this group itself; 0 stands for an invisible one."""
        return [int(pid) for pid in self._read("cgroup.procs").split()]

    def all_pids(self) -> list[int]:
        """Return the processes in this group and in the groups below it."""
        below = [child.all_pids() for child in self.children()]
        return sum(below, self.pids())

    @property
    def is_populated(self) -> bool:
        """True if anybody is in it or below it, zombies not counted."""
        return b"populated 1" in self._read("cgroup.events")

    def kill(self) -> None:
        """End all that is in it and below it, this process included."""
        try:
            self._write("cgroup.kill", b"1")
        except OSError as error:
            if not _is_gone(error):
                raise
            # It has gone, or the kernel is older than 5.14.
            self._kill_each()

    def wait_until_empty(self, timeout: float) -> bool:
        """Block until the group and those below it are empty, at most `timeout` s."""
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
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                changes.poll(min(left, AGAIN) * 1000)
        except OSError as error:
            if not _is_gone(error):
                raise
            # It was removed while we looked.
        finally:
            os.close(events)
        return True

    def remove(self) -> bool:
        """Remove it with all below it; whether it has gone. Nobody may be in it."""
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
        """Kill the processes one by one; new children need another call."""
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
    """Return whether an error says that the group was removed."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ENODEV


LIMIT: Final = 2.0
"""Seconds for which the end of a whole node waits for its groups to be empty."""

NODE_LIMIT: Final = 30.0
"""Seconds; the same of all processes of a node whose driver has died."""


class SlotCgroup:
    """The cgroup of one slot, entered by its keeper, if there is one to be had."""

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
        """True if not just the keeper is in it."""
        if self._members < 0:
            return False
        return os.pread(self._members, CHUNK, 0) != self._alone

    def end_others(self) -> None:
        """End all in it but the keeper; returns when they have gone.

        Those that are children of this process are ended too, but left to be
        waited for.
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
            # Its later workers do without.
            self.forget()

    def _is_empty(self) -> bool:
        self._group.kill()
        return self._group.wait_until_empty(LIMIT)

    def _end_each(self) -> None:
        """Kill the others one by one, without leaving: ended ones are not listed."""
        from aiogpu.linux.syscalls import kill

        while others := [pid for pid in self._group.pids() if pid != os.getpid()]:
            for pid in others:
                kill(pid)
            time.sleep(AGAIN)

    def forget(self) -> None:
        """Close what this process has open of it: it is a worker."""
        if self._members >= 0:
            os.close(self._members)
            self._members = -1

    def remove(self) -> None:
        """Leave the group and remove it, and the node's group if that is empty."""
        if self._members >= 0:
            self.forget()
            with suppress(OSError):
                self._origin.enter()
                # Slots whose keepers were closed long ago are there as well.
                self._node.remove()


def fork_into_slot(node: str, slot: int) -> int:
    """Fork a slot's keeper, into the slot's cgroup if that can be.

    Returns:
        Its process id; 0 in the keeper.
    """
    if node:
        group = Cgroup(node).child(str(slot))
        # A group that was killed once would kill a process that is born in it.
        group.remove()
        with suppress(OSError):
            group.make()
            pid = _fork_into(group)
            if pid is not None:
                return pid
    # The keeper enters it by itself if it can, and waits for that.
    return os.fork()


def _fork_into(group: Cgroup) -> int | None:
    """Fork into a group; None if the kernel has killed the child at its birth.

    Linux does so, 6.18 at least, where just one of both groups was ever killed: it
    compares the wrong counters (`kill_seq` in kernel/cgroup/cgroup.c).
    """
    # Late, as above: a driver reads cgroups too, and does without `ctypes`.
    from aiogpu.linux.syscalls import fork_into

    place = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY)
    reading, writing = os.pipe()
    try:
        pid = fork_into(place)
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
        for descriptor in (place, reading, writing):
            if descriptor >= 0:
                os.close(descriptor)


def end_node(path: str) -> None:
    """End all processes in a node's cgroup and remove it, in bounded time."""
    if path:
        node = Cgroup(path)
        node.kill()
        # Nobody waits for this, and a group that is left is left for good.
        node.wait_until_empty(NODE_LIMIT)
        node.remove()


def remove_closed_node(directory: str, path: str) -> None:
    """Remove a node's cgroup where its driver is closing it: its directory has gone.

    The driver does so as well, after all zygotes have ended; it may be killed or
    interrupted before that. Ends nobody: if somebody else has removed the directory,
    the node lives.
    """
    if path and not os.path.exists(directory):
        Cgroup(path).remove()


def end_slot(node: str, slot: int) -> None:
    """End all processes of a slot whose keeper has died."""
    if node:
        Cgroup(node).child(str(slot)).kill()
