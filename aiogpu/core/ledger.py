"""What the node has, what is taken, and by which lease.

A lease holds scalars and device shares together or not at all. The ledger does
not know what a lease is for. `check()` states its invariant as code: capacity
less all leases is what is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aiogpu.core.by_device import ByDevice
from aiogpu.core.devices import COLD, DeviceSet, Share, Warm
from aiogpu.core.filling import Filling
from aiogpu.core.ids import LeaseId
from aiogpu.core.infeasible import find_infeasible
from aiogpu.core.lease import Lease
from aiogpu.core.resources import CPU, GPU_MEMORY, UNIT, Request, number, written

if TYPE_CHECKING:
    from aiogpu.core.bundles import Part


class Ledger:
    """The node's resources: exact amounts, taken and given back whole.

    Attributes:
        gangs: the bundles of the gangs that were granted, by key; see `bundles`.
        ended: how many leases that somebody held have ended, those of bundles as
            well. A lease that was only tried on does not count.
    """

    def __init__(
        self, scalars: Mapping[str, int], device_sets: Iterable[DeviceSet] = ()
    ) -> None:
        self.capacity = dict(scalars)
        self.free = dict(scalars)
        self.device_sets = {devices.kind: devices for devices in device_sets}
        self.leases: dict[LeaseId, Lease] = {}
        self._by_device: ByDevice | None = None
        self.gangs: dict[str, tuple[Part, ...]] = {}
        self.ended = 0
        self._last_id = 0

    def __repr__(self) -> str:
        totals = self.totals()
        amounts = (
            f"{name} {written(name, free)}/{written(name, totals[name])}"
            for name, free in self.available().items()
        )
        return f"<Ledger {', '.join(amounts)}; {len(self.leases)} leases>"

    def take(
        self,
        request: Request,
        barred: Mapping[str, int] | None = None,
        kept: Mapping[str, int] | None = None,
        warm: Warm = COLD,
    ) -> Lease | None:
        """Take all that is asked for, or nothing and answer None.

        Args:
            request: what is asked for.
            barred: by kind, a mask of devices that this request may not use.
            kept: by name, parts of scalars that this request must leave free.
            warm: devices that are as good as others, but for which something is
                ready; of a request's only kind of devices.
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
            chosen = self._choose(request, barred, warm)
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
        lease = Lease(LeaseId(self._last_id), request, shares)
        self.leases[lease.id] = lease
        if self._by_device is not None:
            self._by_device.add(lease)
        return lease

    @property
    def by_device(self) -> ByDevice:
        """The leases that hold something of a device; kept from the first look on."""
        if self._by_device is None:
            self._by_device = ByDevice(self.device_sets)
            for lease in self.leases.values():
                self._by_device.add(lease)
        return self._by_device

    def merge(self, leases: Iterable[Lease], request: Request) -> Lease:
        """Make one lease of several, which together hold what a request asks for."""
        shares: dict[str, list[Share]] = {kind: [] for kind, _ in request.devices}
        memories: dict[str, list[int]] = {kind: [] for kind in shares}
        for lease in leases:
            del self.leases[lease.id]
            if self._by_device is not None:
                self._by_device.discard(lease)
            for kind, share, memory in lease.held():
                shares[kind].append(share)
                memories[kind].append(memory)
        merged = self._begin(request, tuple(map(tuple, shares.values())))
        if any(map(any, memories.values())):
            merged.memories = tuple(map(tuple, memories.values()))
        return merged

    def _choose(
        self, request: Request, barred: Mapping[str, int] | None, warm: Warm
    ) -> tuple[tuple[Share, ...], ...] | None:
        found: list[tuple[Share, ...]] = []
        for kind, amount in request.devices:
            devices = self.device_sets.get(kind)
            chosen = devices and devices.choose(
                amount, request, barred.get(kind, 0) if barred else 0, warm
            )
            if not chosen:
                return None
            found.append(chosen)
        return tuple(found)

    def would_help(self, lease: Lease, request: Request) -> bool:
        """Whether a request that does not fit might, if this lease were given back."""
        if request.gang is not None or lease.home is not None:
            from aiogpu.core.bundles import would_help

            return would_help(lease, request)
        held = dict(lease.request.scalars)
        for name, amount in request.scalars:
            if self.free.get(name, 0) < amount and name not in held:
                return False
        kinds = {kind for kind, _ in lease.request.devices}
        return all(
            kind in kinds or self._chooses(kind, amount, request)
            for kind, amount in request.devices
        )

    def _chooses(self, kind: str, amount: int, request: Request) -> bool:
        devices = self.device_sets.get(kind)
        found = devices and devices.choose(amount, request)
        return bool(found)

    def give_back(self, lease: Lease) -> None:
        """End a lease; all it held is free at once.

        Raises:
            KeyError: the lease was given back before.
        """
        home = lease.home or self
        del home.leases[lease.id]
        if lease.holder is not None:
            self.ended += 1
        if lease.is_lent:
            self.resume(lease)
        for name, amount in lease.request.scalars:
            home.free[name] += amount
        if home._by_device is not None:
            home._by_device.discard(lease)
        if lease.memories:
            for kind, share, memory in lease.held():
                home.device_sets[kind].give_back((share,), memory)
        else:
            memory = lease.request.gpu_memory
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=True
            ):
                home.device_sets[kind].give_back(shares, memory)
        if lease.stake is not None:
            lease.stake.end()

    def keep_devices(self, lease: Lease) -> None:
        """Give back all of a lease but its devices, which are not free yet."""
        if lease.is_lent:
            self.resume(lease)
        home = lease.home or self
        for name, amount in lease.request.scalars:
            home.free[name] += amount
        lease.request = replace(lease.request, scalars=())
        if lease.stake is not None:
            lease.stake.keep_devices(self.device_sets)

    def lend(self, lease: Lease) -> None:
        """Give back the CPUs of a lease whose task waits for others; nothing else."""
        lease.is_lent = True
        home = lease.home or self
        for name, amount in lease.request.scalars:
            if name == CPU:
                home.free[name] += amount
        if lease.stake is not None:
            lease.stake.lend()

    def resume(self, lease: Lease) -> None:
        """Undo `lend`, at once: there may be less than nothing free afterwards."""
        lease.is_lent = False
        home = lease.home or self
        for name, amount in lease.request.scalars:
            if name == CPU:
                home.free[name] -= amount
        if lease.stake is not None:
            lease.stake.resume()

    @property
    def is_overdrawn(self) -> bool:
        """Whether more CPUs are held than there are, after `resume`."""
        return self.free.get(CPU, 0) < 0

    def why_infeasible(self, request: Request) -> str | None:
        """Say in words what this node lacks even when idle, None if nothing."""
        if request.gang is not None:
            from aiogpu.core.bundles import why_never

            return why_never(self, request)
        return find_infeasible(self.capacity, self.device_sets, request)

    def room_for(self, request: Request, are_lent: bool = False) -> int | None:
        """How many leases of a request an idle node can have at once.

        Args:
            request: what each of them asks for.
            are_lent: whether their CPUs are given back.

        Returns:
            None where there is no end to them: they hold nothing.
        """
        if request.gang is not None:
            from aiogpu.core.bundles import room_for

            return room_for(self, request, are_lent)
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
        """What a lease holds of the memory of each of its devices.

        Returns:
            For each: its kind, its index, and the bytes; 0 where its memory is not
            known. They are those that were asked for by name, or else the part that
            the share is of the device's.
        """
        sets = (lease.home or self).device_sets
        return tuple(
            (kind, share[0], sets[kind].memory_of(share, memory))
            for kind, share, memory in lease.held()
        )

    def drains(self, lease: Lease) -> bool:
        """Whether a lease holds something of a device that is given to nobody now."""
        for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True):
            mask = self.device_sets[kind].aside_mask
            if mask and any(mask >> index & 1 for index, _ in shares):
                return True
        return False

    def totals(self) -> dict[str, float]:
        """Capacity in the user's terms; every resource by name."""
        totals = {name: number(amount) for name, amount in self.capacity.items()}
        for kind, devices in self.device_sets.items():
            totals[kind] = float(len(devices.devices))
            if memory := sum(devices.filling.capacity):
                totals[GPU_MEMORY] = float(memory)
        return totals

    def available(self) -> dict[str, float]:
        """What is free now in the user's terms; 0.0 where nothing is.

        Of GPU memory, bytes that nobody has reserved, be it by a share.
        """
        available = {name: number(max(amount, 0)) for name, amount in self.free.items()}
        for kind, devices in self.device_sets.items():
            given = [i for i in range(len(devices.free)) if i not in devices.aside]
            available[kind] = number(sum(devices.free[index] for index in given))
            if any(devices.filling.capacity):
                free = sum(map(devices.filling.free_memory, given))
                available[GPU_MEMORY] = float(free)
        return available

    def check(self) -> None:
        """Assert that capacity less all leases is what is free. Costs O(leases)."""
        free = dict(self.capacity)
        fillings = {
            kind: Filling(devices.filling.capacity)
            for kind, devices in self.device_sets.items()
        }
        for lease in self.leases.values():
            request = lease.request
            for name, amount in request.scalars:
                if name != CPU or not lease.is_lent:
                    free[name] -= amount
            for (_, amount), taken in zip(request.devices, lease.shares, strict=True):
                assert sum(part for _, part in taken) == amount, lease
            for kind, (index, part), memory in lease.held():
                has_memory = any(fillings[kind].capacity)
                fillings[kind].move(index, part, memory if has_memory else 0, 1)
        assert free == self.free, (free, self.free)
        assert all(free[name] >= 0 for name in free if name != CPU), free
        for kind, filling in fillings.items():
            assert filling == self.device_sets[kind].filling, (kind, filling)
            assert all(0 <= amount <= UNIT for amount in filling.free), kind
            self.device_sets[kind].check()
        if self._by_device is not None:
            self._by_device.check(self.leases.values())
        for gang in self.gangs.values():
            for bundle in gang:
                bundle.check()
