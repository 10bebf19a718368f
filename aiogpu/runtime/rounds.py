"""When devices are looked at while tasks run, and what one such round brings home.

Each device is looked at every second, and asked whether it is well; those with
memory that was reserved for somebody are looked at more often, if looks are cheap.
It blocks while a driver answers, so it runs in a thread of its own; what follows
from it is decided elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiogpu.accelerators.base import Health, Sample
from aiogpu.linux.procfs import Origin, origins_of
from aiogpu.runtime.device_eyes import DeviceEyes, Key

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


class Rounds:
    """The rounds to one node's devices.

    They are made step by step, so that nobody who has more urgent questions waits for
    longer than one device takes.

    Attributes:
        due: when `turn` is to be called next; None before `begin`.
    """

    def __init__(
        self,
        eyes: DeviceEyes,
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[Iterable[int]], Mapping[int, Origin]] = origins_of,
    ) -> None:
        """Prepare to look.

        Args:
            eyes: what to look with, at the devices that can be asked about.
            clock: tells the seconds, and so what a look costs.
            find: looks processes up.
        """
        self.due: float | None = None
        self._eyes = eyes
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
        return f"<Rounds to {len(self._eyes.devices)} devices, {len(self._hot)} hot>"

    def begin(self, samples: Mapping[Key, Sample]) -> Round:
        """The first round; the devices were looked at just before."""
        health = {key: self._eyes.check(key) for key in self._eyes.devices}
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
            self._left.extend(self._eyes.devices if self._is_full else self._hot)
            self._spent, self._samples, self._health = 0.0, {}, {}
        key = self._left.popleft()
        self._samples[key] = self._eyes.look(key)
        if self._is_full:
            self._health[key] = self._eyes.check(key)
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
