"""The devices of one kind and which share of each is taken.

Decides where a share goes, by the rules of Ray's "Fractional accelerators"
(best fit, lowest id first on a tie; whole requests only from devices that are
entirely free; a share never spans devices), or the other way round for those who
want their shares spread. Knows neither tasks nor vendors.

A set of devices is written as a mask: an int whose bit `1 << index` is set. The
devices are filed by how much of them is free, so that the choice among a thousand
looks at a few of them: the masks by free amount, and the amounts in order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from aiogpu.core.resources import UNIT

Share = tuple[int, int]
"""Index of a device in its set, and the amount taken of it in parts."""


Warm = tuple[int, Sequence[int]]
"""Single devices as a mask, and sets of several as a mask each."""
COLD: Final[Warm] = (0, ())


@dataclass(frozen=True, slots=True)
class Device:
    """One device as users and the assigning variable know it.

    Attributes:
        id: an index of the box (int), or a UUID or MIG id (str).
        type: the accelerator's type, such as "A100", where it is known.
        uuid: the vendor's unique id, where it is known.
        name: the vendor's name for the product, where it is known.
        memory: bytes of device memory, 0 where unknown.
        compute_capability: such as (8, 0), where it is known.
        pci: the address on the PCI bus, such as "00000000:3B:00.0", where it is known.
        links: UUIDs of the devices that a fast link (NVLink) joins with this one.
        parent: UUID of the GPU of which this is a part (MIG); None for a whole one.
    """

    id: int | str
    type: str | None = None
    uuid: str | None = None
    name: str | None = None
    memory: int = 0
    compute_capability: tuple[int, int] | None = None
    pci: str | None = None
    links: frozenset[str] = frozenset()
    parent: str | None = None


class DeviceSet:
    """Shares of the devices of one kind, such as all GPUs of the node.

    Attributes:
        kind: the name of the resource, "GPU".
        devices: the devices, by index.
        free: the free parts of each device, by index; others only read it.
        free_mask: the devices of which nothing is taken; others only read it.
        aside: why a device is given to nobody for now, by index; others only read it.
        aside_mask: those devices.
        unverified: devices, by index, of which a share was given back although
            nobody could see that the memory behind it is free.
    """

    def __init__(self, kind: str, devices: Sequence[Device]) -> None:
        self.kind = kind
        self.devices = tuple(devices)
        self.free = [UNIT] * len(self.devices)
        self._bits = tuple(1 << index for index in range(len(self.devices)))
        self._of_type: dict[str | None, int] = {None: sum(self._bits)}
        for device, bit in zip(self.devices, self._bits, strict=True):
            if device.type is not None:
                self._of_type[device.type] = self.mask_of_type(device.type) | bit
        self.free_mask = sum(self._bits)
        self.aside: dict[int, str] = {}
        self.aside_mask = 0
        self.unverified: set[int] = set()
        # The rest, unless nothing is free of it: masks by free amount, none of them
        # empty, and the amounts in order.
        self._at: dict[int, int] = {}
        self._levels: list[int] = []

    def __repr__(self) -> str:
        return f"<DeviceSet {self.kind}: {sum(self.free) / UNIT:g}/{len(self.free)}>"

    def mask_of_type(self, accelerator_type: str | None) -> int:
        """The devices of that type, or all of them for None."""
        return self._of_type.get(accelerator_type, 0)

    def could_serve(self, amount: int, mask: int) -> bool:
        """Whether the devices of a mask, chosen for `amount`, are free for it now."""
        part = min(amount, UNIT)
        return not mask & self.aside_mask and all(
            free >= part for index, free in enumerate(self.free) if mask >> index & 1
        )

    def count_of(self, accelerator_type: str | None) -> int:
        """How many devices are of that type, or all of them for None."""
        return self.mask_of_type(accelerator_type).bit_count()

    def choose(
        self,
        amount: int,
        accelerator_type: str | None = None,
        *,
        spread: bool = False,
        barred: int = 0,
        warm: Warm = COLD,
    ) -> tuple[Share, ...] | None:
        """Say which shares would serve `amount` now, None if it must wait.

        Of devices that are equally good, a warm one goes first, then the lowest; all
        sets of whole devices are equally good.

        Args:
            amount: in parts; above one device a multiple of `UNIT`.
            accelerator_type: only devices of this type.
            spread: a fraction goes to the emptiest device instead of the fullest
                that has room for it. Whole devices are the same either way.
            barred: mask of devices that may not be used.
            warm: devices for each of which something is ready, and sets of them.
        """
        allowed = self._of_type.get(accelerator_type, 0)
        barred |= self.aside_mask
        if barred:
            allowed &= ~barred
        found = self.free_mask & allowed
        if amount > UNIT:
            return self._lowest(amount // UNIT, found, warm[1])
        if amount < UNIT and not (spread and found):
            with_room = self._levels[bisect_left(self._levels, amount) :]
            for level in reversed(with_room) if spread else with_room:
                if filed := self._at[level] & allowed:
                    found = filed
                    break
        found = found & warm[0] or found
        return (((found & -found).bit_length() - 1, amount),) if found else None

    def _lowest(
        self, wanted: int, mask: int, warm_sets: Sequence[int]
    ) -> tuple[Share, ...] | None:
        if mask.bit_count() < wanted:
            return None
        for warm in warm_sets:
            if warm.bit_count() == wanted and not warm & ~mask:
                mask = warm
                break
        whole: list[Share] = []
        for _ in range(wanted):
            index = (mask & -mask).bit_length() - 1
            whole.append((index, UNIT))
            mask ^= self._bits[index]
        return tuple(whole)

    def set_aside(self, index: int, reason: str) -> None:
        """Give a device to nobody until it is back; who has a share of it keeps it."""
        self.aside[index] = reason
        self.aside_mask |= self._bits[index]

    def put_back(self, index: int) -> None:
        """Give a device out again; nothing happens where it was not set aside."""
        if self.aside.pop(index, None) is not None:
            self.aside_mask ^= self._bits[index]

    def take(self, shares: Iterable[Share]) -> None:
        """Take shares that `choose` has named and nobody has taken since."""
        for index, amount in shares:
            self._file(index, self.free[index] - amount)

    def give_back(self, shares: Iterable[Share]) -> None:
        """Return shares taken before."""
        for index, amount in shares:
            self._file(index, self.free[index] + amount)

    def _file(self, index: int, level: int) -> None:
        """File a device under what is free of it now."""
        at, bit, before = self._at, self._bits[index], self.free[index]
        self.free[index] = level
        if before == UNIT:
            self.free_mask ^= bit
        elif before:
            left = at[before] ^ bit
            if left:
                at[before] = left
            else:
                del at[before]
                del self._levels[bisect_left(self._levels, before)]
        if level == UNIT:
            self.free_mask |= bit
        elif level in at:
            at[level] |= bit
        elif level:
            at[level] = bit
            insort(self._levels, level)

    def check(self) -> None:
        """Assert that every device is filed under what is free of it."""
        filed: dict[int, int] = {}
        for bit, level in zip(self._bits, self.free, strict=True):
            filed[level] = filed.get(level, 0) | bit
        assert filed.pop(UNIT, 0) == self.free_mask, (self.free, self.free_mask)
        filed.pop(0, None)
        assert filed == self._at, (self.free, self._at)
        assert sorted(filed) == self._levels, (self.free, self._levels)
        aside = [bit for index, bit in enumerate(self._bits) if index in self.aside]
        assert sum(aside) == self.aside_mask, (self.aside, self.aside_mask)
