"""Intel GPUs: detected in sysfs, assigned by `ZE_AFFINITY_MASK`.

Discrete cards only: the one that is part of the processor is on bus 0 and is not
shared out. No library of Intel's is loaded. An `ONEAPI_DEVICE_SELECTOR` that names
indices restricts the node too, and is widened for workers: it would count among the
few devices that the mask leaves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from aiogpu.core.devices import Device
from aiogpu.core.resources import GPU, device_quantity

from .listing import NONE, Id, choose, entries, index, is_left_alone, joined
from .sysfs import numbered, pci_address, read
from .unwatched import Unwatched

CARDS: Final = "sys/class/drm"
VENDOR: Final = 0x8086
DRIVERS: Final = ("i915", "xe")
SELECTOR: Final = "ONEAPI_DEVICE_SELECTOR"
BACKEND: Final = "level_zero:"
ALL: Final = ("", "*", "gpu")
"""After the backend's name: every GPU."""
HIDDEN: Final = "999999"
"""An index that no card has: an empty mask would restrict nothing."""
NAMES: Final = {
    0x0BD5: "Intel(R) Data Center GPU Max 1550",
    0x0BD6: "Intel(R) Data Center GPU Max 1550",
    0x0BD9: "Intel(R) Data Center GPU Max 1100",
    0x0BDA: "Intel(R) Data Center GPU Max 1100",
    0x0BDB: "Intel(R) Data Center GPU Max 1100",
}
"""Products by the PCI device id (pci-ids.ucw.cz)."""


class IntelGpu:
    """Intel GPUs behind `num_gpus`, on nodes where NVIDIA and AMD have none.

    Args:
        root: the directory under which the kernel's files are looked for.
    """

    kind: Final = GPU
    option: Final = "num_gpus"
    variable: Final = "ZE_AFFINITY_MASK"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def __repr__(self) -> str:
        return "<IntelGpu GPU>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which GPUs a node may share out.

        Args:
            environ: read for `ZE_AFFINITY_MASK`, whose entries may name parts of a
                card ("0.1"), else for `ONEAPI_DEVICE_SELECTOR`.
            wanted: how many the user gave, maybe more than there are unless a
                variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        there = self._detect()
        listed = _listed(self.variable, environ)
        if listed is not None:
            there = (*there, *_parts(there, listed[2]))
        return choose(self.option, wanted, there, listed)

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variables give a worker these GPUs and no others."""
        if is_left_alone(self.variable, environ):
            return {}
        variables = {self.variable: joined(ids) or HIDDEN}
        if environ.get(SELECTOR):
            variables[SELECTOR] = f"{BACKEND}gpu"
        return variables

    def quantity(self, value: object) -> int:
        """Turn a `num_gpus` into parts; raises `OptionError`."""
        return device_quantity(self.option, value)

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the product's name: its last two words, as Ray."""
        words = (name or "").split()
        return f"Intel-GPU-{'-'.join(words[-2:])}" if words else None

    def watch(self) -> Unwatched:
        """Nobody is asked what is on a GPU."""
        return Unwatched()

    def _detect(self) -> tuple[Device, ...]:
        found: list[tuple[str, str | None]] = []
        for _, card in numbered("card", self._root, CARDS):
            device = os.path.join(card, "device")
            driver = os.path.basename(os.path.realpath(os.path.join(device, "driver")))
            pci = pci_address(device)
            if (
                _number(device, "vendor") == VENDOR
                and driver in DRIVERS
                and pci is not None
                and pci.split(":")[1] != "00"
            ):
                found.append((pci, NAMES.get(_number(device, "device"))))
        # Level Zero counts by the bus.
        return tuple(
            Device(number, type=self.type_of(name), name=name, pci=pci)
            for number, (pci, name) in enumerate(sorted(found))
        )


def _number(device: str, fact: str) -> int:
    try:
        return int(read(device, fact), 16)
    except ValueError:
        return 0


def _listed(
    variable: str, environ: Mapping[str, str]
) -> tuple[str, str, Sequence[Id]] | None:
    """What restricts the node: the mask, else the indices of a selector."""
    text = environ.get(variable)
    # Nothing restricts where the mask is empty, as for Level Zero itself.
    if text:
        return variable, text, entries(variable, text, _part)
    text = environ.get(SELECTOR)
    if text is None:
        return None
    chosen = text.strip().removeprefix(BACKEND)
    if chosen in ALL and text.strip() not in NONE:
        return None
    return SELECTOR, text, entries(SELECTOR, chosen)


def _part(entry: str) -> Sequence[Id]:
    """What "1" or "1.0" names; nothing where it is ill-formed."""
    card, dot, part = entry.partition(".")
    if dot and index(card) and index(part):
        return (entry,)
    return index(entry)


def _parts(there: Sequence[Device], ids: Sequence[Id]) -> list[Device]:
    """The parts of detected cards that are named; their memory is not known."""
    cards = {device.id: device for device in there}
    named = (id_ for id_ in ids if isinstance(id_, str))
    owners = ((id_, cards.get(int(id_.partition(".")[0]))) for id_ in named)
    return [replace(card, id=id_) for id_, card in owners if card is not None]
