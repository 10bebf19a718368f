"""The thread that asks the drivers of a node's devices, and how the loop orders it.

Drivers block, so they have one daemon thread, which is there only if there is a driver
to ask; the loop gives it orders and never waits for it. It says what it waits for, so
that the loop can see one that never answers. What a driver cannot tell is logged, once
for each reason. A thread that hangs in a driver harms the devices that it was asked
about, nothing else. In `DeviceSampler` each device is looked at every second, and asked
whether it is well; those with memory that was reserved for somebody are looked at more
often, if looks are cheap.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from aiogpu.accelerators.base import Accelerator, DeviceWatch, Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.linux.procfs import Origin, origins_of

_log: Final = logging.getLogger(__name__)


Key = tuple[str, int]
"""A device: its kind, and its index among those."""


class DeviceProbe:
    """All looks at one node's devices.

    Attributes:
        devices: those that can be asked about.
        asking: the kind whose driver is asked at this moment, and since when by
            `time.monotonic`; None while none is. Any thread may read it.
    """

    def __init__(
        self, watches: Mapping[str, DeviceWatch], devices: Mapping[Key, Device]
    ) -> None:
        self.devices = devices
        self.asking: tuple[str, float] | None = None
        self._watches = watches
        self._problems: dict[Key, str] = {}

    @classmethod
    def of(
        cls, device_sets: Iterable[DeviceSet], accelerators: Iterable[Accelerator]
    ) -> DeviceProbe:
        """Those for the devices of a node that their vendors know.

        Devices without a vendor's id are logical, and nobody is asked about them.
        """
        sets = list(device_sets)
        there = {held.kind for held in sets if held.devices}
        watches = {
            vendor.kind: vendor.watch()
            for vendor in accelerators
            if vendor.kind in there
        }
        devices = {
            (held.kind, index): device
            for held in sets
            for index, device in enumerate(held.devices)
            if held.kind in watches and watches[held.kind].knows(device)
        }
        kinds = {kind for kind, _ in devices}
        return cls({kind: watches[kind] for kind in kinds}, devices)

    def __repr__(self) -> str:
        return f"<DeviceProbe on {len(self.devices)} devices>"

    def open(self) -> None:
        """Start the drivers."""
        for kind, watch in self._watches.items():
            with self._asking(kind):
                watch.open()

    def close(self) -> None:
        """Let the drivers go; one that fails in this keeps no other from it."""
        for kind, watch in self._watches.items():
            with self._asking(kind):
                try:
                    watch.close()
                except Exception:  # noqa: BLE001 - a user's own may raise anything
                    _log.exception("! the driver of %s could not be let go", kind)

    @contextmanager
    def _asking(self, kind: str) -> Iterator[None]:
        self.asking = kind, time.monotonic()
        try:
            yield
        finally:
            self.asking = None

    def look(self, key: Key) -> Sample:
        """Return what is on a device now."""
        with self._asking(key[0]):
            sample = self._watches[key[0]].look(self.devices[key])
        if sample.problem is None:
            self._problems.pop(key, None)
            return sample
        if not sample.is_lost and sample.problem not in self._problems.values():
            _log.warning(
                "! %s cannot be asked what is on it: %s. While that is so, its shares "
                "come back when their processes have ended, and nobody verifies it.",
                self.name_of(key),
                sample.problem,
            )
        self._problems[key] = sample.problem
        return sample

    def check(self, key: Key) -> Health:
        """Return whether a device is well."""
        with self._asking(key[0]):
            return self._watches[key[0]].check(self.devices[key])

    def name_of(self, key: Key) -> str:
        """A device as people know it."""
        return f"{key[0]} {self.devices[key].id}"


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


CLOSE_LIMIT: Final = 1.0
"""Seconds that a closing node waits for the thread; a driver may hang."""


class Desk(NamedTuple):
    """What the thread works with; nobody else touches it.

    Attributes:
        inspection: looks after the ends of workers.
        rounds: looks while they run.
    """

    inspection: Inspection
    rounds: DeviceSampler


Order = Callable[[Desk], Sequence[Report] | None]
"""What the thread is to do; it says what it has found out."""


class DeviceThread:
    """The drivers of one node's devices, behind a queue of orders.

    Attributes:
        on_report: told what has become of the devices of a worker that has ended.
        on_round: told of each round to the devices.
        on_failed: told that nobody is asked any more, for a bug of ours.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_sets: Iterable[DeviceSet],
        accelerators: Iterable[Accelerator],
    ) -> None:
        """Prepare; `start` starts the thread, if there is any device to ask about.

        Args:
            loop: calls what is told.
            device_sets: the node's devices. Those without a vendor's id are logical,
                and nobody is asked about them.
            accelerators: whose drivers to ask.
        """
        self.on_report: Callable[[Report], None]
        self.on_round: Callable[[Round], None] = _ignore
        self.on_failed: list[Callable[[], None]] = []
        self._loop = loop
        self._probe = DeviceProbe.of(device_sets, accelerators)
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._ended = loop.create_future()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        state = "on" if self.is_alive else "off"
        return f"<DeviceThread {state}, {len(self.devices)} devices>"

    @property
    def devices(self) -> Mapping[Key, Device]:
        """Those that can be asked about."""
        return self._probe.devices

    @property
    def is_alive(self) -> bool:
        """True if it can be given orders."""
        return self._thread is not None and self._thread.is_alive()

    def name_of(self, key: Key) -> str:
        """A device as people know it."""
        return self._probe.name_of(key)

    def start(self, limit: float) -> None:
        """Start asking; `limit` is how long a device may be held after an end."""
        if self.devices:
            desk = Desk(Inspection(self._probe, limit), DeviceSampler(self._probe))
            self._thread = threading.Thread(
                target=self._run, args=(desk,), name="aiogpu-devices", daemon=True
            )
            self._thread.start()

    def order(self, order: Order) -> None:
        """Have something done, after all that was ordered before."""
        self._orders.put(order)

    def mute_for(self) -> tuple[str, float] | None:
        """The kind whose driver is asked now, and for how many seconds it has been."""
        asking = self._probe.asking if self.is_alive else None
        if asking is None:
            return None
        kind, since = asking
        return kind, time.monotonic() - since

    def quit(self) -> None:
        """Let the thread end by itself; rounds are told no more."""
        self.on_round = _ignore
        self._orders.put(None)

    async def close(self) -> None:
        """Let the drivers go; waits for them for a second at most."""
        self.quit()
        if self._thread is None:
            return
        await asyncio.wait([self._ended], timeout=CLOSE_LIMIT)
        if self._ended.done():
            self._thread.join()
        self._thread = None

    def _note_ended(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _hear(self, report: Report) -> None:
        self.on_report(report)

    def _see(self, seen: Round) -> None:
        self.on_round(seen)

    def _give_up(self) -> None:
        for told in self.on_failed:
            told()

    def _run(self, desk: Desk) -> None:
        """The thread: obey orders, and look again when it is time."""
        try:
            self._probe.open()
            idle = {key: self._probe.look(key) for key in self._probe.devices}
            desk.inspection.open(idle)
            self._tell(self._see, desk.rounds.begin(idle))
            while self._work(desk):
                pass
        except Exception:  # noqa: BLE001 - a thread has nobody else to tell
            # A loop that was closed without its node is told no more.
            if not self._loop.is_closed():
                _log.exception("! devices are not watched any more")
                self._loop.call_soon_threadsafe(self._give_up)
        finally:
            self._probe.close()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note_ended)

    def _work(self, desk: Desk) -> bool:
        """Do what comes next; whether there is more to do."""
        dues = (desk.inspection.due, desk.rounds.due)
        due = min((each for each in dues if each is not None), default=None)
        pause = None if due is None else max(0.0, due - time.monotonic())
        try:
            order = self._orders.get(timeout=pause)
        except Empty:
            reports: Sequence[Report] | None = desk.inspection.turn(time.monotonic())
        else:
            if order is None:
                return False
            reports = order(desk)
        for report in reports or ():
            self._tell(self._hear, report)
        seen = desk.rounds.turn()
        if seen is not None:
            self._tell(self._see, seen)
        return True

    def _tell(self, told: Callable[..., None], what: object) -> None:
        self._loop.call_soon_threadsafe(told, what)


