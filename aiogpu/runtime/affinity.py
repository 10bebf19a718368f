"""Which CPUs are near which devices, and whether workers are to be pinned there.

Sources: the kernel's "sysfs-bus-pci" (`local_cpulist`), sched_setaffinity(2), the
kernel's cgroup-v2 (`cpuset.cpus.effective`) and cgroup-v1 (`cpuset.effective_cpus`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from aiogpu.core.model.request import Device
from aiogpu.linux.cgroup_hierarchy import cgroup_folders

ROOT = Path("/")
LARGEST: Final = 1 << 16
"""CPU numbers from here on are no such thing."""
_CPUSETS: Final = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")


class Affinity:
    """The CPUs near each of a node's GPUs, read once.

    Attributes:
        usable: CPUs that this process may use.
    """

    def __init__(self, devices: Sequence[Device], root: Path | None = None) -> None:
        root = root or ROOT
        self.usable = frozenset(os.sched_getaffinity(0))
        self._near: tuple[frozenset[int], ...] = ()
        # Who has chosen CPUs for this process has chosen them for its workers.
        if any(device.pci for device in devices) and self.usable >= _given(root):
            self._near = tuple(_local(device, root) for device in devices)

    def __repr__(self) -> str:
        return f"<Affinity {len(self._near)} devices, {len(self.usable)} CPUs>"

    def near(self, indices: Iterable[int]) -> tuple[int, ...]:
        """CPUs for a worker with these devices; empty where it may use any."""
        if not self._near:
            return ()
        each = [self._near[index] for index in indices]
        if not all(each):
            return ()  # of one of them nobody knows
        found = self.usable.intersection(frozenset().union(*each))
        return () if found == self.usable else tuple(sorted(found))


def _local(device: Device, root: Path) -> frozenset[int]:
    """The CPUs near a device, none where the kernel does not say."""
    if device.pci is None:
        return frozenset()
    domain, _, rest = device.pci.lower().partition(":")
    # NVML writes eight digits of the domain, the kernel four at least.
    name = f"{domain[-8:].lstrip('0').zfill(4)}:{rest}"
    return _cpus_in(root / "sys/bus/pci/devices" / name / "local_cpulist")


def _given(root: Path) -> frozenset[int]:
    """The CPUs that a process here may use which nobody has pinned."""
    online = _cpus_in(root / "sys/devices/system/cpu/online")
    for folder in cgroup_folders(root / "proc", "cpuset"):
        for file in _CPUSETS:
            if found := _cpus_in(folder / file):
                return online & found if online else found
    return online


def _cpus_in(file: Path) -> frozenset[int]:
    """A list such as "0-3,8"; empty if it cannot be read or makes no sense."""
    cpus: set[int] = set()
    try:
        for part in file.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            if part:
                cpus.update(range(int(first), min(int(last or first), LARGEST) + 1))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cpus)
