"""What a placement is asked for, and what its members say of it, checked.

Light on purpose, as `api.options` is: what it needs of the core is imported by who has
a placement alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import (
    CPU,
    GPU,
    GPU_MEMORY,
    MEMORY,
    TYPE_PREFIX,
    UNIT,
    device_quantity,
    memory_size,
    quantity,
)
from aiogpu.errors import InfeasibleError, OptionError

if TYPE_CHECKING:
    from aiogpu.core.model.request import Bundle, PlacementGroupSpec


EXAMPLE: Final = 'aiogpu.placement([{"GPU": 1, "CPU": 2}, {"GPU": 0.5}])'


def check_placement(option: str, value: object) -> PlacementGroupSpec | None:
    """Check the placement of a task or an actor; raises `OptionError`."""
    if value is None:
        return None
    placement_group: PlacementGroupSpec | None = getattr(
        type(value), "placement_group_of", lambda _: None
    )(value)
    if placement_group is None:
        raise OptionError(
            f"{option}={value!r} must be what aiogpu.placement(...) has given, or None."
        )
    return placement_group


def check_bundle(option: str, value: object) -> int:
    """Check the number of a bundle, -1 or None for any; raises `OptionError`."""
    if value is None:
        return -1
    from aiogpu.core.model.request import MOST_BUNDLES

    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not -1 <= value < MOST_BUNDLES
    ):
        raise OptionError(
            f"{option}={value!r} must be the number of a bundle, from 0 to "
            f"{MOST_BUNDLES - 1}, or -1 for any in which it fits."
        )
    return value


def within(
    placement_group: PlacementGroupSpec | None,
    index: int,
    asking: Callable[[int], Request],
    cpus: int | None,
) -> Request:
    """Return what a member of a placement group asks for, in one of its bundles.

    Args:
        placement_group: whose member it is.
        index: of the bundle, -1 for any.
        asking: what it asks for, given how many CPUs.
        cpus: those that were named; None for one where its bundle has one, else none.

    Raises:
        OptionError: there is no such bundle.
        InfeasibleError: it fits in none.
    """
    from dataclasses import replace

    from aiogpu.core.model.request import BundleRef

    if placement_group is None:
        raise OptionError(
            f"bundle={index} is the number of a placement's bundle; say placement= as "
            f"well."
        )
    if index >= len(placement_group.bundles):
        raise OptionError(
            f"bundle={index} is none of {placement_group.name}, which has the bundles "
            f"0 to "
            f"{len(placement_group.bundles) - 1}: {placement_group}."
        )
    wanted = [asking(UNIT), asking(0)] if cpus is None else [asking(cpus)]
    for request in wanted:
        if placement_group.holding(index, request):
            return replace(
                request,
                placement_group=BundleRef(
                    placement_group.key, placement_group.name, index
                ),
            )
    which = f"any bundle of {placement_group.name}, {placement_group}"
    if index >= 0:
        bundle = placement_group.bundles[index]
        which = f"bundle {index} of {placement_group.name}, {bundle}"
    raise InfeasibleError(
        f"{wanted[-1]} does not fit into {which}. Ask for less, or for a placement "
        f"with larger bundles."
    )


def placement_group_of(
    bundles: object, strategy: object, name: str, key: str
) -> PlacementGroupSpec:
    """Return what the node is asked for a placement.

    Raises:
        OptionError: names what is ill-valued, and what is allowed.
    """
    from aiogpu.core.model.request import MOST_BUNDLES, STRATEGIES, PlacementGroupSpec

    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        allowed = ", ".join(map(repr, STRATEGIES))
        raise OptionError(f"strategy={strategy!r} must be one of {allowed}.")
    if isinstance(bundles, str | bytes | Mapping) or not isinstance(bundles, Iterable):
        raise OptionError(
            f"bundles={bundles!r} must be a list of dicts, such as {EXAMPLE}."
        )
    found = tuple(_bundle(f"bundles[{i}]", one) for i, one in enumerate(bundles))
    if not 0 < len(found) <= MOST_BUNDLES:
        raise OptionError(
            f"bundles has {len(found)} bundles; give from 1 to {MOST_BUNDLES}, such as "
            f"{EXAMPLE}."
        )
    return PlacementGroupSpec(key, name, strategy, found)


def _bytes(option: str, value: object) -> int:
    """Bytes of each GPU; raises `OptionError`."""
    count = memory_size(option, value)
    if count == 0:
        raise OptionError(
            f"{option}={value!r} asks for nothing; leave it out, or give what the "
            f'bundle is to have of each GPU, such as "6GiB".'
        )
    return count


def _bundle(option: str, value: object) -> Bundle:
    from aiogpu.api.resources import check_resources, devices_among
    from aiogpu.core.model.request import Bundle

    if not isinstance(value, Mapping):
        raise OptionError(
            f"{option}={value!r} must be a dict of names to quantities, such as "
            f'{{"GPU": 1, "CPU": 2}}.'
        )
    rest: dict[object, Any] = dict(value)
    amounts = {name: rest.pop(name) for name in (CPU, GPU, MEMORY) if name in rest}
    gpu_memory = 0
    if GPU_MEMORY in rest:
        gpu_memory = _bytes(f"{option}['gpu_memory']", rest.pop(GPU_MEMORY))
    of_types = [
        name.removeprefix(TYPE_PREFIX)
        for name in rest
        if isinstance(name, str) and name.startswith(TYPE_PREFIX)
    ]
    if len(of_types) > 1:
        raise OptionError(f"{option} names more than one accelerator_type.")
    for of_type in of_types:
        del rest[TYPE_PREFIX + of_type]
    scalars = check_resources(option, rest)
    devices = devices_among(scalars)
    for kind in devices:
        del scalars[kind]
    devices[GPU] = device_quantity(f"{option}['GPU']", amounts.get(GPU, 0))
    scalars[CPU] = quantity(f"{option}['CPU']", amounts.get(CPU, 0))
    scalars[MEMORY] = UNIT * memory_size(f"{option}['memory']", amounts.get(MEMORY, 0))
    request = Request.of(scalars, devices, *of_types, gpu_memory=gpu_memory)
    if not request.scalars and not request.devices:
        raise OptionError(
            f"{option}={value!r} asks for nothing; say what it holds, such as "
            f'{{"GPU": 1, "CPU": 2}}.'
        )
    return Bundle.of(request)
