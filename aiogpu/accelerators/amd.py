"""AMD GPUs: detected in sysfs, assigned by `HIP_VISIBLE_DEVICES`.

The kernel's compute driver (KFD) lists them in the order in which HIP counts them. A
container can read only the GPUs that it was given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import GPU
from aiogpu.errors import DeviceError

from . import types
from .listed_devices import Listed, ListedAccelerator, entries, numbered, read

NODES: Final = "sys/class/kfd/kfd/topology/nodes"
ROCR: Final = "ROCR_VISIBLE_DEVICES"
CUDA: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that HIP reads if its own is not set."""
DEVICE_MEMORY: Final = ("1", "2")
"""Heap types of memory on the card (the kernel's uapi/linux/kfd_ioctl.h)."""
TYPES: Final = {
    0x66A1: "AMD-Instinct-MI50",
    0x738C: types.AMD_INSTINCT_MI100,
    0x7408: types.AMD_INSTINCT_MI250x,
    0x740C: types.AMD_INSTINCT_MI250,
    0x740F: types.AMD_INSTINCT_MI210,
    0x74A0: types.AMD_INSTINCT_MI300A,
    0x74A1: types.AMD_INSTINCT_MI300x,
    0x74A2: types.AMD_INSTINCT_MI308x,
    0x74A5: types.AMD_INSTINCT_MI325x,
    0x74A9: types.AMD_INSTINCT_MI300x_HF,
    0x75A0: types.AMD_INSTINCT_MI350x,
    0x75A3: types.AMD_INSTINCT_MI355x,
    0x6798: types.AMD_RADEON_R9_200_HD_7900,
    0x6799: types.AMD_RADEON_HD_7900,
    0x679A: types.AMD_RADEON_HD_7900,
    0x679B: types.AMD_RADEON_HD_7900,
}
"""Types by the PCI device id: Ray's table, but for the MI308X by Ray's constant."""


class Amd(ListedAccelerator):
    """AMD GPUs behind `num_gpus`, on nodes where NVIDIA has none."""

    kind = GPU
    option = "num_gpus"
    variable = "HIP_VISIBLE_DEVICES"
    # HIP treats an empty variable as unset.
    hide_all = "-1"

    def listed(
        self, environ: Mapping[str, str], there: Sequence[Device]
    ) -> Listed | None:
        """Return the restriction of the node: `HIP_`, else `CUDA_VISIBLE_DEVICES`.

        Raises:
            DeviceError: an entry is ill-formed or repeated; or
                `ROCR_VISIBLE_DEVICES` is set alone, which renumbers the devices below
                HIP.
        """
        if self.variable in environ:
            text = environ[self.variable]
            return self.variable, text, entries(self.variable, text)
        if not there:
            return None  # CUDA's variable then refers to another vendor's GPUs
        text = environ.get(CUDA, "")
        if text:
            return CUDA, text, entries(CUDA, text)
        if ROCR in environ:
            raise DeviceError(
                f"{ROCR} is set and {self.variable} is not: {ROCR} renumbers the GPUs "
                f"that {self.variable}, which aiogpu sets for tasks, counts. Use "
                f"{self.variable} instead of {ROCR}."
            )
        return None

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the PCI device id, as hexadecimal text: "0x74a1"."""
        try:
            return TYPES.get(int(name or "", 16))
        except ValueError:
            return None

    def detect(self, environ: Mapping[str, str]) -> list[Device]:
        """Return the GPUs that KFD shows to this process."""
        del environ
        gpus: list[Device] = []
        for _, node in numbered("", self.root, NODES):
            # A CPU has the id 0; the id of a GPU of another container cannot be read.
            if read(node, "gpu_id") not in ("", "0"):
                facts = _facts(read(node, "properties"))
                gpus.append(_device(len(gpus), node, facts))
        return gpus


def _facts(text: str) -> dict[str, int]:
    """Parse lines of a name and a number, as KFD writes them."""
    pairs = (line.split() for line in text.splitlines())
    return {
        pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()
    }


def _device(index: int, node: str, facts: Mapping[str, int]) -> Device:
    unique, place = facts.get("unique_id", 0), facts.get("location_id", 0)
    banks = (
        _facts(read(path, "properties"))
        for _, path in numbered("", os.path.join(node, "mem_banks"))
    )
    return Device(
        index,
        type=TYPES.get(facts.get("device_id", 0)),
        uuid=f"GPU-{unique:016x}" if unique else None,
        memory=sum(
            bank.get("size_in_bytes", 0)
            for bank in banks
            if str(bank.get("heap_type")) in DEVICE_MEMORY
        ),
        pci=(
            f"{facts.get('domain', 0):08X}:{place >> 8 & 0xFF:02X}"
            f":{place >> 3 & 0x1F:02X}.{place & 7:X}"
        ),
    )
