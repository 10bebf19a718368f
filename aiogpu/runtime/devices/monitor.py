"""Monitors a node's devices: health, memory use and foreign processes.

A `DeviceThread` samples each device every second and asks its driver for its health.
Devices with reserved memory are sampled more often, if sampling is cheap. The last
sample of each device is kept for `status()`. Sick devices get no tasks until they are
well (`DeviceHealth`), and `GpuMemoryGuard` gets the memory use of each worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.text import listing
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Feed, Scheduler
from aiogpu.observe.status import Observed
from aiogpu.runtime.devices.memory_guard import GpuMemoryGuard, ProcessAttribution
from aiogpu.runtime.devices.probe_thread import DeviceThread, Key, Look
from aiogpu.runtime.devices.release import DeviceRelease

_log: Final = logging.getLogger(__name__)


CALM: Final = 10.0
"""Seconds without bad news after which a device is well again: errors come in series,
and a driver asks for an action a moment after an error."""


LISTED: Final = 4
"""Most errors that a reason lists; a sick device may report thousands."""


class DeviceHealth:
    """The health of one device.

    A device becomes sick when its driver calls it lost, reports an error that makes it
    unfit, or asks for an action such as a reset.

    It is well again when all of the following were true for `CALM` seconds:

    1. The device is not lost, and its driver answers.
    2. There was no further error.
    3. The driver says that no action is needed. A driver that is too old to say so is
       not trusted: a device that had errors stays sick until it is lost (as during a
       reset) and answers again, or until the node ends. A device that was only lost is
       well once it answers.

    Attributes:
        reason: why the device is sick, in words; None while it is well.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._errors: list[str] = []
        self._action = ""
        self._is_lost = False
        self._bad_at = 0.0

    def __repr__(self) -> str:
        return f"<DeviceHealth {self.reason or 'well'}>"

    def note(self, sample: Sample, health: Health, now: float) -> bool:
        """Update from one look; return True if `reason` has changed.

        Args:
            sample: the sample of the device.
            health: the driver's reports since the last look.
            now: seconds on a monotonic clock.
        """
        before = self.reason
        is_lost = sample.is_lost or health.is_lost
        if self._is_lost and not is_lost and health.action is None:
            # The device was reset, so earlier errors no longer count.
            self._errors.clear()
            self._action = ""
        self._is_lost = is_lost
        self._errors += [
            e for e in dict.fromkeys(health.errors) if e not in self._errors
        ]
        if health.action is not None:
            self._action = health.action
        if is_lost or health.errors or health.action:
            self.reason = self._describe()
            self._bad_at = now
        elif not self._is_good(sample, health):
            self._bad_at = now
        elif now >= self._bad_at + CALM:
            self.reason = None
            self._errors.clear()
        return self.reason != before

    def _is_good(self, sample: Sample, health: Health) -> bool:
        """Return True if one look shows no problem."""
        if sample.problem is not None:
            return False
        return health.action is not None or not (self._errors or self._action)

    def _describe(self) -> str:
        parts = ["the driver calls it lost"] if self._is_lost else []
        parts += self._errors[:LISTED]
        if len(self._errors) > LISTED:
            parts.append("other errors")
        if self._action:
            parts.append(f"the driver asks for this: {self._action}")
        return "; ".join(parts)


EACH: Final = 1.0
"""Least seconds between two rounds over all devices."""


SOONEST: Final = 0.1
"""Least seconds between two looks at a device with reserved memory."""


DEAREST: Final = 8
"""A pause is at least this many times as long as the look before, so that looks take at
most a ninth of a core, even with a slow driver."""


