"""When the devices of an ended worker are free, and who may still hold them.

All processes of the worker have ended by then, but its driver takes their memory back
after that. So the device is looked at, soon and then more slowly, until one pure rule
(`verdict`) says that it may be given to the next task; past a limit it is set aside
until it recovers. The core is told of each worker once.
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
"""Bytes above the memory in use before that are not counted as a worker's: drivers
leave some behind for the next context."""


class State(Enum):
    """What may be done with the share."""

    FREE = auto()
    UNVERIFIED = auto()
    HELD = auto()
    LOST = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A state, and for a device that is not free the reason, for people."""

    state: State
    reason: str = ""


FREE: Final = Verdict(State.FREE)


UNVERIFIED: Final = Verdict(State.UNVERIFIED)


def verdict(
    before: Sample, now: Sample, pids: Collection[int], *, is_whole: bool
) -> Verdict:
    """Decide whether a device may be given to the next task.

    All processes of the worker have ended: `waitpid` has said so. But the driver
    takes their memory back after that, and lists them until it has. So:

    1. A lost device is LOST; nobody is to get it.
    2. A driver that fails to answer leaves it UNVERIFIED.
    3. A whole device whose memory in use is what it was, give or take `TOLERANCE`,
       is FREE, whatever is listed.
    4. What may be left of the worker is each listed id that is one of `pids`, or
       that neither lives nor was listed before: its descendants have ended and are
       not known by name. A live process is somebody else's.
    5. If nothing is left, it is FREE, provided that the list can be believed: the
       ids are those that we see, or it does list somebody. Elsewhere (a container)
       an empty list may be a blind one: then a whole device is HELD by the memory
       that is not back, a fraction is UNVERIFIED.
    6. If something is left, a whole device is HELD, and so is a fraction by a known
       id. By another id it is only where ids can be read: elsewhere it is as likely
       a neighbour's, and the fraction is UNVERIFIED.
    7. A device whose processes cannot be listed is judged by memory if it is whole,
       and is UNVERIFIED otherwise.

    Args:
        before: the device when the worker got it, or when it was idle last.
        now: the device now.
        pids: ids of the worker's processes, as far as they are known.
        is_whole: the worker had all of the device.
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
    """Rules 4 to 6; None where the list may be a blind one."""
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
    """Return how many bytes are in use beyond those before; None where unknown."""
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
"""Seconds between the first looks; then the last one again."""


ASIDE: Final = 1.0
"""Seconds between looks at a device that is set aside."""


LATE: Final = 0.05
"""Seconds after which a worker may have taken memory: a look is too late to be the
one "before"."""


@dataclass(slots=True, eq=False)
class Claim:
    """What an ended worker may still hold.

    Attributes:
        left: its devices that are not free of it.
        clean: those that are, of which the core was not told yet.
        whole: those of its devices that it had all of.
        pids: its processes, as far as they are known.
        before: the look at `whole` when the worker got them; empty for none.
        deadline: until when it is waited for.
        looks: how often it was looked.
        is_verified: whether the driver has agreed each time.
        is_stuck: time is up; its devices are set aside.
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
    """The devices of one node that can be asked about, and who may still hold them.

    Attributes:
        idle: what was on each device when nobody of ours had it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: DeviceThread,
        feed: Feed,
        on_reserved: Callable[[Lease], None],
        limit: float | None = None,
    ) -> None:
        """Prepare; the thread is started by who has made it.

        Args:
            loop: calls what is told.
            thread: asks the drivers.
            feed: tells the core.
            on_reserved: told of a lease that a worker gets, if it reserves device
                memory.
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
        # The thread may live for a while yet after it has failed.
        self._has_failed = False

    def begin(self, worker: WorkerId, lease: Lease) -> None:
        """A worker is told its devices: see what is on those that it has all of."""
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
        """A worker and all that it started have ended: ask for its devices.

        Args:
            worker: its id.
            lease: what it had.
            pids: its processes, as far as they are known.

        Returns:
            Whether anybody is asked. If so, the core is told of the worker, once, that
            its devices are free or set aside; if not, they are free as far as anybody
            knows.
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
        """A worker has ended that holds nothing any more, and is not asked about."""
        self._before.pop(worker, None)

    def _shares(self, lease: Lease) -> Mapping[Key, int]:
        """The parts of a lease that somebody can be asked about."""
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
        """Say what is free of a worker; look again at what is not."""
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
        # A lost device will not come back by itself.
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
        """Return what was on a device before the worker; never the worker itself."""
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
        """Believe a driver's ids once it has written one of our workers'."""
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
        """Devices are free of a worker, perhaps the last that held them."""
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
        """A driver hangs: set aside what it was asked about."""
        for claim in list(self._claims.values()):
            keys = [key for key in claim.left if key[0] == kind]
            if keys and not claim.is_stuck:
                names = ", ".join(map(self._thread.name_of, keys))
                told = f"{names}: the driver has not answered for {seconds:g} s"
                self._set_aside(claim, told)

    def give_up(self) -> None:
        """The thread has failed, not a device: give back what it was asked about."""
        self._has_failed = True
        self._stop_timers()
        for claim in list(self._claims.values()):
            claim.clean, claim.left = claim.clean + claim.left, ()
            claim.is_verified = False
            self._release(claim)
        self._before.clear()

    def close(self) -> None:
        """Wait for nobody; nothing is told any more."""
        self._feed = None
        self._stop_timers()
        self._claims.clear()

    def _stop_timers(self) -> None:
        for claim in self._claims.values():
            if claim.timer is not None:
                claim.timer.cancel()
