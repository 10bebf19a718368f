"""The node's resources, the taken amounts, and the leases that hold them.

A lease takes all its scalars and device shares, or nothing. The ledger does not know
what a lease is for. `check()` asserts the invariant: capacity minus all leases equals
the free amount. A `BundleLedger` is the ledger of one bundle of a placement group, with
the same invariant. To plan as if some leases had ended, take a `copy()` and call
`suppose()` on it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from aiogpu.core.model.ids import LeaseId, WorkerId
from aiogpu.core.model.request import ANY, BundleRef, Device, Request
from aiogpu.core.model.units import (
    CPU,
    GPU,
    GPU_MEMORY,
    TYPE_PREFIX,
    UNIT,
    format_amount,
    number,
)
from aiogpu.core.resources.devices import COLD, Affinity, DeviceSet, Share
from aiogpu.core.resources.feasibility import find_infeasible


class LeaseAccount(Protocol):
    """Charges a client for one lease; see `queue.fair_share`."""

    def end(self) -> None:
        """Note that the whole lease was given back."""

    def lend(self) -> None:
        """Note that the lease's CPUs were given back for a while."""

    def resume(self) -> None:
        """Note that the lease's CPUs are held again."""

    def keep_devices(self, kinds: Container[str]) -> None:
        """Note that all resources except these kinds of devices were given back."""


@dataclass(slots=True, eq=False)
class Lease:
    """The resources that a task holds: the request, and the devices that serve it.

    Attributes:
        id: the id; the first is 1.
        request: the request.
        shares: device shares by kind, in the order of `request.devices`.
        is_lent: the CPUs are lent to others while the task waits.
        usage: charges a client for the lease; None if the node is not shared.
        home: the ledger from which the lease was taken: the node's or a bundle's.
        parts: the bundles of a placement group's lease.
        memories: for a placement group's lease, the `gpu_memory` of each share, in the
            order of `shares`; empty if no bundle names GPU memory.
        holder: the worker that has the lease; None before a worker has it.
    """

    id: LeaseId
    request: Request
    shares: tuple[tuple[Share, ...], ...]
    home: Ledger
    is_lent: bool = False
    usage: LeaseAccount | None = None
    parts: tuple[BundleLedger, ...] = ()
    memories: tuple[tuple[int, ...], ...] = ()
    holder: WorkerId | None = None

    def held(self) -> Iterator[tuple[str, Share, int]]:
        """Yield the shares, each with its kind and its `gpu_memory`."""
        for position, (kind, _) in enumerate(self.request.devices):
            shares = self.shares[position]
            equal = (self.request.gpu_memory,) * len(shares)
            memories = self.memories[position] if self.memories else equal
            for share, memory in zip(shares, memories, strict=True):
                yield kind, share, memory

    def masks(self) -> Iterator[tuple[str, int]]:
        """Yield the devices as masks, by kind."""
        for (kind, _), shares in zip(self.request.devices, self.shares, strict=True):
            mask = 0
            for index, _ in shares:
                mask |= 1 << index
            yield kind, mask


