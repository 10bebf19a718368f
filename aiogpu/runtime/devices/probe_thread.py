"""The thread that asks the drivers of a node's devices.

Calls of drivers block, so one daemon thread makes them; it exists only if there is a
driver to ask. The event loop orders looks at devices and never waits for them. It can
see which driver is being asked for how long, and so notice a driver that hangs.
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

from aiogpu.accelerators.base import Accelerator, Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.linux.procfs import Origin, origins_of

_log: Final = logging.getLogger(__name__)


Key = tuple[str, int]
"""A device: its kind, and its index among the devices of that kind."""


@dataclass(frozen=True, slots=True)
class Look:
    """The samples of devices from one look.

    Attributes:
        when: the end of the look, by `time.monotonic`.
        samples: the samples of the devices.
        health: the health of the devices, if requested.
        origins: the origins of the live processes on them that are visible here.
        cost: the seconds that the look took.
    """

    when: float
    samples: Mapping[Key, Sample]
    health: Mapping[Key, Health] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    cost: float = 0.0


CLOSE_LIMIT: Final = 1.0
"""Most seconds that a closing node waits for the thread; a driver may hang."""


Order = tuple[Sequence[Key], bool, Callable[[Look], None]]
"""Devices to sample, True to ask for their health, and the callback."""


class DeviceThread:
    """The drivers of one node's devices, behind a queue of orders.

    Attributes:
        devices: the devices that a driver can be asked about. Devices without a
            vendor's id are logical, and have no driver.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device_sets: Iterable[DeviceSet],
        accelerators: Iterable[Accelerator],
    ) -> None:
        """Prepare; `start` starts the thread, if there is a device to ask about.

        Args:
            loop: runs the callbacks.
            device_sets: the node's devices.
            accelerators: the vendors whose drivers are asked.
        """
        sets = [device_set for device_set in device_sets if device_set.devices]
        kinds = {device_set.kind for device_set in sets}
        watches = {
            vendor.kind: vendor.watch()
            for vendor in accelerators
            if vendor.kind in kinds
        }
        self.devices: dict[Key, Device] = {
            (each.kind, index): device
            for each in sets
            for index, device in enumerate(each.devices)
            if each.kind in watches and watches[each.kind].knows(device)
        }
        self._watches = {kind: watches[kind] for kind, _ in self.devices}
        self._loop = loop
        self._problems: dict[Key, str] = {}
        # The kind whose driver is being asked, and since when; set by the thread.
        self._asked: tuple[str, float] | None = None
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._ended = loop.create_future()
        self._thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """True if the thread carries out orders."""
        return self._thread is not None and self._thread.is_alive()

    def name_of(self, key: Key) -> str:
        """Return the name of a device for messages: "GPU 0"."""
        return f"{key[0]} {self.devices[key].id}"

    def start(self, on_failed: Callable[[], None]) -> None:
        """Start the thread; `on_failed` is called if a bug of aiogpu ends it."""
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
        """Sample devices, after all earlier orders; then call back on the loop.

        `is_checked`: also ask for their health.
        """
        self._orders.put((keys, is_checked, then))

    def mute_for(self) -> tuple[str, float] | None:
        """Return the kind whose driver is being asked, and for how many seconds."""
        asked = self._asked if self.is_alive else None
        return None if asked is None else (asked[0], time.monotonic() - asked[1])

    def quit(self) -> None:
        """Let the thread end by itself."""
        self._orders.put(None)

    async def close(self) -> None:
        """Shut the drivers down; wait for at most `CLOSE_LIMIT` seconds."""
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
        except Exception:  # noqa: BLE001 - a thread has no caller
            # The loop may have been closed without its node.
            if not self._loop.is_closed():
                _log.exception("! devices are no longer monitored")
                self._loop.call_soon_threadsafe(on_failed)
        finally:
            for kind, watch in self._watches.items():
                try:
                    with self._asking(kind):
                        watch.close()
                except Exception:  # noqa: BLE001 - a user's vendor may raise anything
                    _log.exception("! the driver of %s could not be shut down", kind)
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
                "! %s cannot be inspected: %s. Until it can, its shares are free as "
                "soon as their processes have ended, without a check of the device.",
                self.name_of(key),
                sample.problem,
            )
        self._problems[key] = sample.problem
