"""Explains what even an idle node lacks for a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import (
    BY_SHARE,
    GPU,
    TYPE_PREFIX,
    UNIT,
    format_amount,
    number,
    size,
)

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device, DeviceSelector
    from aiogpu.core.resources.devices import DeviceSet


SHOWN: Final = 8
"""Types of devices that a message lists at most."""


def find_infeasible(
    capacity: Mapping[str, int],
    device_sets: Mapping[str, DeviceSet],
    request: Request,
) -> str | None:
    """Return a clause about what an idle node lacks for a request; None if nothing.

    Args:
        capacity: capacity of the resources without devices, in parts.
        device_sets: the devices by kind.
        request: the request.
    """
    wanted = request.accelerator_type
    kinds = [
        kind
        for kind, _ in request.devices
        if (devices := device_sets.get(kind)) and devices.wanted_type(request)
    ]
    for name, asked in request.scalars:
        total = capacity.get(name, 0)
        if total < asked:
            if kinds and wanted is not None and name == TYPE_PREFIX + wanted:
                return _no_such_type(device_sets[kinds[0]], wanted)
            needed, present = (format_amount(name, number(n)) for n in (asked, total))
            known = {*capacity, *device_sets} if not total else set()
            similar = _similar(name, known - {name})
            hint = f" (did you mean {similar[0]!r}?)" if similar else ""
            return f"it lacks {name} {needed} of {present}{hint}"
    for kind, amount in request.devices:
        devices = device_sets.get(kind)
        if devices is None:
            return f"it lacks {kind} {number(amount):g} of 0"
        if kind == GPU and request.gpu_memory == BY_SHARE and not amount:
            return (
                "gpu_memory='share' is the part of a GPU's memory that num_gpus is of "
                "the GPU, and num_gpus is 0"
            )
        # A request for memory only needs one device.
        count = max(amount // UNIT, 1)
        if devices.usable(amount, request).bit_count() < count:
            return _too_few(devices, amount, count, request)
    return None


def _too_few(devices: DeviceSet, amount: int, count: int, request: Request) -> str:
    """Explain why too few devices fit a request, by the first filter that fails."""
    kind, wanted, where = devices.kind, devices.wanted_type(request), request.where
    of_type = _in_mask(devices, devices.mask_of_type(wanted))
    suffix = f" of type {wanted}" if wanted else ""
    if wanted is not None and not of_type:
        return _no_such_type(devices, wanted)
    if len(of_type) < count:
        asked = f"{number(amount):g}" if amount else "1"
        return f"it lacks {kind} {asked} of {len(of_type)}{suffix}"
    fitting = _in_mask(devices, devices.fitting(request))
    if len(fitting) < count:
        most = "none fulfils" if not fitting else f"only {len(fitting)} fulfil"
        return (
            f"of its {len(of_type)} {kind}{'s' * (len(of_type) > 1)}{suffix}, {most} "
            f"{where} "
            f"({_list_devices(of_type, where)}{_pattern_hint(of_type, where)})"
        )
    if amount > UNIT:
        whole = [device for device in fitting if device.parent is None]
        if len(whole) < count:
            but = f"all but {len(whole)} of " if whole else ""
            return (
                f"a process can use only one MIG instance, and {but}its {len(fitting)} "
                f"{kind}s{suffix} are MIG instances: ask for at most {kind} "
                f"{len(whole) or 1}"
            )
        fitting = whole
    return _too_little_memory(fitting, count, request)


def _too_little_memory(fitting: list[Device], count: int, request: Request) -> str:
    known = [device.memory for device in fitting if device.memory]
    if len(known) < count:
        who = "its GPUs" if not known else f"{len(fitting) - len(known)} of its GPUs"
        first = next(device for device in fitting if not device.memory)
        have = "have"
        if first.name:
            have = "has"
            who = f"GPU {first.id} ({first.name}), which uses the machine's,"
        return (
            f"it does not know how much memory {who} {have}: start it with "
            f'init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or leave '
            f"gpu_memory= out"
        )
    asked = size(request.gpu_memory)
    return (
        f"it lacks {count} GPU{'s' * (count > 1)} with gpu_memory {asked} "
        f"({_list_devices(fitting)})"
    )


def _similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is most similar to an unknown one, if any."""
    from difflib import get_close_matches

    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    return [by_lower[match] for match in get_close_matches(name.lower(), by_lower, 1)]


def _no_such_type(devices: DeviceSet, wanted: str) -> str:
    kind = devices.kind
    types = sorted({device.type for device in devices.devices if device.type})
    similar = _similar(wanted.lower(), [each.lower() for each in types])
    hint = "".join(f"; did you mean {t!r}?" for t in types if t.lower() in similar)
    if devices.devices and not types:
        hint = (
            '; if they are, start it with init(accelerator_type="...") or '
            "`aiogpu start --accelerator-type ...`"
        )
    present = "there is none at all"
    if devices.devices:
        types_of = (device.type or "of unknown type" for device in devices.devices)
        present = _count_types(types_of)
    return f"there is no {kind} of type {wanted!r} ({present}{hint})"


def _in_mask(devices: DeviceSet, mask: int) -> list[Device]:
    numbered = enumerate(devices.devices)
    return [device for index, device in numbered if mask >> index & 1]


def _list_devices(devices: list[Device], where: DeviceSelector | None = None) -> str:
    """List devices by type and memory: "there are: 4 x A100 of 80GiB, 2 x T4".

    Shows the product name and the compute capability if `where` asks for them.
    """
    return _count_types(" ".join(_describe(device, where)) for device in devices)


def _pattern_hint(devices: list[Device], where: DeviceSelector | None) -> str:
    """Suggest a wider pattern: a pattern must match the whole product name."""
    if where is None or not where.name:
        return ""
    wider = replace(where, name=f"*{where.name.strip('*')}*")
    helps = any(wider.fits(device) and not where.fits(device) for device in devices)
    return f"; did you mean {wider.name!r}?" if helps else ""


def _count_types(types: Iterable[str]) -> str:
    counts = Counter(types)
    items = [f"{count} x {type_}" for type_, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        items.append("and others")
    return f"there are: {', '.join(items)}"


def _describe(device: Device, where: DeviceSelector | None) -> Iterator[str]:
    is_by_name = where is not None and bool(where.name)
    name = device.type or device.name
    if is_by_name and device.name:
        name = repr(device.name)
    if name or not device.memory:
        yield name or "of unknown type"
    if device.memory:
        yield f"of {size(device.memory)}" if name else size(device.memory)
    if is_by_name and not device.name:
        yield "without a name"
    if where is not None and where.least_capability > (0, 0):
        capability = device.compute_capability
        text = ".".join(map(str, capability)) if capability else "not known"
        yield f"(compute capability {text})"
