"""The leases and placement groups of one node, and their holders.

A lease is requested like a task, and returned by cancelling that task. It is free again
when all processes that were started with its variables have ended: a killed or careless
holder leaves orphans. `LeaseProcessWatcher` finds them in /proc by a mark in their
environment, since they are no children of this process, waits for their ends on pidfds,
and repeats the search until there are none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Final, Protocol, cast

from aiogpu.client.interface import Receiver
from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.queue.sharded_dict import ShardedDict
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.errors import InfeasibleError, PlacementRemovedError
from aiogpu.linux.cgroup import PROC, StrPath, read_bytes
from aiogpu.linux.procfs import read_stat
from aiogpu.runtime.devices.binding import held_of
from aiogpu.runtime.pending_tasks import Call
from aiogpu.wire.codec import pack
from aiogpu.wire.messages import LEASE_MARK

if TYPE_CHECKING:
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.observe.status import UnendedStatus
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.devices.probe_thread import Key
    from aiogpu.runtime.devices.release import DeviceRelease


_log: Final = logging.getLogger(__name__)


LATE: Final = 10.0
"""Seconds after the return of a lease until its remaining processes are logged."""


AGAIN: Final = 1.0
"""Seconds until the next search if the search failed or no pidfd was available."""


AMID_EXEC: Final = 0.05
"""Seconds for which a process without variables is read again: during execve(2) the
kernel shows no variables for a millisecond or more."""


def find_marked(mark: str, proc: StrPath = PROC) -> tuple[int, ...]:
    """Return this user's processes that have `NAME=value` in their environment.

    The value may be one of several, separated by commas. Processes that have erased
    their environment are not found; if there are any, the call blocks for up to
    `AMID_EXEC`.
    """
    name, _, value = mark.partition("=")
    prefix = name.encode() + b"="
    pids, user = [], os.getuid()
    unread = [entry.path for entry in os.scandir(proc) if entry.name.isdigit()]
    ends = time.monotonic() + AMID_EXEC
    while unread:
        empty = []
        for path in unread:
            with suppress(OSError):
                if os.stat(path).st_uid != user:
                    continue
                variables = read_bytes(f"{path}/environ").split(b"\0")
                if variables == [b""] and os.readlink(f"{path}/exe"):
                    empty.append(path)
                lists = [v[len(prefix) :] for v in variables if v.startswith(prefix)]
                if any(value.encode() in marks.split(b",") for marks in lists):
                    pids.append(int(os.path.basename(path)))
        if time.monotonic() > ends:
            break
        unread = empty
        if unread:
            time.sleep(1e-3)
    return tuple(pids)


class LeaseProcessWatcher:
    """Watches the processes that still use an ended lease.

    Attributes:
        pids: all processes found so far, including ended ones.
        since: loop time of the start.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        mark: str,
        on_gone: Callable[[Collection[int]], None],
        find: Callable[[str], Collection[int]] = find_marked,
    ) -> None:
        """Start the first search.

        Args:
            loop: runs the callbacks.
            mark: the variable that the processes inherit, `NAME=value`.
            on_gone: called once, when no process is left, with all that there were.
            find: searches in a thread, since there may be thousands of processes.
        """
        self.pids: set[int] = set()
        self._loop = loop
        self._mark = mark
        self._on_gone: Callable[[Collection[int]], None] | None = on_gone
        self._find = find
        self.since = loop.time()
        self._pidfds: dict[int, int] = {}
        self._warning = loop.call_later(LATE, self._warn)
        self._timer: asyncio.TimerHandle | None = None
        self._start_search()

    def __repr__(self) -> str:
        return f"<LeaseProcessWatcher of {self._mark}: {len(self._pidfds)} processes>"

    @property
    def living(self) -> tuple[int, ...]:
        """The processes that have not ended, as far as is known."""
        return tuple(self._pidfds.values())

    def status(self, holder: int) -> UnendedStatus:
        """Return the processes that still use the lease of a holder."""
        from aiogpu.observe.status import UnendedStatus

        stats = [stat for stat in map(read_stat, self.living) if stat is not None]
        return UnendedStatus(
            holder,
            tuple(stat.pid for stat in stats),
            tuple(stat.state for stat in stats),
            self._loop.time() - self.since,
            is_lease=True,
        )

    def _warn(self) -> None:
        if self.living:
            _log.warning("! a returned lease is not free: %s", self.status(0))
        else:  # a search is under way
            self._warning = self._loop.call_later(LATE, self._warn)

    def close(self) -> None:
        """Stop waiting."""
        self._on_gone = None
        self._warning.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for pidfd in list(self._pidfds):
            self._forget(pidfd)

    def _start_search(self) -> None:
        self._timer = None
        Thread(target=self._search, name="aiogpu-remains", daemon=True).start()

    def _search(self) -> None:
        pids: Collection[int] | None = None
        with suppress(OSError):  # there are too many open files
            pids = self._find(self._mark)
        with suppress(RuntimeError):  # the loop may have been closed
            self._loop.call_soon_threadsafe(self._on_search_done, pids)

    def _on_search_done(self, pids: Collection[int] | None) -> None:
        if self._on_gone is None:
            return
        if pids is None:
            self._timer = self._loop.call_later(AGAIN, self._start_search)
            return
        self.pids.update(pids)
        unseen = [pid for pid in pids if not self._watch(pid)]
        if self._pidfds:
            return
        if unseen:
            self._timer = self._loop.call_later(AGAIN, self._start_search)
            return
        if pids:
            self._start_search()  # they have ended, but may have started others
            return
        on_gone, self._on_gone = self._on_gone, None
        self._warning.cancel()
        on_gone(self.pids)

    def _watch(self, pid: int) -> bool:
        """Watch for the end of a process; False if no pidfd is available."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        self._pidfds[pidfd] = pid
        self._loop.add_reader(pidfd, self._on_end, pidfd)
        return True

    def _on_end(self, pidfd: int) -> None:
        self._forget(pidfd)
        if not self._pidfds:
            self._start_search()

    def _forget(self, pidfd: int) -> None:
        self._pidfds.pop(pidfd, None)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)


def removed(placement: str, name: str, reason: str) -> PlacementRemovedError:
    """Return the error of a task or lease whose placement group was removed."""
    return PlacementRemovedError(
        f"{placement}, the placement of {name}, {reason}; {name} ends with it.",
        placement,
    )


def misfit(spec: TaskSpec, reason: str) -> InfeasibleError:
    """Return the error of a task that can never fit into its placement group."""
    return InfeasibleError(
        f"{spec.name} asks for {spec.shape.request}, and can never run there: "
        f"{reason}. Ask for less, or make a larger placement group."
    )


class LeaseReceiver(Receiver, Protocol):
    """Receives the grant or the failure of a lease.

    It is settled with a packed `Bind`, and perhaps again later with the error that
    ended the lease.
    """

    @property
    def pid(self) -> int:
        """Process id of the requesting program."""
        ...


@dataclass(slots=True, eq=False)
class HeldLease:
    """A granted lease.

    Attributes:
        pid: process id of the requesting program.
        name: the name of the lease.
        mark: the variable that processes with this lease inherit, `NAME=value`.
        lease: the share of the node's resources.
        remains: waits for these processes once the lease is being returned.
    """

    pid: int
    name: str
    mark: str
    lease: Lease
    remains: LeaseProcessWatcher | None = None


class Leases:
    """All leases and placement groups of one node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: ShardedDict[Call],
        assignment: Assignment,
        device_release: DeviceRelease | None,
        feed: Feed,
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._assignment = assignment
        self._device_release = device_release
        self._feed = feed
        self._held: dict[WorkerId, HeldLease] = {}
        self._placements: dict[TaskId, tuple[WorkerId, int]] = {}
        self._token = os.urandom(8).hex()

    def __repr__(self) -> str:
        return f"<Leases {len(self._held)} held>"

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the programs with leases or placements, by holder."""
        held = {int(holder): held.pid for holder, held in self._held.items()}
        return held | {int(holder): pid for holder, pid in self._placements.values()}

    @property
    def unended(self) -> dict[int, UnendedStatus]:
        """The processes that still use returned leases, by holder."""
        return {
            int(holder): held.remains.status(int(holder))
            for holder, held in self._held.items()
            if held.remains is not None and held.remains.living
        }

    def roots_of(self, key: Key) -> Mapping[int, int]:
        """Return the programs that lease a device: process id to holder id."""
        kind, index = key
        return {
            held.pid: int(holder)
            for holder, held in self._held.items()
            if index in held_of(held.lease, kind)
        }

    def grant(self, effect: effects.Granted) -> None:
        """Settle the receiver of a granted lease or placement group."""
        call = self._calls[effect.task]
        func, receiver = call.func, cast("LeaseReceiver", call.receiver)
        if func.spec.is_grouped:
            self._placements[effect.task] = effect.holder, receiver.pid
            receiver.settle(b"")
            return
        mark = f"{self._token}.{effect.task}"
        bind = self._assignment.bind(effect.lease, {})
        self._held[effect.holder] = HeldLease(
            receiver.pid, func.spec.name, f"{LEASE_MARK}={mark}", effect.lease
        )
        if self._device_release is not None:
            self._device_release.begin(effect.holder, effect.lease)
        environ = {**bind.environ, LEASE_MARK: mark}
        receiver.settle(pack(bind._replace(environ=environ)))

    def forget(self, task: TaskId) -> None:
        """Forget a placement group that has ended."""
        self._placements.pop(task, None)

    def reclaim(self, effect: effects.Reclaim) -> None:
        """Return a lease to the core once all processes that use it have ended."""
        lease, holder = self._held.get(effect.holder), effect.holder
        if lease is None:
            # The lease was never granted to the program.
            self._feed(Scheduler.lease_returned, holder)
            return
        lease.remains = LeaseProcessWatcher(
            self._loop, lease.mark, lambda pids: self._give_back(holder, pids)
        )

    def _give_back(self, holder: WorkerId, pids: Collection[int]) -> None:
        held = self._held.pop(holder)
        release = self._device_release
        settles = release is not None and release.end(
            holder, held.lease, (held.pid, *pids)
        )
        self._feed(Scheduler.lease_returned, holder, settles)

    def close(self) -> None:
        """Stop watching: the node closes. Processes with its leases go on."""
        for held in self._held.values():
            if held.remains is not None:
                held.remains.close()
        self._held.clear()
