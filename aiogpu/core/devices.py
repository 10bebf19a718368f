"""The devices of one kind and which share of each is taken.

Decides where a share goes, by the rules of Ray's "Fractional accelerators"
(best fit, lowest id first on a tie; whole requests only from devices that are
entirely free; a share never spans devices). Knows neither tasks nor vendors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiogpu.core.resources import UNIT

Share = tuple[int, int]
"""Index of a device in its set, and the amount taken of it in parts."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device as users and the assigning variable know it.

    Attributes:
        id: an index of the box (int), or a UUID or MIG id (str).
        type: the accelerator's type, such as "A100", where it is known.
        uuid: the vendor's unique id, where it is known.
        name: the vendor's name for the product, where it is known.
        memory: bytes of device memory, 0 where unknown.
    """

    id: int | str
    type: str | None = None
    uuid: str | None = None
    name: str | None = None
    memory: int = 0


class DeviceSet:
    """Shares of the devices of one kind, such as all GPUs of the node."""

    def __init__(self, kind: str, devices: Sequence[Device]) -> None:
        self.kind = kind
        self.devices = tuple(devices)
        self.free = [UNIT] * len(self.devices)

    def __repr__(self) -> str:
        return f"<DeviceSet {self.kind}: {sum(self.free) / UNIT:g}/{len(self.free)}>"

    def choose(
        self, amount: int, accelerator_type: str | None = None
    ) -> tuple[Share, ...] | None:
        """Say which shares would serve `amount` now, None if it must wait."""
        if amount < UNIT:
            return self._choose_fraction(amount, accelerator_type)
        wanted = amount // UNIT
        whole: list[Share] = []
        for index, free in enumerate(self.free):
            if free == UNIT and self._is_of(index, accelerator_type):
                whole.append((index, UNIT))
                if len(whole) == wanted:
                    return tuple(whole)
        return None

    def _choose_fraction(
        self, amount: int, accelerator_type: str | None
    ) -> tuple[Share, ...] | None:
        best = -1
        least = UNIT + 1
        for index, free in enumerate(self.free):
            if amount <= free < least and self._is_of(index, accelerator_type):
                best, least = index, free
        return None if best < 0 else ((best, amount),)

    def _is_of(self, index: int, accelerator_type: str | None) -> bool:
        return accelerator_type is None or self.devices[index].type == accelerator_type

    def take(self, shares: Sequence[Share]) -> None:
        """Take shares that `choose` has named and nobody has taken since."""
        for index, amount in shares:
            self.free[index] -= amount

    def give_back(self, shares: Sequence[Share]) -> None:
        """Return shares taken before."""
        for index, amount in shares:
            self.free[index] += amount

    def count_of(self, accelerator_type: str | None) -> int:
        """How many devices are of that type, or all of them for None."""
        return sum(
            self._is_of(index, accelerator_type) for index in range(len(self.devices))
        )
