"""Waits for killed processes of a slot that neither keeper nor zygote has reported.

SIGKILL does not end every process at once: one that waits in the kernel for a device, a
disk or a network filesystem (state D), or that is frozen by a cgroup of version 1, ends
when the kernel lets it. Until then it may use its devices and its memory, so `Remains`
never gives up; it only says when it is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from aiogpu.linux.cgroup import Cgroup
from aiogpu.linux.procfs import ProcessStat, read_stat

if TYPE_CHECKING:
    from aiogpu.observe.status import UnendedStatus

FIRST_LOOK: Final = 1e-3
"""Seconds until the second look; each next pause is doubled."""

LONGEST: Final = 0.5
"""Most seconds between two looks."""

LIMIT: Final = 2.0
"""Seconds after which processes are late."""


class Remains:
    """The processes that are left in a slot after SIGKILL.

    Attributes:
        since: loop time at which the processes were killed.
        is_watched: `watch` was called.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pids: Iterable[int],
        group: Cgroup | None,
        will_be_told: Callable[[], bool],
        since: float,
    ) -> None:
        """Note the processes; `watch` starts to wait for their ends.

        Args:
            loop: runs the timer.
            pids: the known processes.
            group: the slot's cgroup, which has all its processes; None without one.
            will_be_told: returns True if the zygote can still report the end of all
                processes. Without a cgroup, only the zygote knows them all.
            since: loop time at which they were killed.
        """
        self.since = since
        self._loop = loop
        # A process id may be used again, but not with the same start.
        stats = map(read_stat, pids)
        self._known = {stat.pid: stat for stat in stats if stat is not None}
        self._group = group
        self._will_be_told = will_be_told
        self._on_late: Callable[[], None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_watched = False

    def __repr__(self) -> str:
        return f"<Remains of {list(self._known)}>"

    def watch(self, on_late: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """Wait until all processes have ended.

        Args:
            on_late: called once, if a process is left `LIMIT` seconds from now.
            on_gone: called once, when no process is left; at once if none is.
        """
        self.is_watched = True
        self._on_late, self._on_gone = on_late, on_gone
        self._look(FIRST_LOOK, self._loop.time() + LIMIT)

    def _look(self, pause: float, deadline: float) -> None:
        self._timer = None
        if self.is_over:
            on_gone, self._on_gone = self._on_gone, None
            assert on_gone is not None, self
            on_gone()
            return
        if self._group is not None:
            # Again: without cgroup.kill, new processes may have been forked.
            self._group.kill()
        longer = min(2 * pause, LONGEST)
        self._timer = self._loop.call_later(pause, self._look, longer, deadline)
        if self._on_late is not None and self._loop.time() >= deadline:
            on_late, self._on_late = self._on_late, None
            on_late()

    @property
    def is_over(self) -> bool:
        """True if no process is left, as far as can be known."""
        if self._group is not None and self._group.is_populated:
            return False
        if any(self._living(self._known)):
            return False
        return self._group is not None or not self._will_be_told()

    def _living(self, pids: Iterable[int]) -> Iterable[ProcessStat]:
        for pid in pids:
            stat, known = read_stat(pid), self._known.get(pid)
            if stat is None or stat.has_ended:
                continue
            if known is None or known.start == stat.start:
                yield stat

    def status(self, worker: int) -> UnendedStatus:
        """Return the processes that are left, as those of a worker."""
        from aiogpu.observe.status import UnendedStatus

        members = () if self._group is None else self._group.all_pids()
        left = {stat.pid: stat for stat in self._living({*self._known, *members})}
        return UnendedStatus(
            worker,
            tuple(left),
            tuple(stat.state for stat in left.values()),
            self._loop.time() - self.since,
        )

    def close(self) -> None:
        """Stop waiting."""
        self._on_late = self._on_gone = None
        if self._timer is not None:
            self._timer.cancel()
