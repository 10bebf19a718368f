"""Decides when the devices of an ended worker are free.

After the end of a worker's processes, the driver may hold their memory for a moment.
So the device is sampled, first at short and then at longer intervals, until one pure
rule (`verdict`) says that it is free for the next task. After a time limit the device
is set aside until it recovers. The core is notified once per worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Final, NamedTuple

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
"""Bytes above the earlier memory use that are not attributed to a worker: drivers keep
some memory for the next context."""


class ReleaseState(Enum):
    """The states of a share that is being released."""

    FREE = auto()
    UNVERIFIED = auto()
    HELD = auto()
    LOST = auto()


class ReleaseVerdict(NamedTuple):
    """A state; if the device is not free, also the reason in words."""

    state: ReleaseState
    reason: str = ""


FREE: Final = ReleaseVerdict(ReleaseState.FREE)


UNVERIFIED: Final = ReleaseVerdict(ReleaseState.UNVERIFIED)


def verdict(
    before: Sample, now: Sample, pids: Collection[int], *, is_whole: bool
) -> ReleaseVerdict:
    """Decide whether a device may be given to the next task.

    All processes of the worker have ended (`waitpid`). The driver frees their memory
    later, and lists them until then. The rules:

    1. A lost device is LOST; no task gets it.
    2. If the driver fails to answer, the device is UNVERIFIED.
    3. A whole device with the same memory use as before, up to `TOLERANCE`, is FREE,
       even if processes are listed.
    4. A listed process may be the worker's if its id is in `pids`, or if the process
       neither lives nor was listed before: the worker's descendants have ended, and
       their ids are not known. A live process is not the worker's.
    5. If no listed process may be the worker's, the device is FREE, provided the list
       can be trusted: its ids are those seen here, or it lists any process. In a
       container the driver may list nothing: then a whole device is HELD while memory
       is missing, and a fraction is UNVERIFIED.
    6. If a listed process may be the worker's, a whole device is HELD. So is a fraction
       if the id is in `pids`. With another id, a fraction is HELD only if ids can be
       trusted; otherwise the process may be a neighbour's, and the fraction is
       UNVERIFIED.
    7. A device whose processes cannot be listed is judged by its memory if it is whole,
       and is UNVERIFIED otherwise.

    Args:
        before: the sample when the worker got the device, or when it was last idle.
        now: the sample now.
        pids: the known process ids of the worker.
        is_whole: the worker had the whole device.
    """
    if now.is_lost:
        return ReleaseVerdict(
            ReleaseState.LOST, f"the driver calls it lost ({now.problem})"
        )
    if now.problem is not None:
        return UNVERIFIED
    extra = _extra_memory(before, now) if is_whole else None
    if extra is not None and extra <= TOLERANCE:
        return FREE
    if now.processes is None:
        return _by_memory(extra)
    return _by_list(before, now, pids, is_whole) or _by_memory(extra)


def _by_list(
    before: Sample, now: Sample, pids: Collection[int], is_whole: bool
) -> ReleaseVerdict | None:
    """Apply the rules 4 to 6; return None if the empty list cannot be trusted."""
    processes, listed_before = now.processes or {}, before.processes or {}
    known = [pid for pid in processes if pid in pids]
    unknown = [
        pid for pid in processes if pid not in now.living and pid not in listed_before
    ]
    if known:
        return ReleaseVerdict(ReleaseState.HELD, _listing(processes, known))
    if unknown:
        if is_whole or now.reads_pids:
            return ReleaseVerdict(ReleaseState.HELD, _listing(processes, unknown))
        return UNVERIFIED
    is_blind = not (now.reads_pids or processes or listed_before)
    return None if is_blind else FREE


def _extra_memory(before: Sample, now: Sample) -> int | None:
    """Return how many more bytes are in use than before; None if unknown."""
    if before.used is None or now.used is None:
        return None
    return now.used - before.used


def _by_memory(extra: int | None) -> ReleaseVerdict:
    if extra is None:
        return UNVERIFIED
    return ReleaseVerdict(
        ReleaseState.HELD, f"{_mib(extra)} more are in use than before the task"
    )


def _listing(processes: Mapping[int, int | None], pids: list[int]) -> str:
    names = ", ".join(_process(pid, processes[pid]) for pid in pids[:3])
    more = f" and {len(pids) - 3} more" if len(pids) > 3 else ""
    return f"the driver still lists ended processes: {names}{more}"


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
"""A worker may have allocated memory after this many seconds, so a later look does not
show the device before the worker."""


@dataclass(slots=True, eq=False)
class Claim:
    """The devices that an ended worker may still occupy.

    Attributes:
        occupied: the devices that may not be free yet.
        whole: the devices that the worker had completely.
        pids: the known process ids of the worker.
        before: the samples of `whole` when the worker got them; empty if unknown.
        deadline: loop time at which the devices are set aside.
        clean: the free devices that the core was not notified of yet.
        looks: the number of looks so far.
        is_verified: the driver has confirmed each free device.
        is_stuck: the deadline has passed; the devices are set aside.
        timer: the timer of the next look.
    """

    worker: WorkerId
    occupied: tuple[Key, ...]
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
        idle: the last sample of each device without a worker of this node, where one
            was taken.
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
            feed: passes events to the core.
            on_reserved: called with each lease that reserves device memory.
            limit: seconds until a device is set aside; `LIMIT` if None.
        """
        self.idle: dict[Key, Sample] = {}
        self._loop = loop
        self._thread = thread
        self._feed: Feed | None = feed
        self._on_reserved = on_reserved
        self._limit = LIMIT if limit is None else limit
        self._before: dict[WorkerId, dict[Key, Sample]] = {}
        # None after the first round.
        self._was_leased: set[Key] | None = set()
        self._claims: dict[WorkerId, Claim] = {}
        self._reads_pids: set[str] = set()
        # The thread may be alive for a moment after a failure.
        self._has_failed = False

    def begin(self, worker: WorkerId, lease: Lease) -> None:
        """Sample the whole devices that a worker gets, before it uses them."""
        shares = self._shares(lease)
        if self._was_leased is not None:
            self._was_leased.update(shares)
        if shares and lease.request.gpu_memory:
            self._on_reserved(lease)
        whole = [key for key, amount in shares.items() if amount == UNIT]
        if whole:
            before = self._before[worker] = {}
            then = partial(self._note_before, before, time.monotonic())
            self._thread.look(whole, then)

    def note_first(self, samples: Mapping[Key, Sample]) -> None:
        """Note the samples of the first round, of devices that no worker had by then.

        On a busy machine, or with a slow driver, the round ends after a worker has got
        a device, and shows what the worker uses.
        """
        leased, self._was_leased = self._was_leased or (), None
        self.idle = {
            key: sample for key, sample in samples.items() if key not in leased
        }

    def _note_before(self, before: dict[Key, Sample], asked: float, look: Look) -> None:
        if look.when - look.cost - asked <= LATE:
            before.update(look.samples)

    def end(self, worker: WorkerId, lease: Lease, pids: Collection[int]) -> bool:
        """Start to wait for the devices of an ended worker.

        Args:
            worker: the id of the worker.
            lease: the lease of the worker.
            pids: the known process ids of the worker; all its processes have ended.

        Returns:
            True if a driver is asked; then the core is notified once that the worker's
            devices are free or set aside. False if they are free as far as is known.
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
        """Return the devices of a lease that a driver can be asked about."""
        if not lease.shares or self._has_failed or not self._thread.is_alive:
            return {}
        return {
            (kind, index): amount
            for kind, _ in lease.request.devices
            for index, amount in held_of(lease, kind).items()
            if (kind, index) in self._thread.devices
        }

    def _look(self, claim: Claim) -> None:
        self._thread.look(claim.occupied, partial(self._on_look, claim))

    def _on_look(self, claim: Claim, look: Look) -> None:
        """Release the free devices of a worker; sample the other devices again."""
        if self._feed is None:
            return
        reasons: dict[Key, str] = {}
        is_lost = False
        for key in claim.occupied:
            now = self._trust_pids(key, look.samples[key], claim.pids)
            is_whole, before = key in claim.whole, self._sample_before(claim, key)
            state, reason = verdict(before, now, claim.pids, is_whole=is_whole)
            is_unknown = claim.is_stuck and now.problem is not None
            if state in (ReleaseState.FREE, ReleaseState.UNVERIFIED) and not is_unknown:
                claim.is_verified &= state is ReleaseState.FREE
                if is_whole and state is ReleaseState.FREE:
                    self.idle[key] = now
            else:
                reasons[key] = f"{self._thread.name_of(key)}: {reason}"
                is_lost = is_lost or state is ReleaseState.LOST
        # A lost device does not come back by itself.
        is_late = is_lost or self._loop.time() >= claim.deadline
        if reasons and is_late and not claim.is_stuck:
            self._set_aside(claim, "; ".join(reasons.values()))
        claim.clean += tuple(key for key in claim.occupied if key not in reasons)
        claim.occupied = tuple(reasons)
        if claim.is_stuck or not reasons:
            self._release(claim)
        if reasons:
            pause = PAUSES[min(claim.looks, len(PAUSES) - 1)]
            claim.looks += 1
            remaining = max(0.0, claim.deadline - self._loop.time())
            pause = ASIDE if claim.is_stuck else min(pause, remaining)
            claim.timer = self._loop.call_later(pause, self._look, claim)

    def _sample_before(self, claim: Claim, key: Key) -> Sample:
        """Return the sample of a device before the worker, without the worker."""
        idle = self.idle.get(key, Sample())
        before = claim.before.get(key)
        if before is None or before.problem is not None:
            return idle
        processes = before.processes or {}
        if any(pid in processes for pid in claim.pids):
            others = {
                pid: size for pid, size in processes.items() if pid not in claim.pids
            }
            return replace(before, processes=others, used=idle.used)
        return before

    def _trust_pids(self, key: Key, sample: Sample, pids: Collection[int]) -> Sample:
        """Trust a driver's process ids once it has listed a worker of this node."""
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
        """Tell the core which devices of an ended worker are free."""
        keys, claim.clean = claim.clean, ()
        if not claim.occupied:
            del self._claims[claim.worker]
        if self._feed is None:
            return
        if not claim.is_stuck:
            self._feed(Scheduler.devices_free, claim.worker, claim.is_verified)
            return
        stuck = [each for each in self._claims.values() if each.is_stuck]
        for key in keys:
            if not any(key in each.occupied for each in stuck):
                _log.warning("! %s has recovered", self._thread.name_of(key))
                self._feed(Scheduler.device_changed, *key, Cause.UNSETTLED, None)

    def on_mute(self, kind: str, seconds: float) -> None:
        """Set aside all devices of a driver that hangs."""
        for claim in list(self._claims.values()):
            keys = [key for key in claim.occupied if key[0] == kind]
            if keys and not claim.is_stuck:
                names = ", ".join(map(self._thread.name_of, keys))
                reason = f"{names}: the driver has not answered for {seconds:g} s"
                self._set_aside(claim, reason)

    def give_up(self) -> None:
        """Release all devices: the thread has failed, not a device."""
        self._has_failed = True
        self._stop_timers()
        for claim in list(self._claims.values()):
            claim.clean, claim.occupied = claim.clean + claim.occupied, ()
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
