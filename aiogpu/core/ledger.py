"""What the node has, what is taken, and by which lease.

A lease holds scalars and device shares together or not at all. The ledger does
not know what a lease is for. `check()` states its invariant as code: capacity
less all leases is what is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from aiogpu.core.devices import COLD, DeviceSet, Share, Warm
from aiogpu.core.ids import LeaseId
from aiogpu.core.resources import CPU, UNIT, Request, number, written


@dataclass(slots=True, eq=False)
class Lease:
    """What one task holds: the request, and which devices serve it.

    Attributes:
        id: counts up from 1.
        request: what was asked for.
        shares: device shares by kind, in the order of `request.devices`.
        is_lent: whether its CPUs are given back for as long as its task waits.
    """

    id: LeaseId
    request: Request
    shares: tuple[tuple[Share, ...], ...] = ()
    is_lent: bool = False


class Ledger:
    """The node's resources: exact amounts, taken and given back whole."""

    def __init__(
        self, scalars: Mapping[str, int], device_sets: Iterable[DeviceSet] = ()
    ) -> None:
        self.capacity = dict(scalars)
        self.free = dict(scalars)
        self.device_sets = {devices.kind: devices for devices in device_sets}
        self.leases: dict[LeaseId, Lease] = {}
        self._last_id = 0

    def __repr__(self) -> str:
        amounts = (
            f"{name} {free:g}/{self.totals()[name]:g}"
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
                self.device_sets[kind].take(taken)
        for name, amount in request.scalars:
            free[name] -= amount
        self._last_id += 1
        lease = Lease(LeaseId(self._last_id), request, shares)
        self.leases[lease.id] = lease
        return lease

    def _choose(
        self, request: Request, barred: Mapping[str, int] | None, warm: Warm
    ) -> tuple[tuple[Share, ...], ...] | None:
        found: list[tuple[Share, ...]] = []
        for kind, amount in request.devices:
            devices = self.device_sets.get(kind)
            chosen = devices and devices.choose(
                amount,
                request.accelerator_type,
                spread=request.spread,
                barred=barred.get(kind, 0) if barred else 0,
                warm=warm,
            )
            if not chosen:
                return None
            found.append(chosen)
        return tuple(found)

    def would_help(self, lease: Lease, request: Request) -> bool:
        """Whether a request that does not fit might, if this lease were given back."""
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
        found = devices and devices.choose(amount, request.accelerator_type)
        return bool(found)

    def give_back(self, lease: Lease) -> None:
        """End a lease; all it held is free at once.

        Raises:
            KeyError: the lease was given back before.
        """
        del self.leases[lease.id]
        if lease.is_lent:
            self.resume(lease)
        for name, amount in lease.request.scalars:
            self.free[name] += amount
        for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True):
            self.device_sets[kind].give_back(shares)

    def keep_devices(self, lease: Lease) -> None:
        """Give back all of a lease but its devices, which are not free yet."""
        if lease.is_lent:
            self.resume(lease)
        for name, amount in lease.request.scalars:
            self.free[name] += amount
        lease.request = replace(lease.request, scalars=())

    def lend(self, lease: Lease) -> None:
        """Give back the CPUs of a lease whose task waits for others; nothing else."""
        lease.is_lent = True
        for name, amount in lease.request.scalars:
            if name == CPU:
                self.free[name] += amount

    def resume(self, lease: Lease) -> None:
        """Undo `lend`, at once: there may be less than nothing free afterwards."""
        lease.is_lent = False
        for name, amount in lease.request.scalars:
            if name == CPU:
                self.free[name] -= amount

    @property
    def is_overdrawn(self) -> bool:
        """Whether more CPUs are held than there are, after `resume`."""
        return self.free.get(CPU, 0) < 0

    def why_infeasible(self, request: Request) -> str | None:
        """Say in words what this node lacks even when idle, None if nothing."""
        for name, asked in request.scalars:
            capacity = self.capacity.get(name, 0)
            if capacity < asked:
                there = written(name, number(capacity))
                return f"{name} {written(name, number(asked))} of {there}"
        for kind, asked in request.devices:
            devices = self.device_sets.get(kind)
            wanted = request.accelerator_type
            count = devices.count_of(wanted) if devices else 0
            if count * UNIT < asked:
                suffix = f" of type {wanted}" if wanted else ""
                return f"{kind} {number(asked):g} of {count}{suffix}"
        return None

    def room_for(self, request: Request, are_lent: bool = False) -> int | None:
        """How many leases of a request an idle node can have at once.

        Args:
            request: what each of them asks for.
            are_lent: whether their CPUs are given back.

        Returns:
            None where there is no end to them: they hold nothing.
        """
        rooms = [
            self.capacity.get(name, 0) // amount
            for name, amount in request.scalars
            if amount and not (are_lent and name == CPU)
        ]
        for kind, amount in request.devices:
            devices = self.device_sets.get(kind)
            count = devices.count_of(request.accelerator_type) if devices else 0
            # A share never spans devices, and who asks for several has them whole.
            each = UNIT // amount if amount < UNIT else 1
            rooms.append(count * each // max(amount // UNIT, 1))
        return min(rooms, default=None)

    def totals(self) -> dict[str, float]:
        """Capacity in the user's terms; every resource by name."""
        totals = {name: number(amount) for name, amount in self.capacity.items()}
        for kind, devices in self.device_sets.items():
            totals[kind] = float(len(devices.devices))
        return totals

    def available(self) -> dict[str, float]:
        """What is free now in the user's terms; 0.0 where nothing is."""
        available = {name: number(max(amount, 0)) for name, amount in self.free.items()}
        for kind, devices in self.device_sets.items():
            available[kind] = number(
                sum(
                    free
                    for index, free in enumerate(devices.free)
                    if index not in devices.aside
                )
            )
        return available

    def check(self) -> None:
        """Assert that capacity less all leases is what is free. Costs O(leases)."""
        free = dict(self.capacity)
        shares = {kind: [UNIT] * len(d.free) for kind, d in self.device_sets.items()}
        for lease in self.leases.values():
            for name, amount in lease.request.scalars:
                if name != CPU or not lease.is_lent:
                    free[name] -= amount
            for (kind, amount), taken in zip(
                lease.request.devices, lease.shares, strict=True
            ):
                assert sum(part for _, part in taken) == amount, lease
                for index, part in taken:
                    shares[kind][index] -= part
        assert free == self.free, (free, self.free)
        assert all(free[name] >= 0 for name in free if name != CPU), free
        for kind, amounts in shares.items():
            assert amounts == self.device_sets[kind].free, (kind, amounts)
            self.device_sets[kind].check()
            assert all(0 <= amount <= UNIT for amount in amounts), (kind, amounts)
