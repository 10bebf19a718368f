"""The devices of one kind, their taken shares, and the choice of a device.

The rules are those of Ray's "Fractional accelerators": best fit, lowest index first on
a tie; whole requests only from devices that are entirely free; a share never spans
devices. `placement="spread"` prefers the emptiest device instead. Only devices with
enough memory are considered; several whole devices are chosen by their fast links
(`topology`).

A device has two measures, as decision 0024 has them
(`design/decisions/0024-device-memory-is-a-second-measure.md`):

- a task that names bytes reserves them in addition to its share;
- a task that names no bytes takes the same part of the memory as of the device;
- a whole device includes all of its memory.

A set of devices is a mask: an int with bit `1 << index` set for each device. An index
of the devices by free amount makes the choice fast: masks by amount, and the amounts in
order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Device, Request, named_bytes
from aiogpu.core.model.units import GPU, UNIT
from aiogpu.core.resources.topology import Topology, indices

if TYPE_CHECKING:
    from aiogpu.core.model.request import DeviceSelector


Share = tuple[int, int]
"""Index of a device in its set, and the taken amount in parts."""


class Cause(Enum):
    """The causes for which a device is set aside, in the order of reports."""

    UNSETTLED = "unsettled"
    """Ended tasks have left memory or processes on the device."""
    SICK = "sick"
    """The device fails; it may recover by itself."""
    FOREIGN = "foreign"
    """Processes that do not belong to the node use the device."""


class DeviceAvailability:
    """The devices of one kind that must not be used; bundles share their node's.

    Attributes:
        aside: why a device is set aside, by index; callers must not change it.
        aside_mask: the devices that are set aside.
        avoided_mask: the devices that are chosen last.
    """

    def __init__(self) -> None:
        self.aside: dict[int, str] = {}
        self.aside_mask = 0
        self.avoided_mask = 0
        self._reasons: dict[int, dict[Cause, str]] = {}

    def note(self, index: int, cause: Cause, reason: str | None) -> None:
        """Set a device aside for a cause; the reason None ends the cause.

        Leases that hold a share of the device keep it.
        """
        bit, reasons = 1 << index, self._reasons.setdefault(index, {})
        reasons.pop(cause, None)
        if reason is not None:
            reasons[cause] = reason
        if not reasons:
            del self._reasons[index]
            self.aside.pop(index, None)
            self.aside_mask &= ~bit
            return
        unsettled, sick = reasons.get(Cause.UNSETTLED, ""), reasons.get(Cause.SICK, "")
        # Both may report the same failure, in the same words.
        others = [reason for reason in sick.split("; ") if reason not in unsettled]
        texts = filter(None, (unsettled, *others, reasons.get(Cause.FOREIGN)))
        self.aside[index] = "; ".join(texts)
        self.aside_mask |= bit

    def avoid(self, index: int, *, is_avoided: bool) -> None:
        """Choose a device after all others, or stop doing so."""
        bit = 1 << index
        self.avoided_mask = self.avoided_mask & ~bit | bit * is_avoided

    def check(self) -> None:
        """Assert that the mask agrees with the reasons."""
        mask = sum(1 << index for index in self.aside)
        assert mask == self.aside_mask, (self.aside, self.aside_mask)
        assert self.aside.keys() == self._reasons.keys(), (self.aside, self._reasons)


Affinity = tuple[int, Sequence[int]]
"""Single devices as a mask, and sets of several as a mask each."""

COLD: Final[Affinity] = (0, ())

_CACHED: Final = 256
"""Conditions whose fitting devices are cached."""


class DeviceSet:
    """Shares of the devices of one kind, such as all GPUs of the node.

    Attributes:
        kind: the name of the resource, "GPU".
        devices: the devices, by index.
        availability: the devices that must not be used.
        shares: for a bundle, its shares of the devices (a share of 0: memory only);
            None for the node, which has all.
        capacity: bytes of memory of each device, 0 if unknown.
        free: the free parts of each device; callers must not change it.
        free_mask: the devices without a taken part; callers must not change it.
        named: bytes of each device that are reserved explicitly; callers must not
            change it.
        named_mask: the devices with such bytes.
        unverified: the devices, by index, of which a share was returned without a check
            that its memory is free.
    """

    def __init__(
        self,
        kind: str,
        devices: Sequence[Device],
        availability: DeviceAvailability | None = None,
        shares: Sequence[Share] | None = None,
    ) -> None:
        self.kind = kind
        self.availability = availability or DeviceAvailability()
        self.devices = tuple(devices)
        self.shares = shares
        # Requests for GPU memory do not concern other kinds of devices.
        self._has_memory = kind == GPU
        memories = [device.memory * self._has_memory for device in self.devices]
        self.capacity = tuple(memories)
        self.free = [UNIT if shares is None else 0] * len(memories)
        self.named = [0] * len(memories)
        self.named_mask = 0
        # Parts of leases that reserve memory in bytes: `named` counts that memory.
        self._apart = [0] * len(memories)
        for index, part in shares or ():
            self.free[index] = part
            # A bundle with memory only has no parts; these do not count as used memory.
            self._apart[index] = 0 if part else UNIT
        self._bits = tuple(1 << index for index in range(len(self.devices)))
        self._of_type: dict[str | None, int] = {None: sum(self._bits)}
        for device, bit in zip(self.devices, self._bits, strict=True):
            if device.type is not None:
                self._of_type[device.type] = self.mask_of_type(device.type) | bit
        self._where: dict[tuple[str | None, DeviceSelector], int] = {}
        self._of_size: dict[int, int] = {}
        self._links = Topology(self.devices)
        # CUDA shows a process only one MIG instance:
        # https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
        self._combinable = self._mask(device.parent is None for device in self.devices)
        self.free_mask = self._mask(part == UNIT for part in self.free)
        self.unverified: set[int] = set()
        # Devices with a free share below 1: non-empty masks by free amount, and the
        # amounts in order.
        self._at: dict[int, int] = {}
        for bit, part in zip(self._bits, self.free, strict=True):
            if 0 < part < UNIT:
                self._at[part] = self._at.get(part, 0) | bit
        self._levels = sorted(self._at)

    def __repr__(self) -> str:
        return f"<DeviceSet {self.kind}: {sum(self.free) / UNIT:g}/{len(self.free)}>"

    def _mask(self, are_in: Iterable[bool]) -> int:
        return sum(bit for bit, is_in in zip(self._bits, are_in, strict=True) if is_in)

    def mask_of_type(self, accelerator_type: str | None) -> int:
        """Return the devices of a type; for None, all devices."""
        return self._of_type.get(accelerator_type, 0)

    def wanted_type(self, request: Request) -> str | None:
        """Return the type that a request asks of this kind of device, or None.

        If the request includes GPUs, its type refers to the GPUs.
        """
        if self._has_memory or all(kind != GPU for kind, _ in request.devices):
            return request.accelerator_type
        return None

    def fitting(self, request: Request) -> int:
        """Return the devices of a request's type that fulfil its `where`."""
        mask = self._of_type.get(self.wanted_type(request), 0)
        if request.where is None or not self._has_memory:
            return mask
        key = request.accelerator_type, request.where
        fitting = self._where.get(key)
        if fitting is None:
            if len(self._where) >= _CACHED:
                self._where.clear()
            fits = request.where.fits
            fitting = self._where[key] = mask & self._mask(map(fits, self.devices))
        return fitting

    def demand(self, request: Request) -> int:
        """Return the memory that a request needs on each device of this kind, or 0."""
        return request.gpu_memory if self._has_memory else 0

    def usable(self, amount: int, request: Request) -> int:
        """Return the devices that could serve `amount` if nothing were taken."""
        mask = self.fitting(request)
        if amount > UNIT:
            mask &= self._combinable
        if memory := self.demand(request):
            mask &= self._with_capacity(max(memory, 1))
        return mask

    def _with_capacity(self, least: int) -> int:
        large = self._of_size.get(least)
        if large is None:
            if len(self._of_size) >= _CACHED:
                self._of_size.clear()
            large = self._mask(size >= least for size in self.capacity)
            self._of_size[least] = large
        return large

    def room_for(self, amount: int, request: Request) -> int:
        """Return how many leases of `amount` fit at once if nothing is taken."""
        usable = self.usable(amount, request)
        if amount >= UNIT:
            return usable.bit_count() // (amount // UNIT)
        # A share never spans devices.
        memory = self.demand(request)
        count = 0
        for index, capacity in enumerate(self.capacity):
            if usable >> index & 1:
                by_parts = UNIT // amount if amount else capacity // memory
                count += min(by_parts, capacity // memory) if memory > 0 else by_parts
        return count

    def free_memory(self, index: int) -> int:
        """Return the bytes that no lease has reserved; 0 if unknown."""
        implied = UNIT - self.free[index] - self._apart[index]
        capacity = self.capacity[index]
        return capacity - capacity * implied // UNIT - self.named[index]

    def _has_room(self, index: int, amount: int, memory: int) -> bool:
        """Return True if a device has the memory for a share."""
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

    def could_serve(self, amount: int, request: Request, mask: int) -> bool:
        """Return True if the devices of a mask are free for `amount` now."""
        part = min(amount, UNIT)
        return (
            not mask & self.availability.aside_mask
            and all(self.free[index] >= part for index in indices(mask))
            and self._with_memory(mask, amount, request) == mask
        )

    def choose(
        self, amount: int, request: Request, barred: int = 0, warm: Affinity = COLD
    ) -> tuple[Share, ...] | None:
        """Choose shares that serve `amount` now; None if the request must wait.

        Among equally good devices, a warm device goes first, then the lowest index.
        Among sets of whole devices, a warm set goes first, then the best linked set.

        Args:
            amount: parts; above one device a multiple of `UNIT`; 0 for memory only.
            request: the conditions on the devices, the memory, and `spread`.
            barred: mask of devices that must not be used.
            warm: devices and sets of devices with an idle worker.
        """
        if avoided := self.availability.avoided_mask:
            chosen = self._choose(amount, request, barred | avoided, warm)
            if chosen:
                return chosen
        return self._choose(amount, request, barred, warm)

    def _choose(
        self, amount: int, request: Request, barred: int, warm: Affinity
    ) -> tuple[Share, ...] | None:
        # For GPUs without a call: most requests ask for GPUs.
        kind = request.accelerator_type
        kind = kind if self._has_memory else self.wanted_type(request)
        barred |= self.availability.aside_mask
        allowed = self._of_type.get(kind, 0) & ~barred
        named = self.named_mask
        if named or request.gpu_memory or request.where is not None:
            allowed = self._with_memory(
                allowed & self.fitting(request), amount, request
            )
        found = self.free_mask & allowed
        if amount > UNIT:
            return self._several(amount // UNIT, found & self._combinable, warm[1])
        if not amount:
            found = self._fullest(allowed, spread=request.spread)
        elif amount < UNIT:
            if apart := found & named:
                # A device with reserved bytes is in use although all its parts are
                # free: packing prefers it, spreading avoids it.
                found = found & ~named or found if request.spread else apart
            if not (request.spread and found):
                with_room = self._levels[bisect_left(self._levels, amount) :]
                for level in reversed(with_room) if request.spread else with_room:
                    if at_level := self._at[level] & allowed:
                        found = at_level
                        break
        found = found & warm[0] or found
        return (((found & -found).bit_length() - 1, amount),) if found else None

    def room(self, request: Request, barred: int = 0) -> int:
        """Return the largest amount that may be served now; -1 if there is no device.

        A larger amount must wait. Whether device memory suffices is not considered.

        Args:
            request: the conditions on the devices.
            barred: mask of devices that must not be used.
        """
        allowed = self.fitting(request) & ~(barred | self.availability.aside_mask)
        if whole := self.free_mask & allowed:
            # A device with explicitly reserved bytes serves no whole request.
            return (whole & ~self.named_mask).bit_count() * UNIT or UNIT - 1
        for level in reversed(self._levels):
            if self._at[level] & allowed:
                return level
        return 0 if allowed else -1

    def free_parts(self, barred: int = 0) -> int:
        """Return the sum of the free parts of all devices that may be used."""
        barred |= self.availability.aside_mask
        if not barred:
            return sum(self.free)
        return sum(
            part for index, part in enumerate(self.free) if not barred >> index & 1
        )

    def most_free_memory(self) -> int:
        """Return the most free bytes of one device."""
        return max(map(self.free_memory, range(len(self.free))), default=0)

    def _with_memory(self, mask: int, amount: int, request: Request) -> int:
        """Return the devices of a mask that have the memory for a share."""
        memory = self.demand(request)
        # On a device without explicit bytes, free parts imply free memory.
        unchecked = mask if memory else mask & self.named_mask
        while unchecked:
            bit = unchecked & -unchecked
            unchecked ^= bit
            if not self._has_room(bit.bit_length() - 1, amount, memory):
                mask ^= bit
        return mask

    def _fullest(self, mask: int, *, spread: bool) -> int:
        """Return the devices of a mask with the least (spread: most) free memory."""
        levels: dict[int, int] = {}
        while mask:
            bit = mask & -mask
            mask ^= bit
            level = self.free_memory(bit.bit_length() - 1)
            levels[level] = levels.get(level, 0) | bit
        if not levels:
            return 0
        return levels[max(levels) if spread else min(levels)]

    def _several(
        self, wanted: int, mask: int, warm_sets: Sequence[int]
    ) -> tuple[Share, ...] | None:
        if mask.bit_count() < wanted:
            return None
        for warm in warm_sets:
            if warm.bit_count() == wanted and not warm & ~mask:
                mask = warm
                break
        else:
            if self._links.matter:
                mask = self._links.best(mask, wanted)
        whole: list[Share] = []
        for _ in range(wanted):
            index = (mask & -mask).bit_length() - 1
            whole.append((index, UNIT))
            mask ^= self._bits[index]
        return tuple(whole)

    def take(self, shares: Iterable[Share], memory: int = 0) -> None:
        """Take shares that `choose` has just returned.

        Args:
            shares: the shares.
            memory: the `Request.gpu_memory` for which they were chosen.
        """
        for index, amount in shares:
            self._file(index, self.free[index] - amount)
            if memory:
                self._name(index, amount, memory, 1)

    def give_back(self, shares: Iterable[Share], memory: int = 0) -> None:
        """Return shares that were taken with the same `memory`."""
        for index, amount in shares:
            self._file(index, self.free[index] + amount)
            if memory:
                self._name(index, amount, memory, -1)

    def _name(self, index: int, amount: int, memory: int, sign: int) -> None:
        """Reserve the explicit bytes of a share, or return them (`sign` -1)."""
        named = named_bytes(amount, memory)
        if named and self._has_memory:
            self.named[index] += sign * named
            self._apart[index] += sign * amount
            bit = 1 << index
            self.named_mask = self.named_mask & ~bit | bit * (self.named[index] > 0)

    def memory_reserved(self, index: int) -> int:
        """Return the reserved bytes of a device's memory, explicit or by shares."""
        return self.capacity[index] - self.free_memory(index)

    def memory_of(self, share: Share, memory: int) -> int:
        """Return the bytes that a share holds of its device's memory; 0 if unknown.

        Args:
            share: the share.
            memory: the `Request.gpu_memory` for which it was taken.
        """
        index, amount = share
        if self._has_memory and (named := named_bytes(amount, memory)):
            return named
        return self.capacity[index] * amount // UNIT

    def _file(self, index: int, level: int) -> None:
        """Move a device in the index to its new free amount."""
        at, bit, before = self._at, self._bits[index], self.free[index]
        self.free[index] = level
        if before == UNIT:
            self.free_mask ^= bit
        elif before:
            others = at[before] ^ bit
            if others:
                at[before] = others
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

    def taken(self) -> tuple[list[int], list[int], list[int], int]:
        """Return the taken shares in a form that compares by value."""
        return self.free, self.named, self._apart, self.named_mask

    def check(self) -> None:
        """Assert that no amount is out of range and the index is right.

        Costs O(devices).
        """
        by_level: dict[int, int] = {}
        for index, (level, capacity) in enumerate(
            zip(self.free, self.capacity, strict=True)
        ):
            by_level[level] = by_level.get(level, 0) | 1 << index
            apart, named = self._apart[index], self.named[index]
            assert 0 <= level <= UNIT, (index, level)
            assert bool(named) == bool(self.named_mask >> index & 1), self.named_mask
            assert 0 <= apart <= UNIT - level, (index, apart)
            assert bool(named) or apart in (0, UNIT), (index, apart)
            assert 0 <= self.free_memory(index) <= capacity, (index, named)
        assert by_level.pop(UNIT, 0) == self.free_mask, (self.free, self.free_mask)
        by_level.pop(0, None)
        assert by_level == self._at, (self.free, self._at)
        assert sorted(by_level) == self._levels, (self.free, self._levels)
        self.availability.check()
