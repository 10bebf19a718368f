"""The thread that asks the drivers of a node's devices, and how the loop orders it.

Drivers block, so they have one daemon thread, which is there only if there is a driver
to ask; the loop gives it orders and never waits for it. A thread that hangs in a driver
harms the devices that it was asked about, nothing else. In `DeviceSampler` each device
is looked at every second, and asked whether it is well; those with memory that was
reserved for somebody are looked at more often, if looks are cheap.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from aiogpu.accelerators.base import Accelerator, Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.linux.procfs import Origin, origins_of
from aiogpu.runtime.devices.inspection import Inspection, Report
from aiogpu.runtime.devices.probe import DeviceProbe, Key

_log: Final = logging.getLogger(__name__)


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
