"""How full devices are, by both measures: their parts, and the bytes of their memory.

Arithmetic alone; which device is chosen, and for whom, is said elsewhere. The rules
are those of `docs/decisions/0024-device-memory-is-a-second-measure.md`:

- who names bytes reserves them beside the share;
- who names none takes the part of the memory that the share is of the device;
- a whole device is all of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiogpu.core.resources import UNIT


def named_bytes(amount: int, memory: int) -> int:
    """What a request reserves by name on each device; 0 if its share says it all.

    Args:
        amount: of the device, in parts.
        memory: its `Request.gpu_memory`.
    """
    return memory if memory > 0 and amount < UNIT else 0


class Filling:
    """What is taken of each of some devices, by index.

    Attributes:
        capacity: bytes of memory of each, 0 where unknown.
        free: free parts of each; others only read it.
        named: bytes reserved by name; others only read it.
        named_mask: the devices on which there are some.
    """

    def __init__(self, capacity: Sequence[int]) -> None:
        self.capacity = tuple(capacity)
        self.free = [UNIT] * len(self.capacity)
        self.named = [0] * len(self.capacity)
        self.named_mask = 0
        # Parts of those who have named their bytes: these stand for no memory.
        self._apart = [0] * len(self.capacity)

    def alone(self, index: int) -> Filling:
        """A copy of one device, as the only one: to be moved without moving this."""
        other = Filling(self.capacity[index : index + 1])
        other.free = [self.free[index]]
        other.named = [self.named[index]]
        other.named_mask = self.named_mask >> index & 1
        other._apart = [self._apart[index]]
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filling) and (
            (self.free, self.named, self._apart, self.named_mask)
            == (other.free, other.named, other._apart, other.named_mask)
        )

    __hash__ = None  # type: ignore[assignment]

    def move(self, index: int, part: int, memory: int, sign: int) -> None:
        """Take a share with its memory (`sign` 1), or give it back (-1)."""
        self.free[index] -= sign * part
        self.name(index, part, memory, sign)

    def name(self, index: int, part: int, memory: int, sign: int) -> None:
        """What `move` does beside the parts."""
        named = named_bytes(part, memory)
        if named:
            self.named[index] += sign * named
            self._apart[index] += sign * part
            bit = 1 << index
            self.named_mask = self.named_mask & ~bit | bit * (self.named[index] > 0)

    def free_memory(self, index: int) -> int:
        """Bytes that nobody has reserved, by name or by a share; 0 where unknown."""
        implied = UNIT - self.free[index] - self._apart[index]
        capacity = self.capacity[index]
        return capacity - capacity * implied // UNIT - self.named[index]

    def has_memory(self, index: int, amount: int, memory: int) -> bool:
        """Whether a device has the memory for a share, whatever parts are free."""
        capacity = self.capacity[index]
        if memory and capacity < max(memory, 1):
            return False
        if amount >= UNIT:
            return not self.named[index]
        if memory > 0:
            return self.free_memory(index) >= memory
        if not self.named[index]:
            return True
        implied = UNIT - self.free[index] - self._apart[index]
        return capacity * (implied + amount) // UNIT + self.named[index] <= capacity

    def has_room(self, index: int, amount: int, memory: int) -> bool:
        """Whether a device has room for what a request takes of each."""
        part = min(amount, UNIT)
        return self.free[index] >= part and self.has_memory(index, part, memory)

    def with_memory(self, mask: int, amount: int, memory: int) -> int:
        """Those devices of a mask that have the memory for a share."""
        # Where nobody has named bytes, the parts say all of it.
        looked_at = mask if memory else mask & self.named_mask
        while looked_at:
            bit = looked_at & -looked_at
            looked_at ^= bit
            if not self.has_memory(bit.bit_length() - 1, amount, memory):
                mask ^= bit
        return mask

    def fullest(self, mask: int, *, spread: bool) -> int:
        """Of the devices of a mask those with the least free memory, or the most."""
        levels: dict[int, int] = {}
        while mask:
            bit = mask & -mask
            mask ^= bit
            level = self.free_memory(bit.bit_length() - 1)
            levels[level] = levels.get(level, 0) | bit
        if not levels:
            return 0
        return levels[max(levels) if spread else min(levels)]

    def check(self) -> None:
        """Assert that nothing is taken twice. Costs O(devices)."""
        for index, capacity in enumerate(self.capacity):
            apart, named = self._apart[index], self.named[index]
            assert bool(named) == bool(self.named_mask >> index & 1), self.named_mask
            assert 0 <= apart <= UNIT - self.free[index], (index, apart)
            assert bool(named) or not apart, (index, apart)
            assert 0 <= self.free_memory(index) <= capacity, (index, named)
