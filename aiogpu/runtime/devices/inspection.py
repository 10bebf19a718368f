"""Whether a device is free of a worker that has ended: when to look, what it means.

`verdict` is one pure rule. `Inspection` decides how often to look, until when to wait,
and which look is the one "before". It blocks while a driver answers, so it runs in a
thread of its own; it has no clock, and knows neither leases nor events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from aiogpu.accelerators.base import Sample
from aiogpu.runtime.devices.probe import DeviceProbe, Key

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


PAUSES: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Seconds between the first looks; then the last one again."""


ASIDE: Final = 1.0
"""Seconds between looks at a device that is set aside."""


LATE: Final = 0.05
"""Seconds after which a worker may have taken memory: a look is too late to be the
one "before"."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """These devices are free of a worker, as far as can be told."""

    worker: int
    keys: tuple[Key, ...]
    is_verified: bool


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker's devices did not become free in time; why, for people."""

    worker: int
    reason: str


Report = Cleared | Stuck


@dataclass(slots=True, eq=False)
class Claim:
    """What an ended worker may still hold.

    Attributes:
        left: its devices that are not free of it, each with the look "before".
        whole: those of its devices that it had all of.
        deadline: until when it is waited for.
        due: when to look next.
        looks: how often that was done.
        clean: devices that are free of it, and not yet reported.
        is_verified: whether the driver has agreed each time.
        is_stuck: time is up; its devices are set aside.
    """

    worker: int
    left: dict[Key, Sample]
    whole: frozenset[Key]
    pids: Collection[int]
    deadline: float
    due: float
    looks: int = 0
    clean: list[Key] = field(default_factory=list)
    is_verified: bool = True
    is_stuck: bool = False


class Inspection:
    """All looks at one node's devices."""

    def __init__(self, probe: DeviceProbe, limit: float) -> None:
        """Prepare to look.

        Args:
            probe: what to look with, at the devices that can be asked about.
            limit: seconds after a worker's end until its devices are set aside.
        """
        self._probe = probe
        self._limit = limit
        self._idle: dict[Key, Sample] = {}
        self._before: dict[int, dict[Key, Sample]] = {}
        self._claims: dict[int, Claim] = {}
        self._reads_pids: set[str] = set()

    def __repr__(self) -> str:
        count = len(self._probe.devices)
        return f"<Inspection {count} devices, {len(self._claims)} claims>"

    @property
    def due(self) -> float | None:
        """When `turn` is to be called next; None while nothing is waited for."""
        return min((claim.due for claim in self._claims.values()), default=None)

    def open(self, idle: Mapping[Key, Sample]) -> None:
        """Take in what is on the devices before any task."""
        self._idle = dict(idle)

    def begin(self, worker: int, keys: Sequence[Key], delay: float) -> None:
        """A worker gets these devices, all of each; see what is on them now.

        Args:
            worker: its id.
            keys: those devices.
            delay: seconds since it was told so.
        """
        if delay <= LATE:
            self._before[worker] = {key: self._probe.look(key) for key in keys}

    def forget(self, worker: int) -> None:
        """A worker has ended, and its devices are not asked about."""
        self._before.pop(worker, None)

    def end(
        self,
        worker: int,
        keys: Sequence[Key],
        whole: frozenset[Key],
        pids: Collection[int],
        now: float,
    ) -> list[Report]:
        """A worker and all that it started have ended: look, and say what is free.

        Args:
            worker: its id.
            keys: the devices that it had a part of.
            whole: those that it had all of.
            pids: its processes, as far as they are known.
            now: by the clock that `turn` is told.
        """
        before = self._before.pop(worker, {})
        left = {key: self._sample_before(key, before.get(key), pids) for key in keys}
        deadline = now + self._limit
        claim = Claim(worker, left, whole, pids, deadline, due=now)
        self._claims[worker] = claim
        return self._inspect([claim], now)

    def _sample_before(
        self, key: Key, begun: Sample | None, pids: Collection[int]
    ) -> Sample:
        """Return what was on a device before the worker; never the worker itself."""
        idle = self._idle.get(key, Sample())
        if begun is None or begun.problem is not None:
            return idle
        processes = begun.processes or {}
        if any(pid in processes for pid in pids):
            others = {pid: size for pid, size in processes.items() if pid not in pids}
            return replace(begun, processes=others, used=idle.used)
        return begun

    def turn(self, now: float) -> list[Report]:
        """Look at all that is due."""
        due = [claim for claim in self._claims.values() if claim.due <= now]
        return self._inspect(due, now)

    def _inspect(self, claims: Sequence[Claim], now: float) -> list[Report]:
        seen: dict[Key, Sample] = {}
        reports: list[Report] = []
        for claim in claims:
            reasons = self._examine(claim, seen)
            reports += self._conclude(claim, reasons, now)
        return reports

    def _examine(self, claim: Claim, seen: dict[Key, Sample]) -> dict[Key, str]:
        """Look at what a claim has left; gives why devices are not free."""
        held: dict[Key, str] = {}
        is_lost = False
        for key, before in list(claim.left.items()):
            if key not in seen:
                seen[key] = self._probe.look(key)
            now = self._as_read(key, seen[key], claim.pids)
            is_whole = key in claim.whole
            found = verdict(before, now, claim.pids, is_whole=is_whole)
            is_unknown = claim.is_stuck and now.problem is not None
            if found.state in (State.FREE, State.UNVERIFIED) and not is_unknown:
                del claim.left[key]
                claim.clean.append(key)
                claim.is_verified &= found.state is State.FREE
                if is_whole and found.state is State.FREE:
                    self._idle[key] = now
            else:
                held[key] = f"{self._probe.name_of(key)}: {found.reason}"
                is_lost = is_lost or found.state is State.LOST
        if is_lost:
            # It will not come back by itself.
            claim.deadline = float("-inf")
        return held

    def _conclude(
        self, claim: Claim, held: Mapping[Key, str], now: float
    ) -> list[Report]:
        reports: list[Report] = []
        if held and not claim.is_stuck and now >= claim.deadline:
            claim.is_stuck = True
            reports.append(Stuck(claim.worker, "; ".join(held.values())))
        if claim.clean and (claim.is_stuck or not held):
            keys, claim.clean = tuple(claim.clean), []
            reports.append(Cleared(claim.worker, keys, claim.is_verified))
        if not held:
            del self._claims[claim.worker]
        pause = PAUSES[min(claim.looks, len(PAUSES) - 1)]
        claim.looks += 1
        claim.due = now + ASIDE if claim.is_stuck else min(now + pause, claim.deadline)
        return reports

    def _as_read(self, key: Key, sample: Sample, pids: Collection[int]) -> Sample:
        """Believe a driver's ids once it has written one of our workers'."""
        kind = key[0]
        if sample.processes and any(pid in sample.processes for pid in pids):
            self._reads_pids.add(kind)
        if kind in self._reads_pids and not sample.reads_pids:
            return replace(sample, reads_pids=True)
        return sample
