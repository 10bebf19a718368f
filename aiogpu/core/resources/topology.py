"""Which devices fast links join, and which set of them is joined best.

A set is better the more pairs of it are linked. On small machines all sets are
compared; where there would be too many, each set grows from one device, link by link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiogpu.core.model.request import Device


TRIED: Final = 300
"""Sets that are compared one by one: all those of four of a box of eight."""

GROWN_OF: Final = 32
"""Devices, the lowest, among which larger sets are grown."""


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
        if comb(mask.bit_count(), wanted) <= TRIED:
            bits = [1 << index for index in indices(mask)]
            sets: Iterator[int] = map(sum, combinations(bits, wanted))
        else:
            sets = self._grow(mask, wanted)
        for candidate in sets:
            count = self.count(candidate)
            if count > most:
                best, most = candidate, count
                if most == full:
                    break
        return best

    def _grow(self, mask: int, wanted: int) -> Iterator[int]:
        """A set around each device of the lowest, by the most links at each step."""
        pool = [1 << i for i in indices(_lowest(mask, GROWN_OF))]
        if wanted > len(pool):
            return
        for seed in pool:
            chosen = seed
            rest = [bit for bit in pool if bit != seed]
            for _ in range(wanted - 1):
                ties = [
                    (self._joined[bit.bit_length() - 1] & chosen).bit_count()
                    for bit in rest
                ]
                chosen |= rest.pop(ties.index(max(ties)))
            yield chosen


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
