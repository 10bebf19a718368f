"""The thread that asks the drivers of a node's devices.

Drivers block, so they have one daemon thread, which is there only if there is a driver
to ask; the loop has it look at devices and never waits for it. It says what it waits
for, so that the loop can see one that never answers. What a driver cannot tell is
logged, once for each reason. A thread that hangs in a driver harms the devices that it
was asked about, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from aiogpu.accelerators.base import Accelerator, DeviceWatch, Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.linux.procfs import Origin, origins_of

_log: Final = logging.getLogger(__name__)


Key = tuple[str, int]
"""A device: its kind, and its index among those."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen on devices.

    Attributes:
        when: the end of it, by `time.monotonic`.
        samples: what is on the devices that were looked at.
        health: of those that were asked whether they are well.
        origins: of the live processes on them, where they can be seen from here.
        cost: seconds that it took.
    """

    when: float
    samples: Mapping[Key, Sample]
    health: Mapping[Key, Health] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    cost: float = 0.0


CLOSE_LIMIT: Final = 1.0
"""Seconds that a closing node waits for the thread; a driver may hang."""


Order = tuple[Sequence[Key], bool, Callable[[Look], None]]
"""Devices to look at, whether to ask if they are well, and who is told."""


class DeviceThread:
    """The drivers of one node's devices, behind a queue of orders.

    Attributes:
        devices: those that can be asked about. Those without a vendor's id are
            logical, and nobody is asked about them.
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
            device_sets: the node's devices.
            accelerators: whose drivers to ask.
        """
        sets = [held for held in device_sets if held.devices]
        there = {held.kind for held in sets}
        watches: dict[str, DeviceWatch] = {
            vendor.kind: vendor.watch()
            for vendor in accelerators
            if vendor.kind in there
        }
        self.devices: dict[Key, Device] = {
            (held.kind, index): device
            for held in sets
            for index, device in enumerate(held.devices)
            if held.kind in watches and watches[held.kind].knows(device)
        }
        self._watches = {kind: watches[kind] for kind, _ in self.devices}
        self._loop = loop
        self._problems: dict[Key, str] = {}
        # The kind whose driver is asked now, and since when; set by the thread.
        self._asked: tuple[str, float] | None = None
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._ended = loop.create_future()
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """True if it can be given orders."""
        return self._thread is not None and self._thread.is_alive()

    def name_of(self, key: Key) -> str:
        """A device as people know it."""
        return f"{key[0]} {self.devices[key].id}"

    def start(self, on_failed: Callable[[], None]) -> None:
        """Start asking; `on_failed`: told of the end of that by a bug of ours."""
        if self.devices:
            self._thread = threading.Thread(
                target=self._run, args=(on_failed,), name="aiogpu-devices", daemon=True
            )
            self._thread.start()

    def look(
        self,
        keys: Sequence[Key],
        then: Callable[[Look], None],
        *,
        is_checked: bool = False,
    ) -> None:
        """Look at devices after all that was ordered before, and tell the loop.

        `is_checked`: also ask whether they are well.
        """
        self._orders.put((keys, is_checked, then))

    def mute_for(self) -> tuple[str, float] | None:
        """The kind whose driver is asked now, and for how many seconds it has been."""
        asked = self._asked if self.is_alive else None
        return None if asked is None else (asked[0], time.monotonic() - asked[1])

    def quit(self) -> None:
        """Let the thread end by itself."""
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

    def _run(self, on_failed: Callable[[], None]) -> None:
        try:
            for kind, watch in self._watches.items():
                with self._asking(kind):
                    watch.open()
            while order := self._orders.get():
                keys, is_checked, then = order
                self._loop.call_soon_threadsafe(then, self._look(keys, is_checked))
        except Exception:  # noqa: BLE001 - a thread has nobody else to tell
            # A loop that was closed without its node is told no more.
            if not self._loop.is_closed():
                _log.exception("! devices are not watched any more")
                self._loop.call_soon_threadsafe(on_failed)
        finally:
            for kind, watch in self._watches.items():
                try:
                    with self._asking(kind):
                        watch.close()
                except Exception:  # noqa: BLE001 - a user's own may raise anything
                    _log.exception("! the driver of %s could not be let go", kind)
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note_ended)

    def _note_ended(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    @contextmanager
    def _asking(self, kind: str) -> Iterator[None]:
        self._asked = kind, time.monotonic()
        try:
            yield
        finally:
            self._asked = None

    def _look(self, keys: Sequence[Key], is_checked: bool) -> Look:
        began = time.monotonic()
        samples, health = {}, {}
        for key in keys:
            watch, device = self._watches[key[0]], self.devices[key]
            with self._asking(key[0]):
                samples[key] = watch.look(device)
                if is_checked:
                    health[key] = watch.check(device)
            self._note_problem(key, samples[key])
        living = {pid for sample in samples.values() for pid in sample.living}
        origins = origins_of(living) if living else {}
        now = time.monotonic()
        return Look(now, samples, health, origins, now - began)

    def _note_problem(self, key: Key, sample: Sample) -> None:
        if sample.problem is None:
            self._problems.pop(key, None)
            return
        if not sample.is_lost and sample.problem not in self._problems.values():
            _log.warning(
                "! %s cannot be asked what is on it: %s. While that is so, its shares "
                "come back when their processes have ended, and nobody verifies it.",
                self.name_of(key),
                sample.problem,
            )
        self._problems[key] = sample.problem