def _ignore(_seen: Round) -> None:
    """Nobody wants to know."""


EACH: Final = 1.0
"""Seconds between two rounds to all devices."""


SOONEST: Final = 0.1
"""Seconds between two looks at a device of which memory is reserved."""


DEAREST: Final = 8
"""Pauses are at least so many times as long as the look before: no more than a ninth
of a core is spent on looking, however slow a driver is."""


@dataclass(frozen=True, slots=True)
class Round:
    """What was seen at one time.

    Attributes:
        when: by `time.monotonic`.
        samples: what is on the devices that were looked at.
        health: of those that were asked whether they are well.
        origins: of the live processes on them, where they can be seen from here.
    """

    when: float
    samples: Mapping[Key, Sample]
    health: Mapping[Key, Health] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)


class DeviceSampler:
    """The rounds to one node's devices.

    They are made step by step, so that nobody who has more urgent questions waits for
    longer than one device takes.

    Attributes:
        due: when `turn` is to be called next; None before `begin`.
    """

    def __init__(
        self,
        probe: DeviceProbe,
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[Iterable[int]], Mapping[int, Origin]] = origins_of,
    ) -> None:
        """Prepare to look.

        Args:
            probe: what to look with, at the devices that can be asked about.
            clock: tells the seconds, and so what a look costs.
            find: looks processes up.
        """
        self.due: float | None = None
        self._probe = probe
        self._clock = clock
        self._find = find
        self._hot: tuple[Key, ...] = ()
        self._next_full = 0.0
        self._next_hot = 0.0
        # The round that is being made.
        self._left: deque[Key] = deque()
        self._is_full = False
        self._spent = 0.0
        self._samples: dict[Key, Sample] = {}
        self._health: dict[Key, Health] = {}

    def __repr__(self) -> str:
        devices, hot = len(self._probe.devices), len(self._hot)
        return f"<DeviceSampler to {devices} devices, {hot} hot>"

    def begin(self, samples: Mapping[Key, Sample]) -> Round:
        """The first round; the devices were looked at just before."""
        health = {key: self._probe.check(key) for key in self._probe.devices}
        now = self._clock()
        self._next_full = self._next_hot = now + EACH
        self._set_due()
        return self._found(now, samples, health)

    def watch(self, keys: Collection[Key]) -> None:
        """From now on look at these more often, and no others."""
        self._hot = tuple(keys)
        self._next_hot = self._clock()
        self._set_due()

    def turn(self) -> Round | None:
        """Look at the next device, if it is time; gives the round that this ends."""
        now = self._clock()
        if self.due is None or now < self.due:
            return None
        if not self._left:
            self._is_full = now >= self._next_full
            self._left.extend(self._probe.devices if self._is_full else self._hot)
            self._spent, self._samples, self._health = 0.0, {}, {}
        key = self._left.popleft()
        self._samples[key] = self._probe.look(key)
        if self._is_full:
            self._health[key] = self._probe.check(key)
        self._spent += self._clock() - now
        if self._left:
            return None
        now = self._clock()
        if self._is_full:
            self._next_full = now + max(EACH, DEAREST * self._spent)
        self._next_hot = now + max(SOONEST, DEAREST * self._spent)
        self._set_due()
        return self._found(now, self._samples, self._health)

    def _found(
        self, now: float, samples: Mapping[Key, Sample], health: Mapping[Key, Health]
    ) -> Round:
        living = {pid for sample in samples.values() for pid in sample.living}
        return Round(now, samples, health, self._find(living) if living else {})

    def _set_due(self) -> None:
        due = self._next_full
        self.due = min(due, self._next_hot) if self._hot else due