class Ledger:
    """The node's resources in exact amounts, and the leases that hold them.

    Attributes:
        placement_groups: the bundles of each granted placement group, by key.
        ended: how many leases with a holder have ended, leases in bundles included.
            A lease that never had a holder does not count.
    """

    def __init__(
        self, scalars: Mapping[str, int], device_sets: Iterable[DeviceSet] = ()
    ) -> None:
        self.capacity = dict(scalars)
        self.free = dict(scalars)
        self.device_sets = {devices.kind: devices for devices in device_sets}
        self.leases: dict[LeaseId, Lease] = {}
        self.placement_groups: dict[str, tuple[BundleLedger, ...]] = {}
        self.ended = 0
        self._last_id = 0

    def __repr__(self) -> str:
        totals = self.totals()
        amounts = (
            f"{name} {format_amount(name, free)}/{format_amount(name, totals[name])}"
            for name, free in self.available().items()
        )
        return f"<Ledger {', '.join(amounts)}; {len(self.leases)} leases>"

    def take(
        self,
        request: Request,
        barred: Mapping[str, int] | None = None,
        kept: Mapping[str, int] | None = None,
        warm: Affinity = COLD,
    ) -> Lease | None:
        """Take all resources of a request, or none and return None.

        Args:
            request: the request.
            barred: by kind, a mask of devices that this request must not use.
            kept: by name, parts of scalars that this request must leave free.
            warm: devices with an idle worker, preferred among equally good ones. Given
                only if the request has one kind of devices.
        """
        free = self.free
        for name, amount in request.scalars:
            if free.get(name, 0) < amount:
                return None
        if kept is not None:
            for name, amount in request.scalars:
                if free[name] - kept.get(name, 0) < amount:
                    return None
        shares: tuple[tuple[Share, ...], ...] = ()
        if request.devices:
            chosen = self._choose(request, request.devices, barred, warm)
            if chosen is None:
                return None
            shares = chosen
            for (kind, _), taken in zip(request.devices, shares, strict=True):
                self.device_sets[kind].take(taken, request.gpu_memory)
        for name, amount in request.scalars:
            free[name] -= amount
        return self._begin(request, shares)

    def _begin(self, request: Request, shares: tuple[tuple[Share, ...], ...]) -> Lease:
        self._last_id += 1
        lease = Lease(LeaseId(self._last_id), request, shares, self)
        self.leases[lease.id] = lease
        return lease

    def merge(self, leases: Iterable[Lease], request: Request) -> Lease:
        """Merge leases, which together fulfil a request, into one lease."""
        shares: dict[str, list[Share]] = {kind: [] for kind, _ in request.devices}
        memories: dict[str, list[int]] = {kind: [] for kind in shares}
        for lease in leases:
            del self.leases[lease.id]
            for kind, share, memory in lease.held():
                shares[kind].append(share)
                memories[kind].append(memory)
        merged = self._begin(request, tuple(map(tuple, shares.values())))
        if any(map(any, memories.values())):
            merged.memories = tuple(map(tuple, memories.values()))
        return merged

    def _choose(
        self,
        request: Request,
        wanted: Iterable[tuple[str, int]],
        barred: Mapping[str, int] | None,
        warm: Affinity,
    ) -> tuple[tuple[Share, ...], ...] | None:
        shares: list[tuple[Share, ...]] = []
        for kind, amount in wanted:
            devices = self.device_sets.get(kind)
            chosen = devices and devices.choose(
                amount, request, barred.get(kind, 0) if barred else 0, warm
            )
            if not chosen:
                return None
            shares.append(chosen)
        return tuple(shares)

    def homes(self, request: Request) -> Sequence[Ledger]:
        """Return the ledgers from which a request may take: its bundles, or this one.

        A placement group that is not granted has no bundles.
        """
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return (self,)
        bundles = self.placement_groups.get(within.key, ())
        if within.bundle == ANY:
            return bundles
        return bundles[within.bundle : within.bundle + 1]

    def would_help(self, lease: Lease, request: Request) -> bool:
        """Return True if a request might fit after the end of a lease."""
        held = dict(lease.request.scalars)
        for name, amount in request.scalars:
            if self.free.get(name, 0) < amount and name not in held:
                return False
        kinds = {kind for kind, _ in lease.request.devices}
        others = [each for each in request.devices if each[0] not in kinds]
        return self._choose(request, others, None, COLD) is not None

    def give_back(self, lease: Lease) -> None:
        """End a lease; its resources are free at once.

        Before the lease of a placement group ends, all leases in its bundles must end.

        Raises:
            KeyError: the lease was given back before.
        """
        home = lease.home
        del home.leases[lease.id]
        if lease.holder is not None:
            self.ended += 1
        if lease.is_lent:
            self.resume(lease)
        for name, amount in lease.request.scalars:
            home.free[name] += amount
        if lease.memories:
            for kind, share, memory in lease.held():
                home.device_sets[kind].give_back((share,), memory)
        elif lease.shares:
            memory = lease.request.gpu_memory
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=True
            ):
                home.device_sets[kind].give_back(shares, memory)
        if lease.parts:
            del self.placement_groups[lease.parts[0].key]
        if lease.usage is not None:
            lease.usage.end()

    def keep_devices(self, lease: Lease) -> None:
        """Give back a lease except its devices, which are not free yet."""
        if lease.is_lent:
            self.resume(lease)
        for name, amount in lease.request.scalars:
            lease.home.free[name] += amount
        lease.request = replace(lease.request, scalars=())
        if lease.usage is not None:
            lease.usage.keep_devices(self.device_sets)

    def lend(self, lease: Lease) -> None:
        """Give back only the CPUs of a lease, while its task waits for others."""
        lease.is_lent = True
        self._move_cpus(lease, 1)
        if lease.usage is not None:
            lease.usage.lend()

    def resume(self, lease: Lease) -> None:
        """Undo `lend`; the free CPUs can become negative (`is_overdrawn`)."""
        lease.is_lent = False
        self._move_cpus(lease, -1)
        if lease.usage is not None:
            lease.usage.resume()

    def _move_cpus(self, lease: Lease, sign: int) -> None:
        for name, amount in lease.request.scalars:
            if name == CPU:
                lease.home.free[name] += sign * amount

    def emptied(self) -> Ledger:
        """Return a copy with nothing taken and no device set aside, for planning."""
        empty = [
            DeviceSet(devices.kind, devices.devices, None, devices.shares)
            for devices in self.device_sets.values()
        ]
        return Ledger(self.capacity, empty)

    def copy(self) -> Ledger:
        """Copy the free amounts; the copy has no leases and no device set aside."""
        other = self.emptied()
        other.free = dict(self.free)
        for lease in self.leases.values():
            other._move_devices(lease, 1)
        return other

    def suppose(self, lease: Lease, *, is_held: bool) -> None:
        """Take the resources of the original's lease from this copy, or return them."""
        sign = 1 if is_held else -1
        for name, amount in lease.request.scalars:
            if name != CPU or not lease.is_lent:
                self.free[name] -= sign * amount
        self._move_devices(lease, sign)

    def _move_devices(self, lease: Lease, sign: int) -> None:
        for kind, share, memory in lease.held():
            devices = self.device_sets[kind]
            (devices.take if sign > 0 else devices.give_back)((share,), memory)

    @property
    def is_overdrawn(self) -> bool:
        """True if more CPUs are held than there are, after `resume`."""
        return self.free.get(CPU, 0) < 0

    def why_infeasible(self, request: Request) -> str | None:
        """Return a clause about what the idle node lacks for a request, or None."""
        return find_infeasible(self.capacity, self.device_sets, request)

    def room_for(self, request: Request, are_lent: bool = False) -> int | None:
        """Return how many leases of a request an idle node can have at once.

        Args:
            request: the request of each lease.
            are_lent: the leases give back their CPUs.

        Returns:
            The number; None for no limit, if the leases hold nothing.
        """
        rooms = [
            self.capacity.get(name, 0) // amount
            for name, amount in request.scalars
            if amount and not (are_lent and name == CPU)
        ]
        for kind, amount in request.devices:
            devices = self.device_sets.get(kind)
            rooms.append(devices.room_for(amount, request) if devices else 0)
        return min(rooms, default=None)

    def reserved(self, lease: Lease) -> tuple[tuple[str, int, int], ...]:
        """Return the memory that a lease holds of each of its devices.

        Returns:
            For each device: its kind, its index, and the bytes; 0 if the device's
            memory is unknown. The bytes are the request's `gpu_memory` or, if it named
            none, the share's part of the device's memory.
        """
        sets = lease.home.device_sets
        return tuple(
            (kind, share[0], sets[kind].memory_of(share, memory))
            for kind, share, memory in lease.held()
        )

    def drains(self, lease: Lease) -> bool:
        """Return True if a lease holds a share of a device that is set aside."""
        sets = self.device_sets
        return any(
            mask & sets[kind].availability.aside_mask for kind, mask in lease.masks()
        )

    def totals(self) -> dict[str, float]:
        """Return the capacity of every resource in the user's terms, by name."""
        totals = {name: number(amount) for name, amount in self.capacity.items()}
        for kind, devices in self.device_sets.items():
            totals[kind] = float(len(devices.devices))
            if memory := sum(devices.capacity):
                totals[GPU_MEMORY] = float(memory)
        return totals

    def available(self) -> dict[str, float]:
        """Return the free amount of every resource in the user's terms, by name.

        Of GPU memory, the bytes reserved neither explicitly nor by a share.
        """
        available = {name: number(max(amount, 0)) for name, amount in self.free.items()}
        for kind, devices in self.device_sets.items():
            usable = [
                i
                for i in range(len(devices.free))
                if i not in devices.availability.aside
            ]
            available[kind] = number(sum(devices.free[index] for index in usable))
            if any(devices.capacity):
                free = sum(map(devices.free_memory, usable))
                available[GPU_MEMORY] = float(free)
        return available

    def check(self) -> None:
        """Assert that capacity minus leases is the free amount. Costs O(leases)."""
        rebuilt = self.emptied()
        for lease in self.leases.values():
            devices = zip(lease.request.devices, lease.shares, strict=True)
            for (_, amount), taken in devices:
                assert sum(part for _, part in taken) == amount, lease
            rebuilt.suppose(lease, is_held=True)
        assert rebuilt.free == self.free, (rebuilt.free, self.free)
        assert all(n >= 0 for name, n in self.free.items() if name != CPU), self.free
        for kind, of_kind in self.device_sets.items():
            assert rebuilt.device_sets[kind].taken() == of_kind.taken(), of_kind
            of_kind.check()
        for bundles in self.placement_groups.values():
            for bundle in bundles:
                bundle.check()


