"""Placement groups: bundles laid out over devices, and leases from bundles.

To the ledger a placement group is one lease, taken whole or not at all. What it holds
is divided into bundles, a `BundleLedger` each, from which its tasks take their leases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from aiogpu.core.model.request import (
    SPREAD,
    STRICT_SPREAD,
    BundleRef,
    PlacementGroupSpec,
    Request,
)
from aiogpu.core.model.units import CPU
from aiogpu.core.resources.devices import COLD, Affinity, DeviceSet
from aiogpu.core.resources.feasibility import find_infeasible
from aiogpu.core.resources.ledger import BundleLedger, Lease, Ledger

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
        placement_group: PlacementGroupSpec,
        barred: Mapping[str, int],
        kept: Mapping[str, int] | None,
    ) -> None:
        self._ledger = ledger
        self._barred = barred
        self._kept = kept
        self._is_spread = placement_group.strategy == SPREAD
        self._requests = [
            replace(bundle, spread=self._is_spread)
            for bundle in placement_group.bundles
        ]
        numbers = range(len(placement_group.bundles))
        self._order = sorted(numbers, key=lambda i: _ease(placement_group.bundles[i]))
        self._steps = STEPS + len(self._order)
        self._found: dict[int, Lease] = {}

    def find(self) -> list[Lease] | None:
        """Take a lease for each bundle, in their order; None if they do not all fit."""
        if not self._may_fit() or not self._fill(0):
            return None
        return [self._found[index] for index in range(len(self._order))]

    def _may_fit(self) -> bool:
        """Return whether there is enough of everything, however it is divided."""
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
        """Return what is barred, and the devices of the bundles that have some."""
        barred = dict(self._barred)
        for lease in self._found.values():
            for kind, mask in lease.masks():
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


def _ease(bundle: Request) -> tuple[bool, int, int]:
    """Sorts first what is hardest to place: of a type, of many devices, of much."""
    devices = max((amount for _, amount in bundle.devices), default=0)
    return not bundle.accelerator_type, -devices, -sum(n for _, n in bundle.scalars)


def _look_of(devices: DeviceSet, at: int) -> tuple[object, ...]:
    """Return what of a device matters for who can be on it."""
    device, memory = (
        devices.devices[at],
        (devices.capacity[at], devices.free_memory(at)),
    )
    return devices.free[at], device.type, device.parent is None, *memory


COUNTED: Final = 10_000
"""Members of one bundle that are counted."""


def try_on(
    ledger: Ledger, request: Request, barred: Mapping[str, int] | None = None
) -> list[Lease]:
    """The leases that a ledger could give now for a request, given back already.

    None of them where it does not fit. `barred`: devices by kind that are not to be
    used, as masks.
    """
    if isinstance(request.placement_group, PlacementGroupSpec):
        leases = (
            Layout(ledger, request.placement_group, barred or {}, None).find() or []
        )
    else:
        lease = ledger.take(request, barred)
        leases = [] if lease is None else [lease]
    for lease in leases:
        ledger.give_back(lease)
    return leases


@dataclass(slots=True, eq=False)
class Withheld:
    """Resources that are kept for one request, so that others may not take them.

    Attributes:
        home: the ledger whose resources they are.
        barred: devices by kind, as bit masks.
        kept: amounts of undivided resources, in parts.
    """

    home: Ledger
    barred: Mapping[str, int]
    kept: Mapping[str, int]


def take_grouped(
    ledger: Ledger,
    request: Request,
    withheld: Withheld | None = None,
    warm: Affinity = COLD,
) -> Lease | None:
    """Take what a group asks for, or a member of one; `Ledger.take` for all others.

    Args:
        ledger: the node's.
        request: what is asked for.
        withheld: what is kept for another, None for nothing.
        warm: see `Ledger.take`.
    """
    group = request.placement_group
    for home in ledger.homes(request):
        barred, kept = None, None
        if withheld is not None and withheld.home is home:
            barred, kept = withheld.barred, withheld.kept
        if isinstance(group, PlacementGroupSpec):
            lease = take_group(home, group, request, barred or {}, kept)
        else:
            lease = home.take(request, barred, kept, warm)
        if lease is not None:
            return lease
    return None


def take_group(
    ledger: Ledger,
    placement_group: PlacementGroupSpec,
    request: Request,
    barred: Mapping[str, int],
    kept: Mapping[str, int] | None = None,
) -> Lease | None:
    """Take all bundles of a group, or nothing; the lease has them as its parts."""
    leases = Layout(ledger, placement_group, barred, kept).find()
    if leases is None:
        return None
    lease = ledger.merge(leases, request)
    lease.parts = ledger.placement_groups[placement_group.key] = tuple(
        BundleLedger(
            ledger,
            placement_group.key,
            index,
            placement_group.bundles[index],
            one.shares,
        )
        for index, one in enumerate(leases)
    )
    return lease


def would_help(ledger: Ledger, lease: Lease, request: Request) -> bool:
    """Return whether a request might fit if this lease were given back."""
    home = lease.home
    if home not in ledger.homes(request):
        return False
    return request.placement_group is not None or home.would_help(lease, request)


def candidates(ledger: Ledger, request: Request) -> Sequence[Ledger]:
    """The ledgers for which a request may wait; those that would do now come first.

    That is the node's, or of a member the bundles of its group that could hold it.
    """
    if not isinstance(request.placement_group, BundleRef):
        return (ledger,)
    bundles = [
        home
        for home in ledger.homes(request)
        if isinstance(home, BundleLedger) and home.could_ever(request)
    ]
    # Sorting keeps the order of bundles that are alike.
    return sorted(bundles, key=lambda bundle: not bundle.has_devices_for(request))


def why_infeasible(ledger: Ledger, request: Request) -> str | None:
    """A clause that says why a request never fits; None if it may."""
    placement_group = request.placement_group
    if placement_group is None:
        return ledger.why_infeasible(request)
    if isinstance(placement_group, BundleRef):
        granted = ledger.placement_groups.get(placement_group.key)
        if granted is None or candidates(ledger, request):
            return None
        allowed = [one for one in granted if one in ledger.homes(request)]
        have = ", ".join(f"{one.index}: {_told(one)}" for one in allowed)
        return f"no bundle that it may use could hold it ({have or 'there is none'})"
    if placement_group.strategy == STRICT_SPREAD and len(placement_group.bundles) > 1:
        return (
            f"STRICT_SPREAD has each of its {len(placement_group.bundles)} bundles on "
            f"a machine of its own, and this node is one; SPREAD has them on different "
            f"devices"
        )
    for index, bundle in enumerate(placement_group.bundles):
        reason = find_infeasible(ledger.capacity, ledger.device_sets, bundle)
        if reason is not None:
            return f"for bundle {index}, {bundle}, {reason}"
    if Layout(ledger.emptied(), placement_group, {}, None).find() is None:
        return "its bundles do not all fit at once"
    return None


def _told(part: BundleLedger) -> str:
    """Return what a bundle holds, and on which devices."""
    told = [str(part.bundle)]
    for kind, mask in part.masks.items():
        devices = part.device_sets[kind].devices
        names = [
            f"{kind} {device.id}{f' of type {device.type}' if device.type else ''}"
            for at, device in enumerate(devices)
            if mask >> at & 1
        ]
        told.append(" and ".join(names))
    return " on ".join(told)


def room_for(ledger: Ledger, request: Request, are_lent: bool = False) -> int | None:
    """Count the leases of a request that an idle node or empty group can hold at once.

    None where there is no end to them; for a group itself, and for members of one that
    is not granted yet, 1.
    """
    placement_group = request.placement_group
    if placement_group is None:
        return ledger.room_for(request, are_lent)
    homes = ledger.homes(request)
    if isinstance(placement_group, PlacementGroupSpec) or not homes:
        return 1
    held = [name for name, _ in request.scalars if not (are_lent and name == CPU)]
    if not held and not request.devices:
        return None
    count = 0
    for home in homes:
        empty = home.emptied()
        while count < COUNTED and (lease := empty.take(request)):
            if are_lent:
                empty.lend(lease)
            count += 1
    return count
