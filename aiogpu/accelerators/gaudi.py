"""Intel Gaudi: detected in sysfs, assigned by `HABANA_VISIBLE_MODULES`.

A Gaudi cannot be shared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from aiogpu.core.model.request import Device

from .listed_devices import ListedAccelerator, numbered, pci_address, read
from .types import INTEL_GAUDI

CLASSES: Final = (("accel", "sys/class/accel"), ("hl", "sys/class/habanalabs"))
"""Name and folder of the devices; the second in kernels before 6.2."""
VENDOR: Final = "0x1da3"
"""Habana's id on the PCI bus."""
TYPES: Final = {
    "0x1000": INTEL_GAUDI,
    "0x1010": INTEL_GAUDI,
    "0x1020": f"{INTEL_GAUDI}2",
    "0x1060": f"{INTEL_GAUDI}3",
}
"""Types by the PCI device id; "Intel-" and the product's name, as in Ray."""


class Gaudi(ListedAccelerator):
    """Gaudis, the devices behind `resources={"HPU": n}`."""

    kind = "HPU"
    option = "resources['HPU']"
    variable = "HABANA_VISIBLE_MODULES"
    singular = "Gaudi"

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the PCI device id: "0x1000" is "Intel-GAUDI"."""
        return TYPES.get((name or "").lower())

    def detect(self, environ: Mapping[str, str]) -> list[Device]:
        """Return the Gaudis by their module, the slot of the board.

        The variable counts modules too.
        """
        del environ
        devices: list[Device] = []
        for prefix, folder in CLASSES:
            for _, path in numbered(prefix, self.root, folder):
                device = os.path.join(path, "device")
                if read(device, "vendor").lower() == VENDOR:
                    module = read(device, "module_id")
                    devices.append(
                        Device(
                            int(module) if module.isdigit() else len(devices),
                            type=self.type_of(read(device, "device")),
                            pci=pci_address(device),
                        )
                    )
            if devices:
                break
        return sorted(devices, key=lambda device: int(device.id))
