"""AMD GPUs: detected in sysfs, assigned by `HIP_VISIBLE_DEVICES`.

The kernel's compute driver (KFD) lists them in the order in which HIP counts them; a
container may read only those that it was given. No library of AMD's is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.devices import Device
from aiogpu.core.resources import GPU, device_quantity
from aiogpu.errors import DeviceError

from . import types
from .listing import Id, choose, entries, is_left_alone, joined
from .sysfs import numbered, read
from .unwatched import Unwatched

NODES: Final = "sys/class/kfd/kfd/topology/nodes"
ROCR: Final = "ROCR_VISIBLE_DEVICES"
CUDA: Final = "CUDA_VISIBLE_DEVICES"
"""What HIP goes by where its own variable is not set."""
HIDDEN: Final = "-1"
"""Hides all; to HIP an empty variable is one that is not set."""
DEVICE_MEMORY: Final = ("1", "2")
"""Types of heap that are on the card (the kernel's uapi/linux/kfd_ioctl.h)."""
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


class Amd:
    """AMD GPUs behind `num_gpus`, on nodes where NVIDIA has none.

    Args:
        root: the directory under which the kernel's files are looked for.
    """

    kind: Final = GPU
    option: Final = "num_gpus"
    variable: Final = "HIP_VISIBLE_DEVICES"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def __repr__(self) -> str:
        return "<Amd GPU>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which GPUs a node may share out.

        Args:
            environ: read for `HIP_VISIBLE_DEVICES`, or `CUDA_VISIBLE_DEVICES`, which
                HIP goes by in its absence.
            wanted: how many the user gave, maybe more than there are unless the
                variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`; or `ROCR_VISIBLE_DEVICES` is
                set without it, which renumbers the devices beneath HIP.
        """
        if wanted == 0:
            return ()
        there = self._detect()
        variable = CUDA if self.variable not in environ else self.variable
        text = environ.get(variable)
        listed = None
        if variable == CUDA and not there:
            pass  # it speaks of another vendor's GPUs
        elif text or variable != CUDA:
            listed = (variable, text or "", entries(variable, text or ""))
        elif there and ROCR in environ:
            raise DeviceError(
                f"{ROCR} is set and {self.variable} is not: the first renumbers the "
                f"GPUs for all that count them by the second, which aiogpu sets for "
                f"tasks. Use {self.variable} instead of {ROCR}."
            )
        return choose(self.option, wanted, there, listed)

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variable gives a worker these GPUs and no others."""
        if is_left_alone(self.variable, environ):
            return {}
        return {self.variable: joined(ids) or HIDDEN}

    def quantity(self, value: object) -> int:
        """Turn a `num_gpus` into parts; raises `OptionError`."""
        return device_quantity(self.option, value)

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the PCI device id, as hexadecimal text: "0x74a1"."""
        try:
            return TYPES.get(int(name or "", 16))
        except ValueError:
            return None

    def watch(self) -> Unwatched:
        """Nobody is asked what is on a GPU."""
        return Unwatched()

    def _detect(self) -> tuple[Device, ...]:
        found: list[Device] = []
        for _, node in numbered("", self._root, NODES):
            # A CPU has the id 0; of a GPU that is not for this container none is read.
            if read(node, "gpu_id") not in ("", "0"):
                facts = _facts(read(node, "properties"))
                found.append(_device(len(found), node, facts))
        return tuple(found)


def _facts(text: str) -> dict[str, int]:
    """Lines of a name and a number, as KFD writes them."""
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