class DeviceSampler:
    """Samples all devices periodically.

    A round samples one device at a time, so that more urgent orders to the thread wait
    for at most one device.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: DeviceThread,
        on_round: Callable[[Look], None],
    ) -> None:
        self._loop = loop
        self._thread = thread
        self._on_round = on_round
        self._hot: tuple[Key, ...] = ()
        self._next_full = self._next_hot = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # The current round.
        self._is_full = True
        self._remaining: deque[Key] = deque()
        self._looks: list[Look] = []

    def begin(self) -> None:
        """Start the first round, before all other looks."""
        if keys := tuple(self._thread.devices):
            self._thread.look(keys, self._on_look, is_checked=True)

    def watch(self, keys: Collection[Key]) -> None:
        """Sample these devices more often from now on, and no others."""
        self._hot = tuple(keys)
        self._next_hot = self._loop.time()
        if self._timer is not None and not self._is_closed:
            self._set_timer()

    def close(self) -> None:
        """Stop sampling."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._next_full
        due = min(due, self._next_hot) if self._hot else due
        self._timer = self._loop.call_at(due, self._begin_round)

    def _begin_round(self) -> None:
        self._timer = None
        # Without hot devices each round is full, even if the timer fires early.
        self._is_full = not self._hot or self._loop.time() >= self._next_full
        self._remaining.extend(self._thread.devices if self._is_full else self._hot)
        self._look()

    def _look(self) -> None:
        key = self._remaining.popleft()
        self._thread.look((key,), self._on_look, is_checked=self._is_full)

    def _on_look(self, look: Look) -> None:
        if self._is_closed:
            return
        self._looks.append(look)
        if self._remaining:
            self._look()
            return
        looks, self._looks = self._looks, []
        spent = sum(each.cost for each in looks)
        now = self._loop.time()
        if self._is_full:
            self._next_full = now + max(EACH, DEAREST * spent)
        self._next_hot = now + max(SOONEST, DEAREST * spent)
        self._set_timer()
        seen = looks.pop()
        for each in looks:
            seen = replace(
                seen,
                samples={**each.samples, **seen.samples},
                health={**each.health, **seen.health},
                origins={**each.origins, **seen.origins},
            )
        self._on_round(seen)


SILENT: Final = 15.0
"""Seconds without an answer after which a driver counts as hanging."""


IGNORE: Final = "ignore"


AVOID: Final = "avoid"


LISTENS: Final = 3
"""Checks for a hanging driver within `SILENT`."""


