"""Google TPUs: one device for each chip of this host.

Detected in `/dev`, assigned by `TPU_VISIBLE_CHIPS` and the variables for the layout of
the chips, by Ray's rules. A process has 1, 2, 4 or 8 chips. `TPU_ACCELERATOR_TYPE`
gives the type; no metadata server is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import UNIT, quantity
from aiogpu.errors import OptionError

from .listed_devices import ListedAccelerator, numbered, read

if TYPE_CHECKING:
    from .base import Id

VENDOR: Final = "0x1ae0"
"""Google's id on the PCI bus."""
TYPE: Final = "TPU_ACCELERATOR_TYPE"
"""Such as "v4-16"; set by Kubernetes."""
CHIP_BOUNDS: Final = "TPU_CHIPS_PER_HOST_BOUNDS"
HOST_BOUNDS: Final = "TPU_HOST_BOUNDS"
BOUNDS: Final = {1: "1,1,1", 2: "1,2,1"}
ONE_HOST: Final = "1,1,1"
VALID: Final = (1, 2, 4, 8)


class Tpu(ListedAccelerator):
    """TPU chips, the devices behind `resources={"TPU": n}`."""

    kind = "TPU"
    option = "resources['TPU']"
    variable = "TPU_VISIBLE_CHIPS"

    def detect(self, environ: Mapping[str, str]) -> list[Device]:
        """Return the chips of this host."""
        return [self.logical(chip, environ) for chip in range(self._count())]

    def logical(self, id_: Id, environ: Mapping[str, str]) -> Device:
        """Return the chip with this id, with the type of the slice."""
        return Device(id_, type=self.type_of(environ.get(TYPE)))

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables that give a worker these chips and no others.

        For a worker with all chips of the host they are empty: the library then detects
        the layout, also across several hosts.
        """
        variables = super().assignment(ids, environ)
        if not variables or (len(ids) > max(BOUNDS) and len(ids) == self._count()):
            return {}
        if len(ids) in BOUNDS:
            variables[CHIP_BOUNDS] = BOUNDS[len(ids)]
            variables[HOST_BOUNDS] = ONE_HOST
        return variables

    def quantity(self, value: object) -> int:
        """Convert 1, 2, 4 or 8 chips into units of 1/10 000; 0 for none.

        Raises:
            OptionError: a process cannot have that many chips.
        """
        parts = quantity(self.option, value)
        if value not in (0, *VALID):
            raise OptionError(
                f"{self.option}={value!r}: a process can have "
                f"{', '.join(map(str, VALID[:-1]))} or {VALID[-1]} chips."
            )
        return parts // UNIT * UNIT

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the slice's: "v4-16" is "TPU-V4"."""
        generation, _, size = (name or "").strip().lower().partition("-")
        generation = generation.removeprefix("tpu").removeprefix("v")
        if not size.isdigit() or not generation[:1].isdigit():
            return None
        return f"TPU-V{generation.upper()}"

    def _count(self) -> int:
        # NVIDIA's driver creates a directory /dev/accel with files of other devices.
        files = numbered("accel", self.root, "dev")
        chips = [path for _, path in files if not os.path.isdir(path)]
        groups = (group for group, _ in numbered("", self.root, "dev/vfio"))
        return len(chips) or sum(map(self._is_tpu, groups))

    def _is_tpu(self, group: int) -> bool:
        """Return whether a device of an IOMMU group is a TPU; others use VFIO too."""
        place = os.path.join(self.root, f"sys/kernel/iommu_groups/{group}/devices")
        try:
            devices = os.listdir(place)
        except OSError:
            return False
        return any(read(place, name, "vendor").lower() == VENDOR for name in devices)
