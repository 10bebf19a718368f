"""Compares requests with what is free, resource by resource.

A request is measured in a tuple of amounts. Requests of one kind have amounts of the
same resources. `room` returns, for such a kind, the most of each resource that may be
taken now. A request with an amount above it does not fit. One without may not fit
either: the ledger knows more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from aiogpu.core.model.request import PlacementGroupSpec, Request
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.resources.placement_group import Withheld

Amounts = tuple[int, ...]
"""Amounts of the resources of one kind of requests."""

NOTHING: Mapping[str, int] = {}


def kind_of(request: Request) -> Hashable:
    """Return what requests have in common whose amounts can be compared."""
    group = request.placement_group
    is_group = isinstance(group, PlacementGroupSpec)
    return (
        tuple([name for name, _ in request.scalars]),
        tuple([kind for kind, _ in request.devices]),
        request.accelerator_type,
        request.where,
        request.gpu_memory > 0,
        is_group or group,
    )


def amounts_of(request: Request) -> Amounts:
    """Return the amounts that a request asks for: scalars, devices, device memory.

    For a placement group: the sums, and the largest share of a bundle for each kind of
    devices.
    """
    scalars = [amount for _, amount in request.scalars]
    devices = [amount for _, amount in request.devices]
    group = request.placement_group
    if isinstance(group, PlacementGroupSpec):
        bundles = [dict(bundle.devices) for bundle in group.bundles]
        largest = [
            max(bundle.get(kind, 0) for bundle in bundles)
            for kind, _ in request.devices
        ]
        return (*scalars, *devices, *largest)
    if request.gpu_memory > 0:
        return (*scalars, *devices, request.gpu_memory)
    return (*scalars, *devices)


def room(ledger: Ledger, request: Request, withheld: Withheld | None = None) -> Amounts:
    """Return the most of each resource that a request of this kind may take now.

    Args:
        ledger: the node's ledger.
        request: any request of the kind.
        withheld: resources that are reserved for another request.
    """
    rooms = []
    for home in ledger.homes(request):
        is_concerned = withheld is not None and withheld.home is home
        rooms.append(_room_in(home, request, withheld if is_concerned else None))
    # A member of a group that is not granted has no room.
    return tuple(map(max, zip(*rooms, strict=True))) or (-1,) * len(amounts_of(request))


def _room_in(home: Ledger, request: Request, withheld: Withheld | None) -> Amounts:
    kept = NOTHING if withheld is None else withheld.kept
    barred = NOTHING if withheld is None else withheld.barred
    rooms = [home.free.get(name, 0) - kept.get(name, 0) for name, _ in request.scalars]
    sets = [(home.device_sets.get(kind), kind) for kind, _ in request.devices]
    is_group = isinstance(request.placement_group, PlacementGroupSpec)
    if is_group:
        rooms += [
            devices.free_parts(barred.get(kind, 0)) if devices else -1
            for devices, kind in sets
        ]
    rooms += [
        devices.room(request, barred.get(kind, 0)) if devices else -1
        for devices, kind in sets
    ]
    if request.gpu_memory > 0 and not is_group:
        rooms.append(max(each.most_free_memory() if each else -1 for each, _ in sets))
    return tuple(rooms)
