"""Google TPUs: one device for each chip of this host.

Detected in `/dev`, assigned by `TPU_VISIBLE_CHIPS` and the variables that say how
chips are laid out, by Ray's rules. A process has 1, 2, 4 or 8 chips. The type is that
of `TPU_ACCELERATOR_TYPE`; no metadata server is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.devices import Device
from aiogpu.core.resources import UNIT, quantity
from aiogpu.errors import OptionError

from .listing import Id, choose, is_left_alone, joined, listed_in
from .sysfs import numbered, read
from .unwatched import Unwatched

VENDOR: Final = "0x1ae0"
"""Google's, on the PCI bus."""
TYPE: Final = "TPU_ACCELERATOR_TYPE"
"""Such as "v4-16"; set where Kubernetes runs the program."""
CHIP_BOUNDS: Final = "TPU_CHIPS_PER_HOST_BOUNDS"
HOST_BOUNDS: Final = "TPU_HOST_BOUNDS"
BOUNDS: Final = {1: "1,1,1", 2: "1,2,1"}
ONE_HOST: Final = "1,1,1"
VALID: Final = (1, 2, 4, 8)


class Tpu:
    """TPU chips, the devices behind `resources={"TPU": n}`.

    Args:
        root: the directory under which the kernel's files are looked for.
    """

    kind: Final = "TPU"
    option: Final = "resources['TPU']"
    variable: Final = "TPU_VISIBLE_CHIPS"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def __repr__(self) -> str:
        return "<Tpu TPU>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which chips a node may share out.

        Args:
            environ: read for `TPU_VISIBLE_CHIPS` and `TPU_ACCELERATOR_TYPE`.
            wanted: how many the user gave, maybe more than there are unless the
                variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        type_ = self.type_of(environ.get(TYPE))
        listed = listed_in(environ, self.variable)
        there = [Device(chip, type=type_) for chip in range(self._count())]
        return choose(
            self.option, wanted, there, listed, lambda id_: Device(id_, type=type_)
        )

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variables give a worker these chips and no others.

        A worker with all chips of the host is told nothing: then the library goes by
        the layout that it finds, also among several hosts.
        """
        if is_left_alone(self.variable, environ):
            return {}
        if len(ids) > max(BOUNDS) and len(ids) == self._count():
            return {}
        variables = {self.variable: joined(ids)}
        if len(ids) in BOUNDS:
            variables[CHIP_BOUNDS] = BOUNDS[len(ids)]
            variables[HOST_BOUNDS] = ONE_HOST
        return variables

    def quantity(self, value: object) -> int:
        """Turn 1, 2, 4 or 8 chips into parts, 0 for none; raises `OptionError`."""
        parts = quantity(self.option, value)
        if value not in (0, *VALID):
            raise OptionError(
                f"{self.option}={value!r} is no number of chips that a process can "
                f"have; give {', '.join(map(str, VALID[:-1]))} or {VALID[-1]}."
            )
        return parts // UNIT * UNIT

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the slice's: "v4-16" is "TPU-V4"."""
        generation, _, size = (name or "").strip().lower().partition("-")
        generation = generation.removeprefix("tpu").removeprefix("v")
        if not size.isdigit() or not generation[:1].isdigit():
            return None
        return f"TPU-V{generation.upper()}"

    def watch(self) -> Unwatched:
        """Nobody is asked what is on a chip."""
        return Unwatched()

    def _count(self) -> int:
        # NVIDIA's driver makes a directory /dev/accel, with another's devices in it.
        files = numbered("accel", self._root, "dev")
        chips = [path for _, path in files if not os.path.isdir(path)]
        return len(chips) or sum(map(self._is_tpu, self._groups()))

    def _groups(self) -> list[int]:
        return [group for group, _ in numbered("", self._root, "dev/vfio")]

    def _is_tpu(self, group: int) -> bool:
        """Whether a device of an IOMMU group is a TPU; others use VFIO as well."""
        place = os.path.join(self._root, f"sys/kernel/iommu_groups/{group}/devices")
        try:
            devices = os.listdir(place)
        except OSError:
            return False
        return any(read(place, name, "vendor").lower() == VENDOR for name in devices)
