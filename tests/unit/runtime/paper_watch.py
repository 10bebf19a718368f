"""A driver on paper: says what a test has put on its devices, and counts looks."""

from __future__ import annotations

from collections import Counter

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.request import Device


class PaperWatch:
    """Devices with a UUID are known; each has the sample that was put there."""

    def __init__(self, *on: Sample) -> None:
        self.on = list(on)
        self.looks: Counter[int | str] = Counter()
        self.calls: list[str] = []
        self.health: dict[int | str, Health] = {}

    def knows(self, device: Device) -> bool:
        return device.uuid is not None

    def open(self) -> None:
        self.calls.append("open")

    def look(self, device: Device) -> Sample:
        self.looks[device.id] += 1
        assert isinstance(device.id, int)
        return self.on[device.id]

    def check(self, device: Device) -> Health:
        return self.health.get(device.id, Health())

    def close(self) -> None:
        self.calls.append("close")


class PaperVendor:
    """An accelerator of which only the watch is asked for."""

    kind = "GPU"

    def __init__(self, watch: PaperWatch) -> None:
        self._watch = watch

    def watch(self) -> PaperWatch:
        return self._watch
