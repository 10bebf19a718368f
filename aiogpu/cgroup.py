"""One group of cgroup2: who is in it, how all of them are ended, and how it goes.

A process cannot leave its group by forking, by a session of its own or by losing
its parent, and a group is killed in one step that no fork can outrun: so it holds
what a process tree cannot. Driver and keepers both use it, each where the other
may have died. (Documentation/admin-guide/cgroup-v2.rst of Linux.)
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
        """Whether anybody is in it or below it, zombies not counted."""
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
