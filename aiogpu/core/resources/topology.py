"""The fast links between devices, and the choice of a well connected set.

A set of devices is better the more of its pairs are linked. If there are too many sets
to compare, the devices with the lowest indices are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device


TRIED: Final = 300
"""The most sets that are compared: enough for any number of a machine's 8 devices."""


class Topology:
    """The links among the devices of a set.

    Attributes:
        matter: some devices are linked, but not all with each other.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        bits = {
            device.uuid: 1 << index
            for index, device in enumerate(devices)
            if device.uuid is not None
        }
        self._joined = [0] * len(devices)
        for index, device in enumerate(devices):
            for uuid in device.links:
                other = bits.get(uuid, 0) & ~(1 << index)
                if other:
                    # Sometimes only one end reports a link.
                    self._joined[index] |= other
                    self._joined[other.bit_length() - 1] |= 1 << index
        full = len(devices) - 1
        self.matter = any(self._joined) and any(
            joined.bit_count() < full for joined in self._joined
        )

    def count(self, mask: int) -> int:
        """Return the number of linked pairs in a set."""
        return sum((self._joined[i] & mask).bit_count() for i in indices(mask)) // 2

    def best(self, mask: int, wanted: int) -> int:
        """Return the best connected set of `wanted` devices; on a tie the lowest.

        Args:
            mask: the devices to choose from, at least `wanted`.
            wanted: the number of devices, 2 or more.
        """
        lowest = _lowest(mask, wanted)
        full = wanted * (wanted - 1) // 2
        best, most = lowest, self.count(lowest)
        if most == full or lowest == mask:
            return best
        bits = [1 << index for index in indices(mask)]
        if comb(len(bits), wanted) > TRIED:
            return best
        for candidate in map(sum, combinations(bits, wanted)):
            count = self.count(candidate)
            if count > most:
                best, most = candidate, count
                if most == full:
                    break
        return best


def indices(mask: int) -> Iterator[int]:
    """Yield the device indices of a mask, lowest first."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit.bit_length() - 1


def _lowest(mask: int, wanted: int) -> int:
    chosen = 0
    for index in indices(mask):
        if not wanted:
            break
        chosen |= 1 << index
        wanted -= 1
    return chosen
