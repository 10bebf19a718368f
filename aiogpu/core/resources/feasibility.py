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
    number,
    size,
    written,
)

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device, DeviceSelector
    from aiogpu.core.resources.devices import DeviceSet


SHOWN: Final = 8
"""Sorts of devices that are told; of the rest, that there are more."""


def find_infeasible(
    capacity: Mapping[str, int],
    device_sets: Mapping[str, DeviceSet],
    request: Request,
) -> str | None:
    """A clause that says what a request could never have here, None if nothing.

    Args:
        capacity: of undivided resources, in parts.
        device_sets: the devices by kind.
        request: what is asked for.
    """
    wanted = request.accelerator_type
    kinds = [
        kind
        for kind, _ in request.devices
        if (devices := device_sets.get(kind)) and devices.wanted_type(request)
    ]
    for name, asked in request.scalars:
        there = capacity.get(name, 0)
        if there < asked:
            if kinds and wanted is not None and name == TYPE_PREFIX + wanted:
                return _no_such_type(device_sets[kinds[0]], wanted)
            given, had = (written(name, number(parts)) for parts in (asked, there))
            known = {*capacity, *device_sets} if not there else set()
            near = _like(name, known - {name})
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            return f"it lacks {name} {given} of {had}{hint}"
    for kind, amount in request.devices:
        devices = device_sets.get(kind)
        if devices is None:
            return f"it lacks {kind} {number(amount):g} of 0"
        if kind == GPU and request.gpu_memory == BY_SHARE and not amount:
            return (
                "gpu_memory='share' is the part of a GPU's memory that num_gpus is of "
                "the GPU, and num_gpus is 0"
            )
        # Memory alone is asked of one device.
        count = max(amount // UNIT, 1)
        if devices.usable(amount, request).bit_count() < count:
            return _too_few(devices, amount, count, request)
    return None


def _too_few(devices: DeviceSet, amount: int, count: int, request: Request) -> str:
    """Explain why too few devices fit a request, by the first filter that fails."""
    kind, wanted, where = devices.kind, devices.wanted_type(request), request.where
    of_type = _those(devices, devices.mask_of_type(wanted))
    suffix = f" of type {wanted}" if wanted else ""
    if wanted is not None and not of_type:
        return _no_such_type(devices, wanted)
    if len(of_type) < count:
        asked = f"{number(amount):g}" if amount else "1"
        return f"it lacks {kind} {asked} of {len(of_type)}{suffix}"
    fitting = _those(devices, devices.fitting(request))
    if len(fitting) < count:
        most = "none fulfils" if not fitting else f"only {len(fitting)} fulfil"
        return (
            f"of its {len(of_type)} {kind}{'s' * (len(of_type) > 1)}{suffix}, {most} "
            f"{where} "
            f"({_there_are(of_type, where)}{_hint(of_type, where)})"
        )
    if amount > UNIT:
        whole = [device for device in fitting if device.parent is None]
        if len(whole) < count:
            but = f"all but {len(whole)} of " if whole else ""
            return (
                f"a process can use one MIG instance only, and {but}its {len(fitting)} "
                f"{kind}s{suffix} are MIG instances: ask for {kind} {len(whole) or 1} "
                f"at most"
            )
        fitting = whole
    return _too_little_memory(fitting, count, request)


def _too_little_memory(fitting: list[Device], count: int, request: Request) -> str:
    known = [device.memory for device in fitting if device.memory]
    if len(known) < count:
        who = "its GPUs" if not known else f"{len(fitting) - len(known)} of its GPUs"
        return (
            f"it does not know how much memory {who} have: start it with "
            f'init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or leave '
            f"gpu_memory= out"
        )
    asked = size(request.gpu_memory)
    return (
        f"it lacks {count} GPU{'s' * (count > 1)} with gpu_memory {asked} "
        f"({_there_are(fitting)})"
    )


def _like(name: str, known: Iterable[str]) -> list[str]:
    """Suggest a known name that is similar to an unknown one."""
    from difflib import get_close_matches

    by_lower = {one.lower(): one for one in sorted(known)}
    return [by_lower[one] for one in get_close_matches(name.lower(), by_lower, 1)]


def _no_such_type(devices: DeviceSet, wanted: str) -> str:
    kind = devices.kind
    types = sorted({device.type for device in devices.devices if device.type})
    near = _like(wanted.lower(), [each.lower() for each in types])
    hint = "".join(f"; did you mean {t!r}?" for t in types if t.lower() in near)
    if devices.devices and not types:
        hint = (
            '; if they are, start it with init(accelerator_type="...") or '
            "`aiogpu start --accelerator-type ...`"
        )
    told = "there is none at all"
    if devices.devices:
        told = _counted(device.type or "of unknown type" for device in devices.devices)
    return f"there is no {kind} of type {wanted!r} ({told}{hint})"


def _those(devices: DeviceSet, mask: int) -> list[Device]:
    return [one for index, one in enumerate(devices.devices) if mask >> index & 1]


def _there_are(devices: list[Device], where: DeviceSelector | None = None) -> str:
    """Return what there is, by type and memory: "there are: 4 x A100 of 80GiB, 2 x T4".

    By the product's name, and with the compute capability, where these are asked for.
    """
    return _counted(" ".join(_words_of(device, where)) for device in devices)


def _hint(devices: list[Device], where: DeviceSelector | None) -> str:
    """For who has forgotten that a pattern is one of the whole name."""
    if where is None or not where.name:
        return ""
    wider = replace(where, name=f"*{where.name.strip('*')}*")
    is_near = any(wider.fits(one) and not where.fits(one) for one in devices)
    return f"; did you mean {wider.name!r}?" if is_near else ""


def _counted(sorts: Iterable[str]) -> str:
    counts = Counter(sorts)
    told = [f"{count} x {sort}" for sort, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        told.append("and others")
    return f"there are: {', '.join(told)}"


def _words_of(device: Device, where: DeviceSelector | None) -> Iterator[str]:
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
        known = device.compute_capability
        told = ".".join(map(str, known)) if known else "not known"
        yield f"(compute capability {told})"
