"""The drivers of a node's devices, asked by one thread: the only one that they see.

It blocks while a driver answers, and says what it waits for, so that the loop can
see one that never does. What a driver cannot tell is logged, once for each reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from aiogpu.accelerators.base import Accelerator, DeviceWatch, Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet

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
