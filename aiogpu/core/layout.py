"""How the bundles of a gang are laid out over devices, for good or on paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from aiogpu.core.devices import DeviceSet
from aiogpu.core.gang import SPREAD, Bundle, Gang
from aiogpu.core.lease import Lease
from aiogpu.core.ledger import Ledger
from aiogpu.core.resources import CPU

STEPS: Final = 200
"""Layouts that are tried beyond one for each bundle."""


class Layout:
    """Which devices each bundle gets: the hardest first, and back where one fails.

    Devices that are alike are tried once, and a few layouts in all: laying out is bin
    packing, of which the hardest cases would take for ever.
    """

    def __init__(
        self,
        ledger: Ledger,
        gang: Gang,
        barred: Mapping[str, int],
        kept: Mapping[str, int] | None,
    ) -> None:
        self._ledger = ledger
        self._barred = barred
        self._kept = kept
        self._is_spread = gang.strategy == SPREAD
        self._requests = [
            bundle.request(spread=self._is_spread) for bundle in gang.bundles
        ]
        numbers = range(len(gang.bundles))
        self._order = sorted(numbers, key=lambda i: _ease(gang.bundles[i]))
        self._steps = STEPS + len(self._order)
        self._found: dict[int, Lease] = {}

    def find(self) -> list[Lease] | None:
        """Take a lease for each bundle, in their order; None if they do not all fit."""
        if not self._may_fit() or not self._fill(0):
            return None
        return [self._found[index] for index in range(len(self._order))]

    def _may_fit(self) -> bool:
        """Whether there is enough of everything, however it is divided."""
        free = dict(self._ledger.free)
        for kind, devices in self._ledger.device_sets.items():
            free[kind] = sum(devices.free)
        for request in self._requests:
            for name, amount in (*request.scalars, *request.devices):
                free[name] = free.get(name, 0) - amount
                if free[name] < 0:
                    return False
        return True

    def _fill(self, depth: int) -> bool:
        if depth == len(self._order):
            return True
        index = self._order[depth]
        apart = [self._with_used()] if self._is_spread and self._found else []
        for barred in (*apart, dict(self._barred)):
            while self._steps:
                self._steps -= 1
                lease = self._ledger.take(self._requests[index], barred, self._kept)
                if lease is None:
                    break
                self._found[index] = lease
                if self._fill(depth + 1):
                    return True
                self._ledger.give_back(self._found.pop(index))
                if not lease.shares:
                    return False
                self._bar_alike(lease, barred)
        return False

    def _with_used(self) -> dict[str, int]:
        """What is barred, and the devices of the bundles that have some."""
        barred = dict(self._barred)
        for lease in self._found.values():
            for kind, mask in masks_of(lease):
                barred[kind] = barred.get(kind, 0) | mask
        return barred

    def _bar_alike(self, lease: Lease, barred: dict[str, int]) -> None:
        """Bar the device that was of no use, and those that are as it is."""
        kind = lease.request.devices[0][0]
        devices, first = self._ledger.device_sets[kind], lease.shares[0][0][0]
        alike = _look_of(devices, first)
        barred[kind] = barred.get(kind, 0) | sum(
            1 << at
            for at in range(len(devices.devices))
            if _look_of(devices, at) == alike
        )


def _ease(bundle: Bundle) -> tuple[bool, int, int]:
    """Sorts first what is hardest to place: of a type, of many devices, of much."""
    devices = max((amount for _, amount in bundle.devices), default=0)
    return not bundle.accelerator_type, -devices, -sum(n for _, n in bundle.scalars)


def _look_of(devices: DeviceSet, at: int) -> tuple[object, ...]:
    """What of a device matters for who can be on it."""
    device, filling = devices.devices[at], devices.filling
    memory = filling.capacity[at], filling.free_memory(at)
    return devices.free[at], device.type, device.parent is None, *memory


def masks_of(lease: Lease) -> Iterable[tuple[str, int]]:
    """The devices of a lease as masks, by kind."""
    for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True):
        mask = 0
        for at, _ in shares:
            mask |= 1 << at
        yield kind, mask


class Plan(Ledger):
    """A ledger of the same node to try something on: of it all, or of what is free.

    Attributes:
        barred: by kind, devices that are given to nobody for now.
    """

    def __init__(self, ledger: Ledger, *, is_idle: bool = False) -> None:
        sets = ledger.device_sets
        super().__init__(
            ledger.capacity, [DeviceSet(one.kind, one.devices) for one in sets.values()]
        )
        self.barred = {kind: devices.aside_mask for kind, devices in sets.items()}
        if not is_idle:
            self.free = dict(ledger.free)
            for lease in ledger.leases.values():
                self._move(lease, -1)

    def put_back(self, lease: Lease) -> None:
        """Suppose that a lease has ended."""
        for name, amount in lease.request.scalars:
            if name != CPU or not lease.is_lent:
                self.free[name] += amount
        self._move(lease, 1)

    def take_away(self, lease: Lease) -> None:
        """Suppose that somebody has what a lease holds, but for its CPUs."""
        for name, amount in lease.request.scalars:
            if name != CPU:
                self.free[name] -= amount
        self._move(lease, -1)

    def _move(self, lease: Lease, sign: int) -> None:
        for kind, share, memory in lease.held():
            devices = self.device_sets[kind]
            if sign > 0:
                devices.give_back((share,), memory)
            else:
                devices.take((share,), memory)