class BundleLedger(Ledger):
    """The resources of one bundle of a placement group, and the leases that hold them.

    Attributes:
        key: the key of the placement group.
        index: the index of the bundle.
        bundle: the request of the bundle.
        masks: by kind, the devices of which the bundle holds a share.
    """

    def __init__(
        self,
        whole: Ledger,
        key: str,
        index: int,
        bundle: Request,
        shares: tuple[tuple[Share, ...], ...],
    ) -> None:
        self.key = key
        self.index = index
        self.bundle = bundle
        scalars, self.masks = dict(bundle.scalars), dict[str, int]()
        sets = []
        for (kind, _), held in zip(bundle.devices, shares, strict=True):
            of_node = whole.device_sets[kind]
            devices: Sequence[Device] = of_node.devices
            if kind == GPU and bundle.named_bytes:
                devices = _with_memory(devices, held[0], bundle.named_bytes)
            # A device that is set aside on the node is set aside here as well.
            sets.append(DeviceSet(kind, devices, of_node.availability, held))
            self.masks[kind] = sum(1 << i for i, _ in held)
            for i, _ in held:
                if name := devices[i].type:
                    scalars.setdefault(TYPE_PREFIX + name, UNIT)
        super().__init__(scalars, sets)
        self._could_ever: dict[Request, bool] = {}

    def could_ever(self, request: Request) -> bool:
        """Return True if a request fits into the bundle when it is empty."""
        fits = self._could_ever.get(request)
        if fits is None:
            fits = self.emptied().take(request) is not None
            self._could_ever[request] = fits
        return fits

    def has_devices_for(self, request: Request) -> bool:
        """Return True if enough devices for a request are not set aside."""
        for kind, amount in request.devices:
            devices = self.device_sets[kind]
            usable = devices.usable(amount, request) & self.masks[kind]
            if (usable & ~devices.availability.aside_mask).bit_count() < max(
                amount // UNIT, 1
            ):
                return False
        return True


def _with_memory(
    devices: Sequence[Device], held: Share, named: int
) -> tuple[Device, ...]:
    """Return a node's devices; the bundle's device gets another memory size.

    The size is chosen such that the bundle's share of it is the memory that the bundle
    names. If the bundle has no share, the size is the memory that the bundle names.
    """
    index, amount = held
    changed = replace(devices[index], memory=named * UNIT // (amount or UNIT))
    return (*devices[:index], changed, *devices[index + 1 :])
