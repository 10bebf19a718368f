"""What a node has to share out: declared in `init`, or detected on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiogpu.accelerators.registry import kinds, vendors
from aiogpu.core.model.request import Device
from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, UNIT, quantity, size
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.detection import detect, in_thread
from aiogpu.linux.cgroup_hierarchy import usable_cpus
from aiogpu.linux.procfs import MemoryBounds

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator

NEARLY: Final = 1 / 16
"""By how much a declared memory may be off: the driver keeps some of "80 GB"."""

_log: Final = logging.getLogger(__name__)


async def take_inventory(
    options: NodeOptions,
) -> tuple[Ledger, tuple[Accelerator, ...]]:
    """Detect what was not declared; drivers are asked in threads, for they block.

    Returns:
        What there is, and the vendors that are in use: the one of the GPUs, and those
        of other kinds that have devices here. The variables of the rest are nobody's
        affair.

    Raises:
        DeviceError: the devices asked for are not there.
    """
    found = await detect(
        await in_thread(vendors), dict(os.environ), _declared_devices(options)
    )
    device_sets = [DeviceSet(each.vendor.kind, each.devices) for each in found]
    in_use = tuple(each.vendor for each in found)
    return build_ledger(options, device_sets), in_use


def _declared_devices(options: NodeOptions) -> dict[str, int]:
    known = kinds()
    wanted = {
        name: int(amount) for name, amount in options.resources.items() if name in known
    }
    if options.num_gpus is not None:
        wanted[GPU] = options.num_gpus
    return wanted


def build_ledger(options: NodeOptions, device_sets: Sequence[DeviceSet]) -> Ledger:
    """The node's resources from what was declared and what was detected.

    A type declared by `accelerator_type=`, or by one custom resource
    `accelerator_type:X`, is that of all GPUs whose type is not known; so is the memory
    declared by `gpu_memory=`. What was detected is never overruled.
    """
    cpus = usable_cpus() if options.num_cpus is None else options.num_cpus
    memory = MemoryBounds().safe_limit() if options.memory is None else options.memory
    scalars = {CPU: quantity("num_cpus", cpus), MEMORY: memory * UNIT}
    known = {*kinds(), *(devices.kind for devices in device_sets)}
    for name, amount in options.resources.items():
        if name not in known:
            scalars[name] = quantity(f"resources[{name!r}]", amount)
    others = {
        device.type
        for devices in device_sets
        if devices.kind != GPU
        for device in devices.devices
    }
    declared = options.accelerator_type
    types = [name for name in scalars if name.startswith(TYPE_PREFIX)]
    types = [name for name in types if name.removeprefix(TYPE_PREFIX) not in others]
    if declared is None and len(types) == 1:
        declared = types[0].removeprefix(TYPE_PREFIX)
    completed = [
        _completed(devices, declared, options) if devices.kind == GPU else devices
        for devices in device_sets
    ]
    for devices in completed:
        for device in devices.devices:
            if device.type is not None:
                scalars.setdefault(TYPE_PREFIX + device.type, UNIT)
    return Ledger(scalars, completed)


def _completed(
    gpus: DeviceSet, declared: str | None, options: NodeOptions
) -> DeviceSet:
    """GPUs with what was declared of them, where it was not detected."""
    memory = options.gpu_memory or 0
    given = {
        "accelerator_type": options.accelerator_type,
        "gpu_memory": options.gpu_memory and size(options.gpu_memory),
    }
    idle = [f"{name}={value!r}" for name, value in given.items() if value]
    if idle and not gpus.devices:
        _log.warning(
            "! init(%s) is said of GPUs, and this node has none; say num_gpus= as "
            "well for logical ones.",
            ", ".join(idle),
        )
    wrong = [device for device in gpus.devices if _contradicts(memory, device)]
    if wrong:
        _log.warning(
            "! init(gpu_memory=%r) is said of GPUs whose memory is not detected; GPU "
            "%s has %s, and that counts.",
            size(memory),
            wrong[0].id,
            size(wrong[0].memory),
        )
    told = options.accelerator_type
    if (
        told
        and gpus.devices
        and all(one.type not in (None, told) for one in gpus.devices)
    ):
        _log.warning(
            "! init(accelerator_type=%r) is said of GPUs whose type is not detected; "
            "GPU %s is of type %r, and that counts.",
            told,
            gpus.devices[0].id,
            gpus.devices[0].type,
        )
    return DeviceSet(
        gpus.kind,
        [
            replace(
                device, type=device.type or declared, memory=device.memory or memory
            )
            for device in gpus.devices
        ],
    )


def _contradicts(memory: int, device: Device) -> bool:
    off = abs(memory - device.memory)
    return bool(memory and device.memory) and off > NEARLY * device.memory
