"""Decides when the devices of an ended worker are free.

When a worker's processes have all ended, its driver may still hold their memory for a
moment. So the device is looked at, first at short and then at longer intervals, until
one pure rule (`verdict`) says that the next task may have it. After a time limit the
device is set aside until it recovers. The core is told once per worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Final

from aiogpu.accelerators.base import Sample
from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import Cause
from aiogpu.core.resources.ledger import Lease
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.runtime.devices.binding import held_of
from aiogpu.runtime.devices.probe_thread import DeviceThread, Key, Look

_log: Final = logging.getLogger(__name__)


TOLERANCE: Final = 100 << 20
"""Bytes above the earlier memory use that are not attributed to a worker: drivers leave
some memory behind for the next context."""


class State(Enum):
    """The states of a share that is being released."""

    FREE = auto()
    UNVERIFIED = auto()
    HELD = auto()
    LOST = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A state; for a device that is not free, also the reason for people."""

    state: State
    reason: str = ""


FREE: Final = Verdict(State.FREE)


UNVERIFIED: Final = Verdict(State.UNVERIFIED)


def verdict(
    before: Sample, now: Sample, pids: Collection[int], *, is_whole: bool
) -> Verdict:
    """Decide whether a device may be given to the next task.

    All processes of the worker have ended: `waitpid` has said so. The driver frees
    their memory later, and lists them until it has. The rules:

    1. A lost device is LOST; no task gets it.
    2. If the driver fails to answer, the device is UNVERIFIED.
    3. A whole device whose memory use is as before, up to `TOLERANCE`, is FREE, no
       matter which processes are listed.
    4. A listed process may be the worker's if its id is in `pids`, or if it neither
       lives nor was listed before: the worker's descendants have ended, and their ids
       are not known. A live process belongs to somebody else.
    5. If no listed process may be the worker's, the device is FREE, provided the list
       can be believed: its ids are those seen here, or it lists any process. In a
       container an empty list may be a blind one: then a whole device is HELD by the
       memory that is not back, and a fraction is UNVERIFIED.
    6. If a listed process may be the worker's, a whole device is HELD. So is a fraction
       if the id is in `pids`. With another id, a fraction is HELD only if ids can be
       believed; otherwise the process may just as well be a neighbour's, and the
       fraction is UNVERIFIED.
    7. A device whose processes cannot be listed is judged by its memory if it is whole,
       and is UNVERIFIED otherwise.

    Args:
        before: the device when the worker got it, or when it was last idle.
        now: the device now.
        pids: ids of the worker's processes, as far as they are known.
        is_whole: the worker had the whole device.
    """
    if now.is_lost:
        return Verdict(State.LOST, f"the driver calls it lost ({now.problem})")
    if now.problem is not None:
        return UNVERIFIED
    extra = _more(before, now) if is_whole else None
    if extra is not None and extra <= TOLERANCE:
        return FREE
    if now.processes is None:
        return _by_memory(extra)
    return _by_list(before, now, pids, is_whole) or _by_memory(extra)


def _by_list(
    before: Sample, now: Sample, pids: Collection[int], is_whole: bool
) -> Verdict | None:
    """Apply the rules 4 to 6; return None if the list may be a blind one."""
    processes, listed_before = now.processes or {}, before.processes or {}
    known = [pid for pid in processes if pid in pids]
    unknown = [
        pid for pid in processes if pid not in now.living and pid not in listed_before
    ]
    if known:
        return Verdict(State.HELD, _listing(processes, known))
    if unknown:
        if is_whole or now.reads_pids:
            return Verdict(State.HELD, _listing(processes, unknown))
        return UNVERIFIED
    is_blind = not (now.reads_pids or processes or listed_before)
    return None if is_blind else FREE


def _more(before: Sample, now: Sample) -> int | None:
    """Return how many more bytes are in use than before; None if unknown."""
    if before.used is None or now.used is None:
        return None
    return now.used - before.used


def _by_memory(extra: int | None) -> Verdict:
    if extra is None:
        return UNVERIFIED
    return Verdict(State.HELD, f"{_mib(extra)} more are in use than before the task")


def _listing(processes: Mapping[int, int | None], left: list[int]) -> str:
    told = ", ".join(_process(pid, processes[pid]) for pid in left[:3])
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f"of what has ended, the driver still lists {told}{more}"


