"""Placement groups: bundles laid out over devices, and leases from bundles.

To the ledger a placement group is one lease, taken whole or not at all. The lease is
divided into bundles, each with a `BundleLedger`, from which members take their leases.
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
"""The most steps of a search, in addition to one for each bundle."""


class Layout:
    """Searches devices for all bundles: the hardest bundle first, with backtracking.

    The problem is bin packing, so the number of steps is limited, and of equal devices
    only one is tried.
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
        self._taken: dict[int, Lease] = {}

    def find(self) -> list[Lease] | None:
        """Take a lease for each bundle, in their order; None if they do not all fit."""
        if not self._may_fit() or not self._fill(0):
            return None
        return [self._taken[index] for index in range(len(self._order))]

    def _may_fit(self) -> bool:
        """Return True if the sum of each resource suffices."""
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
        unused_only = [self._with_used()] if self._is_spread and self._taken else []
        for barred in (*unused_only, dict(self._barred)):
            while self._steps:
                self._steps -= 1
                lease = self._ledger.take(self._requests[index], barred, self._kept)
                if lease is None:
                    break
                self._taken[index] = lease
                if self._fill(depth + 1):
                    return True
                self._ledger.give_back(self._taken.pop(index))
                if not lease.shares:
                    return False
                self._bar_equal(lease, barred)
        return False

    def _with_used(self) -> dict[str, int]:
        """Return the barred devices and the devices of bundles placed so far."""
        barred = dict(self._barred)
        for lease in self._taken.values():
            for kind, mask in lease.masks():
                barred[kind] = barred.get(kind, 0) | mask
        return barred

    def _bar_equal(self, lease: Lease, barred: dict[str, int]) -> None:
        """Bar the device that did not lead to a layout, and all equal devices."""
        kind = lease.request.devices[0][0]
        devices, first = self._ledger.device_sets[kind], lease.shares[0][0][0]
        properties = _properties(devices, first)
        barred[kind] = barred.get(kind, 0) | sum(
            1 << index
            for index in range(len(devices.devices))
            if _properties(devices, index) == properties
        )


def _ease(bundle: Request) -> tuple[bool, int, int]:
    """Sort key, hardest bundle first: with a type, then by devices, then by scalars."""
    devices = max((amount for _, amount in bundle.devices), default=0)
    return not bundle.accelerator_type, -devices, -sum(n for _, n in bundle.scalars)


def _properties(devices: DeviceSet, index: int) -> tuple[object, ...]:
    """Return the properties of a device that decide whether a bundle fits."""
    device, memory = (
        devices.devices[index],
        (devices.capacity[index], devices.free_memory(index)),
    )
    return devices.free[index], device.type, device.parent is None, *memory


COUNTED: Final = 10_000
"""The highest number of leases that `room_for` counts."""


def try_on(
    ledger: Ledger, request: Request, barred: Mapping[str, int] | None = None
) -> list[Lease]:
    """Take the leases for a request and return them to the ledger at once.

    The list is empty if the request does not fit. `barred`: masks of devices that must
    not be used, by kind.
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
    """Resources that are reserved for one request.

    Attributes:
        home: the ledger of the resources.
        barred: the devices, as masks by kind.
        kept: the amounts of scalars, in parts.
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
    """Take the lease of any request, also of a placement group or of a member.

    Args:
        ledger: the node's ledger.
        request: the request.
        withheld: resources that are reserved for another request.
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
    """Take all bundles of a group, or nothing; they become the `parts` of the lease."""
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
            part.shares,
        )
        for index, part in enumerate(leases)
    )
    return lease


def would_help(ledger: Ledger, lease: Lease, request: Request) -> bool:
    """Return True if a request might fit after the end of a lease."""
    home = lease.home
    if home not in ledger.homes(request):
        return False
    return request.placement_group is not None or home.would_help(lease, request)


def candidates(ledger: Ledger, request: Request) -> Sequence[Ledger]:
    """Return the ledgers for which a request may wait, usable ones first.

    The node's ledger or, for a member, the bundles of its group that could hold it.
    """
    if not isinstance(request.placement_group, BundleRef):
        return (ledger,)
    bundles = [
        home
        for home in ledger.homes(request)
        if isinstance(home, BundleLedger) and home.could_ever(request)
    ]
    # The sort is stable: equal bundles keep their order.
    return sorted(bundles, key=lambda bundle: not bundle.has_devices_for(request))


def why_infeasible(ledger: Ledger, request: Request) -> str | None:
    """Return a clause about why a request never fits; None if it may fit."""
    placement_group = request.placement_group
    if placement_group is None:
        return ledger.why_infeasible(request)
    if isinstance(placement_group, BundleRef):
        granted = ledger.placement_groups.get(placement_group.key)
        if granted is None or candidates(ledger, request):
            return None
        allowed = [bundle for bundle in granted if bundle in ledger.homes(request)]
        bundles = ", ".join(f"{part.index}: {_describe(part)}" for part in allowed)
        return f"no bundle that it may use could hold it ({bundles or 'there is none'})"
    if placement_group.strategy == STRICT_SPREAD and len(placement_group.bundles) > 1:
        return (
            f"STRICT_SPREAD places each of its {len(placement_group.bundles)} bundles "
            f"on a machine of its own, and this node is one machine; SPREAD uses "
            f"different devices"
        )
    for index, bundle in enumerate(placement_group.bundles):
        reason = find_infeasible(ledger.capacity, ledger.device_sets, bundle)
        if reason is not None:
            return f"for bundle {index}, {bundle}, {reason}"
    if Layout(ledger.emptied(), placement_group, {}, None).find() is None:
        return "its bundles do not all fit at once"
    return None


def _describe(part: BundleLedger) -> str:
    """Describe the resources and devices of a bundle."""
    terms = [str(part.bundle)]
    for kind, mask in part.masks.items():
        devices = part.device_sets[kind].devices
        names = [
            f"{kind} {device.id}{f' of type {device.type}' if device.type else ''}"
            for index, device in enumerate(devices)
            if mask >> index & 1
        ]
        terms.append(" and ".join(names))
    return " on ".join(terms)


def room_for(ledger: Ledger, request: Request, are_lent: bool = False) -> int | None:
    """Return how many leases of a request an idle node or empty group can hold at once.

    None for no limit. 1 for a group itself, and for members of a group that is not
    granted yet.
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
