"""Intel Gaudi: detected in sysfs, assigned by `HABANA_VISIBLE_MODULES`.

Gaudis cannot be shared. No library of Habana's is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.devices import Device

from .listing import Id, choose, is_left_alone, joined, listed_in
from .quantities import whole_devices
from .sysfs import numbered, pci_address, read
from .types import INTEL_GAUDI
from .unwatched import Unwatched

CLASSES: Final = (("accel", "sys/class/accel"), ("hl", "sys/class/habanalabs"))
"""How devices are called and where they stand; the second in kernels before 6.2."""
VENDOR: Final = "0x1da3"
"""Habana's, on the PCI bus."""
TYPES: Final = {
    "0x1000": INTEL_GAUDI,
    "0x1010": INTEL_GAUDI,
    "0x1020": f"{INTEL_GAUDI}2",
    "0x1060": f"{INTEL_GAUDI}3",
}
"""Types by the PCI device id; "Intel-" and the product's name, as in Ray."""


class Gaudi:
    """Gaudis, the devices behind `resources={"HPU": n}`.

    Args:
        root: the directory under which the kernel's files are looked for.
    """

    kind: Final = "HPU"
    option: Final = "resources['HPU']"
    variable: Final = "HABANA_VISIBLE_MODULES"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def __repr__(self) -> str:
        return "<Gaudi HPU>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which Gaudis a node may share out.

        Args:
            environ: read for `HABANA_VISIBLE_MODULES`.
            wanted: how many the user gave, maybe more than there are unless the
                variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        listed = listed_in(environ, self.variable)
        return choose(self.option, wanted, self._detect(), listed)

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variable gives a worker these Gaudis and no others."""
        if is_left_alone(self.variable, environ):
            return {}
        return {self.variable: joined(ids)}

    def quantity(self, value: object) -> int:
        """Turn a number of whole Gaudis into parts; raises `OptionError`."""
        return whole_devices(self.option, value, "Gaudi")

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the PCI device id: "0x1000" is "Intel-GAUDI"."""
        return TYPES.get((name or "").lower())

    def watch(self) -> Unwatched:
        """Nobody is asked what is on a Gaudi."""
        return Unwatched()

    def _detect(self) -> tuple[Device, ...]:
        found: list[Device] = []
        for prefix, folder in CLASSES:
            for _, path in numbered(prefix, self._root, folder):
                device = os.path.join(path, "device")
                if read(device, "vendor").lower() == VENDOR:
                    # The variable counts modules, the slots of the board.
                    module = read(device, "module_id")
                    found.append(
                        Device(
                            int(module) if module.isdigit() else len(found),
                            type=self.type_of(read(device, "device")),
                            pci=pci_address(device),
                        )
                    )
            if found:
                break
        return tuple(sorted(found, key=lambda device: int(device.id)))
