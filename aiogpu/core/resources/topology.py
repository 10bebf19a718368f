"""Which devices fast links join, and which set of them is joined best.

A set is better the more pairs of it are linked. On small machines all sets are
compared; where there would be too many, it is the lowest devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device


TRIED: Final = 300
"""Sets that are compared at most: more than there are of four of a box of eight."""


class Topology:
    """The links among the devices of a set.

    Attributes:
        matter: whether there are some, and not all devices are joined with each other.
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
                    # One end may know of a link of which the other does not.
                    self._joined[index] |= other
                    self._joined[other.bit_length() - 1] |= 1 << index
        full = len(devices) - 1
        self.matter = any(self._joined) and any(
            joined.bit_count() < full for joined in self._joined
        )

    def count(self, mask: int) -> int:
        """Return how many pairs of a set are linked."""
        return sum((self._joined[i] & mask).bit_count() for i in indices(mask)) // 2

    def best(self, mask: int, wanted: int) -> int:
        """The best joined `wanted` devices of a mask; of equals, the lowest ids.

        Args:
            mask: at least so many.
            wanted: at least 2.
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
    """The devices of a mask, the lowest first."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit.bit_length() - 1


def _lowest(mask: int, wanted: int) -> int:
    found = 0
    for index in indices(mask):
        if not wanted:
            break
        found |= 1 << index
        wanted -= 1
    return found