def _process(pid: int, size: int | None) -> str:
    return f"pid {pid}" + (f" with {_mib(size)}" if size is not None else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB ({size} bytes)"


LIMIT: Final = 10.0
"""Seconds after a worker's end until its devices are set aside."""


PAUSES: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Seconds between the first looks; the last pause is repeated."""


ASIDE: Final = 1.0
"""Seconds between looks at a device that is set aside."""


LATE: Final = 0.05
"""Seconds in which a worker may already have allocated memory: a look that takes place
later does not show the device before the worker."""


@dataclass(slots=True, eq=False)
class Claim:
    """The devices that an ended worker may still hold.

    Attributes:
        left: its devices that may not be free yet.
        whole: the devices of which it had all.
        pids: its processes, as far as they are known.
        before: the look at `whole` when the worker got them; empty for none.
        deadline: until when the devices are waited for.
        clean: its devices that are free, of which the core was not told yet.
        looks: the number of looks so far.
        is_verified: whether the driver has confirmed each free device.
        is_stuck: the deadline has passed; its devices are set aside.
        timer: calls for the next look.
    """

    worker: WorkerId
    left: tuple[Key, ...]
    whole: frozenset[Key]
    pids: Collection[int]
    before: Mapping[Key, Sample]
    deadline: float
    clean: tuple[Key, ...] = ()
    looks: int = 0
    is_verified: bool = True
    is_stuck: bool = False
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class DeviceRelease:
    """Finds out when the devices of ended workers are free, for one node.

    Attributes:
        idle: what was on each device when no worker of this node had it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: DeviceThread,
        feed: Feed,
        on_reserved: Callable[[Lease], None],
        limit: float | None = None,
    ) -> None:
        """Prepare; the caller starts the thread.

        Args:
            loop: runs the timers.
            thread: asks the drivers.
            feed: tells the core.
            on_reserved: is told of each lease that reserves device memory.
            limit: seconds to wait for a device before it is set aside; `LIMIT` if
                None.
        """
        self.idle: dict[Key, Sample] = {}
        self._loop = loop
        self._thread = thread
        self._feed: Feed | None = feed
        self._on_reserved = on_reserved
        self._limit = LIMIT if limit is None else limit
        self._before: dict[WorkerId, dict[Key, Sample]] = {}
        self._claims: dict[WorkerId, Claim] = {}
        self._reads_pids: set[str] = set()
        # The thread may live on for a moment after it has failed.
        self._has_failed = False

    def begin(self, worker: WorkerId, lease: Lease) -> None:
        """Look at the whole devices that a worker gets, before it uses them."""
        shares = self._shares(lease)
        if shares and lease.request.gpu_memory:
            self._on_reserved(lease)
        whole = [key for key, amount in shares.items() if amount == UNIT]
        if whole:
            before = self._before[worker] = {}
            then = partial(self._note_before, before, time.monotonic())
            self._thread.look(whole, then)

    def _note_before(self, before: dict[Key, Sample], asked: float, look: Look) -> None:
        if look.when - look.cost - asked <= LATE:
            before.update(look.samples)

    def end(self, worker: WorkerId, lease: Lease, pids: Collection[int]) -> bool:
        """Begin to wait for the devices of a worker that has ended with all below it.

        Args:
            worker: its id.
            lease: what it had.
            pids: its processes, as far as they are known.

        Returns:
            Whether a driver is asked. If so, the core is told once that the worker's
            devices are free or set aside. If not, they are free as far as is known.
        """
        shares = self._shares(lease)
        if not shares:
            return False
        before = self._before.pop(worker, {})
        whole = frozenset(key for key, amount in shares.items() if amount == UNIT)
        deadline = self._loop.time() + self._limit
        claim = Claim(worker, tuple(shares), whole, pids, before, deadline)
        self._claims[worker] = claim
        self._look(claim)
        return True

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has ended without holding any device."""
        self._before.pop(worker, None)

    def _shares(self, lease: Lease) -> Mapping[Key, int]:
        """Return those parts of a lease that a driver can be asked about."""
        if not lease.shares or self._has_failed or not self._thread.is_alive:
            return {}
        return {
            (kind, index): amount
            for kind, _ in lease.request.devices
            for index, amount in held_of(lease, kind).items()
            if (kind, index) in self._thread.devices
        }

    def _look(self, claim: Claim) -> None:
        self._thread.look(claim.left, partial(self._on_look, claim))

    def _on_look(self, claim: Claim, look: Look) -> None:
        """Release the devices that a worker has left; sample the others again."""
        if self._feed is None:
            return
        held: dict[Key, str] = {}
        is_lost = False
        for key in claim.left:
            now = self._as_read(key, look.samples[key], claim.pids)
            is_whole, before = key in claim.whole, self._sample_before(claim, key)
            found = verdict(before, now, claim.pids, is_whole=is_whole)
            is_unknown = claim.is_stuck and now.problem is not None
            if found.state in (State.FREE, State.UNVERIFIED) and not is_unknown:
                claim.is_verified &= found.state is State.FREE
                if is_whole and found.state is State.FREE:
                    self.idle[key] = now
            else:
                held[key] = f"{self._thread.name_of(key)}: {found.reason}"
                is_lost = is_lost or found.state is State.LOST
        # A lost device does not come back by itself.
        is_late = is_lost or self._loop.time() >= claim.deadline
        if held and is_late and not claim.is_stuck:
            self._set_aside(claim, "; ".join(held.values()))
        claim.clean += tuple(key for key in claim.left if key not in held)
        claim.left = tuple(held)
        if claim.is_stuck or not held:
            self._release(claim)
        if held:
            pause = PAUSES[min(claim.looks, len(PAUSES) - 1)]
            claim.looks += 1
            left = max(0.0, claim.deadline - self._loop.time())
            pause = ASIDE if claim.is_stuck else min(pause, left)
            claim.timer = self._loop.call_later(pause, self._look, claim)

    def _sample_before(self, claim: Claim, key: Key) -> Sample:
        """Return what was on a device before the worker, never the worker itself."""
        idle = self.idle.get(key, Sample())
        begun = claim.before.get(key)
        if begun is None or begun.problem is not None:
            return idle
        processes = begun.processes or {}
        if any(pid in processes for pid in claim.pids):
            others = {
                pid: size for pid, size in processes.items() if pid not in claim.pids
            }
            return replace(begun, processes=others, used=idle.used)
        return begun

    def _as_read(self, key: Key, sample: Sample, pids: Collection[int]) -> Sample:
        """Believe a driver's process ids once it has listed a worker of ours."""
        kind = key[0]
        if sample.processes and any(pid in sample.processes for pid in pids):
            self._reads_pids.add(kind)
        if kind in self._reads_pids and not sample.reads_pids:
            return replace(sample, reads_pids=True)
        return sample

    def _set_aside(self, claim: Claim, reason: str) -> None:
        claim.is_stuck = True
        _log.warning("! set aside until it recovers: %s", reason)
        if self._feed is not None:
            self._feed(Scheduler.devices_stuck, claim.worker, reason)

    def _release(self, claim: Claim) -> None:
        """Tell the core which devices are free of a worker, if it was the last one."""
        keys, claim.clean = claim.clean, ()
        if not claim.left:
            del self._claims[claim.worker]
        if self._feed is None:
            return
        if not claim.is_stuck:
            self._feed(Scheduler.devices_free, claim.worker, claim.is_verified)
            return
        stuck = [each for each in self._claims.values() if each.is_stuck]
        for key in keys:
            if not any(key in each.left for each in stuck):
                _log.warning("! %s has recovered", self._thread.name_of(key))
                self._feed(Scheduler.device_changed, *key, Cause.UNSETTLED, None)

    def on_mute(self, kind: str, seconds: float) -> None:
        """Set aside all devices of a driver that hangs."""
        for claim in list(self._claims.values()):
            keys = [key for key in claim.left if key[0] == kind]
            if keys and not claim.is_stuck:
                names = ", ".join(map(self._thread.name_of, keys))
                told = f"{names}: the driver has not answered for {seconds:g} s"
                self._set_aside(claim, told)

    def give_up(self) -> None:
        """Release all devices: the thread has failed, not a device."""
        self._has_failed = True
        self._stop_timers()
        for claim in list(self._claims.values()):
            claim.clean, claim.left = claim.clean + claim.left, ()
            claim.is_verified = False
            self._release(claim)
        self._before.clear()

    def close(self) -> None:
        """Stop waiting, and report nothing more to the core."""
        self._feed = None
        self._stop_timers()
        self._claims.clear()

    def _stop_timers(self) -> None:
        for claim in self._claims.values():
            if claim.timer is not None:
                claim.timer.cancel()
