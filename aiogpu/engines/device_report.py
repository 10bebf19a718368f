"""Reports the devices of this machine and what runs on them, without a node.

Devices are detected as a node detects them, so the report shows what a node would share
out. Nothing stays open and nothing is reserved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.accelerators.base import Accelerator, DeviceWatch, Health, Sample
from aiogpu.accelerators.listed_devices import read
from aiogpu.accelerators.nvidia import BY_BUS, ORDER, inventory
from aiogpu.accelerators.registry import vendors
from aiogpu.accelerators.visible import VISIBLE, entries
from aiogpu.core.model.request import Device
from aiogpu.core.model.units import GPU
from aiogpu.engines.devices import detect, in_thread
from aiogpu.linux.procfs import origins_of
from aiogpu.observe.status import OtherProcess

BUS: Final = "/sys/bus/pci/devices"


@dataclass(frozen=True, slots=True)
class DetectedDevice:
    """One device, and what its driver reports now.

    Attributes:
        kind: the name of the resource, "GPU".
        device: what it is.
        sample: what is on it; None where its driver is not asked.
        health: whether it is well; None where its driver is not asked.
        processes: those of `sample`, with their names; None where none are listed.
        numa_node: where it is attached; None where the kernel does not say.
        cpus: those near it, such as "0-15,64-79"; "" where the kernel does not say.
    """

    kind: str
    device: Device
    sample: Sample | None = None
    health: Health | None = None
    processes: tuple[OtherProcess, ...] | None = None
    numa_node: int | None = None
    cpus: str = ""


class DeviceReport(NamedTuple):
    """The devices of this machine that a node would share out.

    Attributes:
        seen: the devices, those of a kind together.
        notes: explanations for people, such as why there are no devices.
    """

    seen: tuple[DetectedDevice, ...]
    notes: tuple[str, ...]


async def probe_devices(environ: Mapping[str, str] = os.environ) -> DeviceReport:
    """Detect and examine the devices; drivers block, so threads ask them.

    Args:
        environ: says which devices a node may share out.

    Raises:
        DeviceError: `environ` names devices that are not there.
    """
    found = await detect(await in_thread(vendors), environ, {})
    seen = [
        one
        for each in found
        for one in await in_thread(lambda: _examine_all(each.vendor, each.devices))  # noqa: B023 - awaited at once
    ]
    notes = await in_thread(lambda: _notes(seen, environ))
    return DeviceReport(tuple(seen), tuple(notes))


def _examine_all(
    vendor: Accelerator, devices: tuple[Device, ...]
) -> list[DetectedDevice]:
    watch = vendor.watch()
    is_asked = any(map(watch.knows, devices))
    if is_asked:
        watch.open()
    try:
        return [_examine(vendor.kind, device, watch) for device in devices]
    finally:
        if is_asked:
            watch.close()


def _examine(kind: str, device: Device, watch: DeviceWatch) -> DetectedDevice:
    numa_node, cpus = place_of(device.pci)
    if not watch.knows(device):
        return DetectedDevice(kind, device, numa_node=numa_node, cpus=cpus)
    sample = watch.look(device)
    return DetectedDevice(
        *(kind, device, sample, watch.check(device), _processes(sample)),
        *(numa_node, cpus),
    )


def _processes(sample: Sample) -> tuple[OtherProcess, ...] | None:
    if sample.processes is None:
        return None
    origins = origins_of(sample.living)
    return tuple(
        OtherProcess(pid, origins[pid].name if pid in origins else "", memory)
        for pid, memory in sample.processes.items()
    )


def place_of(pci: str | None, bus: str | Path = BUS) -> tuple[int | None, str]:
    """The NUMA node of a device, and the CPUs near it.

    Source: the kernel's "sysfs-bus-pci" (`numa_node`, `local_cpulist`).

    Args:
        pci: its address on the PCI bus, such as "00000000:3B:00.0"; None if unknown.
        bus: where the kernel tells of that bus.
    """
    if pci is None:
        return None, ""
    domain, _, rest = pci.lower().partition(":")
    # NVML writes eight digits of the domain, the kernel four at least.
    folder = os.path.join(bus, f"{domain.lstrip('0').zfill(4)}:{rest}")
    node = read(folder, "numa_node")
    # -1 stands for a machine that has but one.
    return int(node) if node.isdigit() else None, read(folder, "local_cpulist")


def _notes(seen: list[DetectedDevice], environ: Mapping[str, str]) -> list[str]:
    """Explain which GPUs the report leaves out."""
    shown = [one.device for one in seen if one.kind == GPU]
    text = environ.get(VISIBLE)
    if text is not None and not shown and not entries(text):
        return [f"No GPUs: {VISIBLE}={text!r} names none."]
    if shown and text is None:
        return []
    there = inventory()
    if not shown:
        return [f"No GPUs: {there.problem or str(there).rstrip('.')}."]
    if there.count is None:
        return [f"Nothing is known of these GPUs: {there.problem}."]
    order = environ.get(ORDER)
    if order not in (None, "", BY_BUS) and any(d.uuid is None for d in shown):
        return [
            f"{ORDER}={order!r}: only CUDA knows which GPUs the indices in "
            f"{VISIBLE}={text!r} name; name them by their UUIDs."
        ]
    wholes = {device.parent or device.uuid or device.id for device in shown}
    left = there.count - len(wholes)
    if left > 0:
        return [f"{VISIBLE}={text!r} leaves {left} of {there.count} GPUs out."]
    return []
