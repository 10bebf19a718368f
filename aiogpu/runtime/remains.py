"""Processes that a lease was for: found by the variable that they inherit, awaited.

They are nobody's children here, and who has started them may have been killed. So they
are looked up in /proc by what the lease's environment has marked them with, their ends
are seen on pidfds, and then it is looked again, until there is none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

from aiogpu.linux.cgroup_hierarchy import PROC

AGAIN: Final = 1.0
"""Seconds until it is looked again where it cannot be, or no pidfd can be had."""


def find_marked(mark: str, proc: Path = PROC) -> tuple[int, ...]:
    """The live processes of this user with that `NAME=value` among their variables.

    A variable of which the mark is one of several values, parted by commas, counts.
    Processes that have thrown their variables away are not found.
    """
    name, _, value = mark.partition("=")
    found = []
    user = os.getuid()
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if entry.stat().st_uid != user:
                continue
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            begin = name.encode() + b"="
            marks = [each[len(begin) :] for each in variables if each.startswith(begin)]
            if any(value.encode() in each.split(b",") for each in marks):
                found.append(int(entry.name))
    return tuple(found)


class Remains:
    """What is left of the processes of one lease.

    Attributes:
        pids: all that were found, those included that have ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mark: str,
        on_gone: Callable[[Collection[int]], None],
        find: Callable[[str], Collection[int]] = find_marked,
    ) -> None:
        """Begin to look.

        Args:
            loop: calls what is told.
            mark: the variable that they inherit, `NAME=value`.
            on_gone: told once that none is left, and which there were.
            find: looks them up, in a thread: there may be thousands of processes.
        """
        self.pids: set[int] = set()
        self._loop = loop
        self._mark = mark
        self._on_gone: Callable[[Collection[int]], None] | None = on_gone
        self._find = find
        self._pidfds: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def __repr__(self) -> str:
        return f"<Remains of {self._mark}: {len(self._pidfds)} processes>"

    def close(self) -> None:
        """Wait for nobody any more."""
        self._on_gone = None
        if self._timer is not None:
            self._timer.cancel()
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _look(self) -> None:
        self._timer = None
        Thread(target=self._run, name="aiogpu-remains", daemon=True).start()

    def _run(self) -> None:
        found: Collection[int] | None = None
        with suppress(OSError):  # there are too many open files
            found = self._find(self._mark)
        with suppress(RuntimeError):  # the loop may be closed meanwhile
            self._loop.call_soon_threadsafe(self._note, found)

    def _note(self, found: Collection[int] | None) -> None:
        if self._on_gone is None:
            return
        if found is None:
            self._timer = self._loop.call_later(AGAIN, self._look)
            return
        self.pids.update(found)
        unseen = [pid for pid in found if not self._watch(pid)]
        if self._pidfds:
            return
        if unseen:
            self._timer = self._loop.call_later(AGAIN, self._look)
            return
        if found:
            self._look()  # they have ended since; who knows what they have started
            return
        on_gone, self._on_gone = self._on_gone, None
        on_gone(self.pids)

    def _watch(self, pid: int) -> bool:
        """Have the end of a process seen; False where that cannot be."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        self._pidfds.add(pidfd)
        self._loop.add_reader(pidfd, self._on_end, pidfd)
        return True

    def _on_end(self, pidfd: int) -> None:
        self._forget(pidfd)
        if not self._pidfds:
            self._look()

    def _forget(self, pidfd: int) -> None:
        self._pidfds.discard(pidfd)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
