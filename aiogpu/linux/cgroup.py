"""One group of cgroup v2: who is in it, and how all of them are ended.

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
import select
import signal
import time
from contextlib import suppress
from typing import Final

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
        """Who is in it, groups below it not counted; 0 for one that we cannot see."""
        return [int(pid) for pid in self._read("cgroup.procs").split()]

    def all_pids(self) -> list[int]:
        """Who is in it and below it."""
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
        """Block until nobody is in it or below it, for so many seconds at most."""
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
        """End them one by one; those that fork meanwhile need another call."""
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
    """Whether the kernel says that a group was removed, before or as it was opened."""
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
        """The same without stepping out, one by one; for who has ended is not shown."""
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
        """Step out for good and remove it, and the node's if nobody is in it."""
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
