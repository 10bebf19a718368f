"""A keeper's own cgroup: what its workers cannot leave, and how the rest is ended.

The keeper is born in it, and so are its workers, at no cost. So it must step out
for the moment in which the group is killed.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from aiogpu.cgroup import AGAIN, CHUNK, Cgroup
from aiogpu.worker import kernel

LIMIT: Final = 2.0
"""Seconds for which the end of a whole node waits for its groups to be empty."""


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
        """Whether not just the keeper is in it."""
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
        while others := [pid for pid in self._group.pids() if pid != os.getpid()]:
            for pid in others:
                kernel.kill(pid)
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
        # One that was killed once would kill whoever is born in it.
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
    place = os.open(group.path, os.O_RDONLY | os.O_DIRECTORY)
    reading, writing = os.pipe()
    try:
        pid = kernel.fork_into(place)
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
        node.wait_until_empty(LIMIT)
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
