"""Intel GPUs: detected in sysfs, assigned by `ZE_AFFINITY_MASK`.

Discrete cards only: a GPU that is part of the processor is on bus 0 and is not shared
out. An `ONEAPI_DEVICE_SELECTOR` that names indices restricts the node too. Workers get
a wider selector, because its indices would count among the few devices of the mask.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import GPU

from .listed_devices import (
    NONE,
    Listed,
    ListedAccelerator,
    entries,
    index,
    numbered,
    pci_address,
    read,
)

if TYPE_CHECKING:
    from .base import Id

CARDS: Final = "sys/class/drm"
VENDOR: Final = 0x8086
DRIVERS: Final = ("i915", "xe")
SELECTOR: Final = "ONEAPI_DEVICE_SELECTOR"
BACKEND: Final = "level_zero:"
ALL: Final = ("", "*", "gpu")
"""Values after the backend's name that select every GPU."""
NAMES: Final = {
    0x0BD5: "Intel(R) Data Center GPU Max 1550",
    0x0BD6: "Intel(R) Data Center GPU Max 1550",
    0x0BD9: "Intel(R) Data Center GPU Max 1100",
    0x0BDA: "Intel(R) Data Center GPU Max 1100",
    0x0BDB: "Intel(R) Data Center GPU Max 1100",
}
"""Products by the PCI device id (pci-ids.ucw.cz)."""


class IntelGpu(ListedAccelerator):
    """Intel GPUs behind `num_gpus`, on nodes where NVIDIA and AMD have none."""

    kind = GPU
    option = "num_gpus"
    variable = "ZE_AFFINITY_MASK"
    # An index that no card has: an empty mask restricts nothing.
    hide_all = "999999"

    def parse(self, entry: str) -> Sequence[Id]:
        """Return the card that "1" names, or the part of a card that "1.0" names."""
        card, dot, part = entry.partition(".")
        if dot and index(card) and index(part):
            return (entry,)
        return index(entry)

    def listed(
        self, environ: Mapping[str, str], there: Sequence[Device]
    ) -> Listed | None:
        """Return the restriction of the node: the mask, else a selector's indices.

        An empty mask restricts nothing, as for Level Zero itself.
        """
        if environ.get(self.variable):
            return super().listed(environ, there)
        text = environ.get(SELECTOR)
        if text is None:
            return None
        chosen = text.strip().removeprefix(BACKEND)
        if chosen in ALL and text.strip() not in NONE:
            return None
        return SELECTOR, text, entries(SELECTOR, chosen)

    def detect(self, environ: Mapping[str, str]) -> list[Device]:
        """Return the cards, and the parts of cards that the mask names."""
        named_cards: list[tuple[str, str | None]] = []
        for _, card in numbered("card", self.root, CARDS):
            device = os.path.join(card, "device")
            driver = os.path.basename(os.path.realpath(os.path.join(device, "driver")))
            pci = pci_address(device)
            if (
                _number(device, "vendor") == VENDOR
                and driver in DRIVERS
                and pci is not None
                and pci.split(":")[1] != "00"
            ):
                named_cards.append((pci, NAMES.get(_number(device, "device"))))
        # Level Zero counts by the bus.
        cards = [
            Device(number, type=self.type_of(name), name=name, pci=pci)
            for number, (pci, name) in enumerate(sorted(named_cards))
        ]
        listed = self.listed(environ, cards)
        return cards if listed is None else cards + _parts(cards, listed[2])

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables that give a worker these GPUs and no others."""
        variables = super().assignment(ids, environ)
        if variables and environ.get(SELECTOR):
            variables[SELECTOR] = f"{BACKEND}gpu"
        return variables

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the product's name: its last two words, as in Ray."""
        words = (name or "").split()
        return f"Intel-GPU-{'-'.join(words[-2:])}" if words else None


def _number(device: str, fact: str) -> int:
    try:
        return int(read(device, fact), 16)
    except ValueError:
        return 0


def _parts(there: Sequence[Device], ids: Sequence[Id]) -> list[Device]:
    """Return the named parts of detected cards; their memory is not known."""
    cards = {device.id: device for device in there}
    named = (id_ for id_ in ids if isinstance(id_, str))
    owners = ((id_, cards.get(int(id_.partition(".")[0]))) for id_ in named)
    return [replace(card, id=id_) for id_, card in owners if card is not None]