class DeviceMonitor:
    """Monitors the devices of one node whose drivers can be asked.

    Attributes:
        guard: compares memory use with reservations.
        release: finds out when the devices of an ended worker are free.
        foreign: the effect of foreign processes on a device: "ignore", "avoid" or
            "wait"; see `set_foreign`.
        observed: the last sample of each device; empty before the first round.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        thread: DeviceThread,
        roots: Callable[[], Mapping[int, int]],
        feed: Feed,
        lessees: Callable[[Key], Mapping[int, int]],
    ) -> None:
        """Start the thread and the first round.

        Args:
            loop: runs the timers.
            scheduler: knows the shares of workers.
            thread: samples the devices; it is started here.
            roots: returns the root processes of workers: process id to worker id. A
                root and its descendants belong to the worker.
            feed: tells the core which devices are sick or well.
            lessees: returns the programs that lease a device: process id to holder id.
        """
        self.foreign = IGNORE
        self._has_looked = loop.create_future()
        self._occupied: dict[Key, str] = {}
        self.observed: dict[Key, Observed] = {}
        self._loop = loop
        self._thread = thread
        self._roots = roots
        self._lessees = lessees
        self._feed: Feed | None = feed
        self._owners = ProcessAttribution()
        self._health = {key: DeviceHealth() for key in thread.devices}
        self._mute: set[str] = set()
        self._reported: dict[Key, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sampler = DeviceSampler(loop, thread, self.on_round)
        self.guard = GpuMemoryGuard(scheduler, thread, self._sampler.watch)
        self.release = DeviceRelease(loop, thread, feed, self.guard.begin)
        thread.start(self.on_failed)
        if self._health:
            self._sampler.begin()
            self._check_silence()

    def stop_reporting(self) -> None:
        """Stop reporting to the core; `release` goes on."""
        self._feed = None
        self._sampler.close()

    def quit(self) -> None:
        """Stop all reports, and let the thread end by itself."""
        self.stop_reporting()
        if self._timer is not None:
            self._timer.cancel()
        self.release.close()
        self._thread.quit()

    async def close(self) -> None:
        """Stop all reports, and wait until the drivers are shut down."""
        self.quit()
        await self._thread.close()

    def _check_silence(self) -> None:
        """Check if the thread waits for a driver that hangs."""
        self._timer = self._loop.call_later(SILENT / LISTENS, self._check_silence)
        pending = self._thread.mute_for()
        if pending is None or pending[1] < SILENT:
            return
        kind = pending[0]
        self.release.on_mute(kind, SILENT)
        if kind not in self._mute:
            self._mute.add(kind)
            for key in self._health:
                self._report(key)

    def on_round(self, seen: Look) -> None:
        """Process the samples of one round."""
        if not self.observed:
            self.release.note_first(seen.samples)
        if self._feed is None:
            return
        for key in seen.samples:
            self._mute.discard(key[0])
        when = self._loop.time() - (time.monotonic() - seen.when)
        roots = self._roots() if seen.origins else {}
        for key, sample in seen.samples.items():
            known = {**self._lessees(key), **roots}
            owners = self._owners.sort(key[0], sample, seen.origins, known)
            self.observed[key] = Observed(
                seen=when,
                used=sample.used,
                utilisation=sample.utilisation,
                temperature=sample.temperature,
                power=sample.power,
                others=owners.others,
                workers={worker: use.memory for worker, use in owners.workers.items()},
                outgrown=self.guard.check(key, owners.workers, self._feed),
                unknown=owners.unknown,
            )
            self._note_others(key)
        for key, health in seen.health.items():
            self._health[key].note(seen.samples[key], health, seen.when)
            self._report(key)
        if seen.health:
            self._owners.end_round(
                {pid for each in seen.samples.values() for pid in each.processes or ()}
            )
            self.guard.tidy()

    async def set_foreign(self, foreign: str) -> None:
        """Use devices with foreign processes last ("avoid"), or not at all ("wait").

        Returns once these devices are known, because tasks may follow at once.
        """
        self.foreign = foreign
        if foreign != IGNORE and self._health and self._thread.is_alive:
            await asyncio.wait([self._has_looked], timeout=SILENT)
            for key in self.observed:
                self._note_others(key)

    def _note_others(self, key: Key) -> None:
        """Tell the core when the foreign processes on a device have changed."""
        if not self._has_looked.done():
            self._has_looked.set_result(None)
        if self.foreign == IGNORE or self._feed is None:
            return
        # This program is not foreign: its tasks would wait for the program itself.
        others = [
            process
            for process in self.observed[key].others or ()
            if process.pid != os.getpid()
        ]
        reason = ""
        if others:
            names = (f"{each.name} (pid {each.pid})".lstrip() for each in others)
            reason = f"foreign processes are on it: {listing(names, len(others))}"
        if reason != self._occupied.get(key, ""):
            self._occupied[key] = reason
            self._feed(
                Scheduler.device_changed,
                *key,
                Cause.FOREIGN,
                reason or None,
                self.foreign == AVOID,
            )

    def _report(self, key: Key) -> None:
        """Tell the core when a device becomes sick or well, or the reason changes."""
        reason = self._health[key].reason
        if reason is None and key[0] in self._mute:
            reason = f"the driver has not answered for {SILENT:g} s"
        if reason == self._reported.get(key) or self._feed is None:
            return
        name, (kind, index) = self._thread.name_of(key), key
        if reason is None:
            del self._reported[key]
            _log.warning("! %s is well again", name)
            self._feed(Scheduler.device_changed, kind, index, Cause.SICK, None)
        else:
            self._reported[key] = reason
            _log.warning("! %s gets no new tasks until it is well: %s", name, reason)
            self._feed(Scheduler.device_changed, kind, index, Cause.SICK, reason)

    def on_failed(self) -> None:
        """Handle the end of the thread by a bug: the samples are out of date."""
        self.release.give_up()
        self.stop_reporting()
        self.observed.clear()
