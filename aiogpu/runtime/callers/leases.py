"""The leases and placement groups of one node, and their holders.

A lease is asked for as a task is submitted, and given up by cancelling that. It ends
when all processes have ended that were started with its variables: a killed holder
leaves orphans, and a careless one leaves them too. They are no children of this
process, and who has started them may have been killed, so they are looked up in /proc
by what the lease's environment has marked them with; their ends are seen on pidfds, and
then it is looked again, until there is none (`LeaseProcessWatcher`).
"""

from __future__ import annotations

import asyncio
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
from aiogpu.runtime.devices.binding import held_of
from aiogpu.runtime.pending_tasks import Call
from aiogpu.wire.codec import pack
from aiogpu.wire.messages import LEASE_MARK

if TYPE_CHECKING:
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.devices.probe_thread import Key
    from aiogpu.runtime.devices.release import DeviceRelease


AGAIN: Final = 1.0
"""Seconds until it is looked again where it cannot be, or no pidfd can be had."""


AMID_EXEC: Final = 0.05
"""Seconds for which a process without variables is looked at again: when it begins a
program, the kernel shows none for a millisecond or more."""


def find_marked(mark: str, proc: StrPath = PROC) -> tuple[int, ...]:
    """The live processes of this user with that `NAME=value` among their variables.

    A variable of which the mark is one of several values, parted by commas, counts.
    Processes that have thrown their variables away are not found. Blocks for up to
    `AMID_EXEC` where there are any.
    """
    name, _, value = mark.partition("=")
    begin = name.encode() + b"="
    found, user = [], os.getuid()
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
                marks = [it[len(begin) :] for it in variables if it.startswith(begin)]
                if any(value.encode() in each.split(b",") for each in marks):
                    found.append(int(os.path.basename(path)))
        if time.monotonic() > ends:
            break
        unread = empty
        if unread:
            time.sleep(1e-3)
    return tuple(found)


class LeaseProcessWatcher:
    """Watches the processes that still use an ended lease.

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
        return f"<LeaseProcessWatcher of {self._mark}: {len(self._pidfds)} processes>"

    def close(self) -> None:
        """Stop waiting."""
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


def removed(placement: str, name: str, reason: str) -> PlacementRemovedError:
    """The error of what was to run in a placement, or did."""
    return PlacementRemovedError(
        f"{placement}, the placement of {name}, {reason}; {name} ends with it.",
        placement,
    )


def misfit(spec: TaskSpec, reason: str) -> InfeasibleError:
    """The error of what can never run in the bundles of its placement."""
    return InfeasibleError(
        f"{spec.name} asks for {spec.shape.request}, and can never run there: "
        f"{reason}. Ask for less, or for a placement that has it."
    )


class LeaseReceiver(Receiver, Protocol):
    """Receives the grant or the failure of a lease.

    It is settled with a `Bind`, packed; later it may be settled once more, with the
    reason why the lease is gone.
    """

    @property
    def pid(self) -> int:
        """Process id of the program that asks."""
        ...


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that is held.

    Attributes:
        pid: process id of the program that has asked for it.
        name: of the lease.
        mark: what the processes have inherited that it is for.
        remains: what is left of these, once it is to be given back.
    """

    pid: int
    name: str
    mark: str
    lease: Lease
    remains: LeaseProcessWatcher | None = None


class Leases:
    """All leases that others hold."""

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
        """Process ids of the programs that have asked for leases, by holder.

        Those of placements as well.
        """
        for task in list(self._placements):
            if task not in self._calls:
                del self._placements[task]
        held = {int(holder): held.pid for holder, held in self._held.items()}
        return held | {int(holder): pid for holder, pid in self._placements.values()}

    def roots_of(self, key: Key) -> Mapping[int, int]:
        """The programs that have a lease of a device, each with the holder's id."""
        kind, index = key
        return {
            held.pid: int(holder)
            for holder, held in self._held.items()
            if index in held_of(held.lease, kind)
        }

    def grant(self, effect: effects.Granted) -> None:
        """Tell who has asked for a lease or a placement group that it is there."""
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

    def reclaim(self, effect: effects.Reclaim) -> None:
        """Give a lease back once all processes that it was for have ended."""
        held, holder = self._held.get(effect.holder), effect.holder
        if held is None:
            # It was never told that it has it.
            self._feed(Scheduler.lease_returned, holder)
            return
        held.remains = LeaseProcessWatcher(
            self._loop, held.mark, lambda pids: self._give_back(holder, pids)
        )

    def _give_back(self, holder: WorkerId, pids: Collection[int]) -> None:
        held = self._held.pop(holder)
        release = self._device_release
        settles = release is not None and release.end(
            holder, held.lease, (held.pid, *pids)
        )
        self._feed(Scheduler.lease_returned, holder, settles)

    def close(self) -> None:
        """Close with the node; processes that use its leases go on."""
        for held in self._held.values():
            if held.remains is not None:
                held.remains.close()
        self._held.clear()
