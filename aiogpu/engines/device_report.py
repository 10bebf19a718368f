"""Reports the devices of this machine and the processes on them, without a node.

Devices are detected as a node detects them, so the report shows the devices that a node
would share out. No library stays open and no device is reserved.
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
    """A device with the current reports of its driver.

    Attributes:
        kind: the name of the resource, "GPU".
        device: the device.
        sample: its load; None if its driver is not asked.
        health: its health; None if its driver is not asked.
        processes: processes of `sample` with their names; None if none are listed.
        numa_node: its NUMA node; None if the kernel does not report it.
        cpus: CPUs near it, such as "0-15,64-79"; "" if the kernel does not report them.
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
        seen: the devices, grouped by kind.
        notes: explanations for people, such as why there are no devices.
    """

    seen: tuple[DetectedDevice, ...]
    notes: tuple[str, ...]


async def probe_devices(environ: Mapping[str, str] = os.environ) -> DeviceReport:
    """Detect and examine the devices, in threads, since drivers block.

    Args:
        environ: restricts the devices that a node may share out.

    Raises:
        DeviceError: `environ` names devices that do not exist.
    """
    detections = await detect(await in_thread(vendors), environ, {})
    seen = [
        device
        for detection in detections
        for device in await in_thread(
            lambda: _examine_all(detection.vendor, detection.devices)  # noqa: B023 - awaited at once
        )
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
        kind=kind,
        device=device,
        sample=sample,
        health=watch.check(device),
        processes=_processes(sample),
        numa_node=numa_node,
        cpus=cpus,
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
    """Return the NUMA node of a device, and the CPUs near it.

    Source: the kernel's "sysfs-bus-pci" (`numa_node`, `local_cpulist`).

    Args:
        pci: its address on the PCI bus, such as "00000000:3B:00.0"; None if unknown.
        bus: directory of the bus in sysfs.
    """
    if pci is None:
        return None, ""
    domain, _, rest = pci.lower().partition(":")
    # NVML writes eight digits of the domain, the kernel at least four.
    folder = os.path.join(bus, f"{domain.lstrip('0').zfill(4)}:{rest}")
    node = read(folder, "numa_node")
    # -1 means that the machine has a single node.
    return int(node) if node.isdigit() else None, read(folder, "local_cpulist")


def _notes(seen: list[DetectedDevice], environ: Mapping[str, str]) -> list[str]:
    """Explain which GPUs the report omits."""
    shown = [detected.device for detected in seen if detected.kind == GPU]
    text = environ.get(VISIBLE)
    if text is not None and not shown and not entries(text):
        return [f"No GPUs: {VISIBLE}={text!r} names none."]
    if shown and text is None:
        return []
    there = inventory()
    if not shown:
        return [f"No GPUs: {there.problem or str(there).rstrip('.')}."]
    if there.count is None:
        return [f"Nothing is known about these GPUs: {there.problem}."]
    order = environ.get(ORDER)
    if order not in (None, "", BY_BUS) and any(d.uuid is None for d in shown):
        return [
            f"{ORDER}={order!r}: only CUDA knows which GPUs the indices in "
            f"{VISIBLE}={text!r} name; name them by their UUIDs."
        ]
    gpus = {device.parent or device.uuid or device.id for device in shown}
    hidden = there.count - len(gpus)
    if hidden > 0:
        return [f"{VISIBLE}={text!r} hides {hidden} of {there.count} GPUs."]
    return []
