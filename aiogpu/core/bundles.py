"""The bundles of gangs: laid out over a node's devices, and ledgers of their own.

A gang is one lease to the ledger, taken whole or not at all. What it holds is divided
into *parts*, a ledger for each bundle, from which its members take their leases: so all
that is said of a node's ledger holds of a bundle as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiogpu.core.devices import COLD, Device, DeviceSet, Share, Warm
from aiogpu.core.gang import ANY, STRICT_SPREAD, Bundle, Gang, Within
from aiogpu.core.ids import LeaseId
from aiogpu.core.infeasible import find_infeasible
from aiogpu.core.layout import Layout, Plan
from aiogpu.core.lease import Lease
from aiogpu.core.ledger import Ledger
from aiogpu.core.resources import CPU, GPU, TYPE_PREFIX, UNIT, Request

if TYPE_CHECKING:
    from aiogpu.core.reservation import Reservation

COUNTED: Final = 10_000
"""Members of one bundle that are counted."""


class Part(Ledger):
    """What one bundle of a gang holds, and who of its members has what of it.

    Attributes:
        key: of the gang.
        index: of the bundle.
        bundle: what was asked for.
        masks: by kind, the devices of which it holds something.
        outside: a lease of the rest of these, which is never given back.
    """

    def __init__(
        self,
        whole: Ledger,
        key: str,
        index: int,
        bundle: Bundle,
        shares: tuple[tuple[Share, ...], ...],
    ) -> None:
        self.key = key
        self.index = index
        self.bundle = bundle
        self._shares = shares
        self._whole = whole
        # Of a bundle of memory alone, what is not its has none of that memory.
        is_bare = bundle.named_bytes and not dict(bundle.devices)[GPU]
        self._apart = 1 if is_bare else 0
        scalars, self.masks = dict(self.bundle.scalars), dict[str, int]()
        sets = []
        for (kind, _), held in zip(self.bundle.devices, shares, strict=True):
            devices = whole.device_sets[kind].devices
            if kind == GPU and bundle.named_bytes:
                devices = _with_memory(devices, held[0], bundle.named_bytes)
            sets.append(DeviceSet(kind, devices))
            self.masks[kind] = sum(1 << at for at, _ in held)
            for at, _ in held:
                if name := devices[at].type:
                    scalars.setdefault(TYPE_PREFIX + name, UNIT)
        super().__init__(scalars, sets)
        self._close_off()
        self._could_ever: dict[Request, bool] = {}

    def _close_off(self) -> None:
        """Have the rest of the devices taken, by a lease that is never given back."""
        rest, amounts = [], []
        for (kind, _), held in zip(self.bundle.devices, self._shares, strict=True):
            devices, mine = self.device_sets[kind], dict(held)
            others = tuple(
                share
                for at in range(len(devices.devices))
                for share in _rest_of(at, mine.get(at))
            )
            devices.take(others, self._apart)
            rest.append(others)
            amounts.append((kind, sum(amount for _, amount in others)))
        request = Request(devices=tuple(amounts), gpu_memory=self._apart)
        self.outside = Lease(LeaseId(0), request, tuple(rest))
        self.leases[self.outside.id] = self.outside

    @property
    def is_idle(self) -> bool:
        """Whether no member holds anything of it."""
        return len(self.leases) == 1

    def open(self) -> Part:
        """Take in members; from now on it lacks the devices that the node lacks."""
        for kind, devices in self.device_sets.items():
            devices.follow(self._whole.device_sets[kind])
        return self

    def close(self) -> None:
        """Undo `open`."""
        for devices in self.device_sets.values():
            devices.unfollow()

    def emptied(self) -> Part:
        """The same with nobody in it and nothing set aside."""
        return Part(self._whole, self.key, self.index, self.bundle, self._shares)

    def take(
        self,
        request: Request,
        barred: Mapping[str, int] | None = None,
        kept: Mapping[str, int] | None = None,
        warm: Warm = COLD,
    ) -> Lease | None:
        """Take all that is asked for, or nothing; see `Ledger.take`."""
        lease = super().take(request, barred, kept, warm)
        if lease is not None:
            lease.home = self
        return lease

    def could_ever(self, request: Request) -> bool:
        """Whether it would do for a request with nobody in it."""
        known = self._could_ever.get(request)
        if known is None:
            known = self.emptied().take(request) is not None
            self._could_ever[request] = known
        return known

    def has_devices_for(self, request: Request) -> bool:
        """Whether enough of its devices are not set aside for a request."""
        for kind, amount in request.devices:
            devices = self.device_sets[kind]
            usable = devices.usable(amount, request) & self.masks[kind]
            if (usable & ~devices.aside_mask).bit_count() < max(amount // UNIT, 1):
                return False
        return True


def _rest_of(at: int, mine: int | None) -> tuple[Share, ...]:
    """What is not a bundle's of a device of which it has so much; None for nothing."""
    if mine == 0:
        return (at, UNIT // 2), (at, UNIT - UNIT // 2)
    return ((at, UNIT - (mine or 0)),) if mine != UNIT else ()


def _with_memory(
    devices: Sequence[Device], held: Share, named: int
) -> tuple[Device, ...]:
    """A node's devices, of which one has the memory that a bundle names of it.

    So much that the bundle's share stands for it; or two bytes more, where it has no
    share: `_rest_of` takes these.
    """
    at, amount = held
    memory = named * UNIT // amount if amount else named + 2
    changed = replace(devices[at], memory=memory)
    return (*devices[:at], changed, *devices[at + 1 :])


def parts_for(ledger: Ledger, within: Within) -> Sequence[Part]:
    """The bundles from which a member may take; none until its gang is granted."""
    parts = ledger.gangs.get(within.key, ())
    return parts if within.bundle == ANY else parts[within.bundle : within.bundle + 1]


def take_grouped(
    ledger: Ledger,
    request: Request,
    reservation: Reservation | None = None,
    warm: Warm = COLD,
) -> Lease | None:
    """Take what a gang asks for, or a member of one; `Ledger.take` for all others.

    Args:
        ledger: the node's.
        request: what is asked for.
        reservation: what is kept for another, None for nothing.
        warm: see `Ledger.take`.
    """
    gang = request.gang
    if isinstance(gang, Within):
        for part in parts_for(ledger, gang):
            barred, kept = _withheld(reservation, part)
            lease = part.take(request, barred, kept, warm)
            if lease is not None:
                return lease
        return None
    barred, kept = _withheld(reservation, None)
    if gang is None:
        return ledger.take(request, barred, kept, warm)
    return take_gang(ledger, gang, request, barred or {}, kept)


def _withheld(
    kept: Reservation | None, part: Part | None
) -> tuple[Mapping[str, int] | None, Mapping[str, int] | None]:
    """The devices and the amounts of a bundle, or of the node, that are another's."""
    if kept is None or kept.part is not part:
        return None, None
    return kept.barred, kept.kept


def take_gang(
    ledger: Ledger,
    gang: Gang,
    request: Request,
    barred: Mapping[str, int],
    kept: Mapping[str, int] | None = None,
) -> Lease | None:
    """Take all bundles of a gang, or nothing; the lease has them as its parts."""
    leases = Layout(ledger, gang, barred, kept).find()
    if leases is None:
        return None
    lease = ledger.merge(leases, request)
    lease.parts = ledger.gangs[gang.key] = tuple(
        Part(ledger, gang.key, index, gang.bundles[index], one.shares).open()
        for index, one in enumerate(leases)
    )
    return lease


def give_back_gang(ledger: Ledger, lease: Lease) -> None:
    """End a gang's lease; none of its members holds anything any more."""
    for part in ledger.gangs.pop(lease.parts[0].key):
        part.close()
    ledger.give_back(lease)


def would_help(lease: Lease, request: Request) -> bool:
    """Whether giving a lease back may help a gang, or a member of one."""
    gang, home = request.gang, lease.home
    if not isinstance(gang, Within):
        return gang is not None and home is None
    if home is None or home.key != gang.key:
        return False
    return gang.bundle in (ANY, home.index)


def candidates(ledger: Ledger, request: Request) -> list[Part]:
    """The bundles for which a member may wait; those that would do now come first."""
    within = request.gang
    assert isinstance(within, Within), request
    parts = [p for p in parts_for(ledger, within) if p.could_ever(request)]
    # Sorting keeps the order of bundles that are alike.
    return sorted(parts, key=lambda part: not part.has_devices_for(request))


def roomiest(ledger: Ledger, request: Request) -> Part | None:
    """The first bundle for which a member may wait; None if there is none."""
    return next(iter(candidates(ledger, request)), None)


def why_never(ledger: Ledger, request: Request) -> str | None:
    """A clause that says why a gang, or a member of one, never fits; None if it may."""
    gang = request.gang
    assert gang is not None, request
    if isinstance(gang, Within):
        parts = parts_for(ledger, gang)
        if any(part.could_ever(request) for part in parts):
            return None
        if gang.key not in ledger.gangs:
            return None
        have = ", ".join(f"{part.index}: {_told(part)}" for part in parts)
        return f"no bundle that it may use could hold it ({have or 'there is none'})"
    if gang.strategy == STRICT_SPREAD and len(gang.bundles) > 1:
        return (
            f"STRICT_SPREAD has each of its {len(gang.bundles)} bundles on a machine "
            f"of its own, and this node is one; SPREAD has them on different devices"
        )
    for index, bundle in enumerate(gang.bundles):
        reason = find_infeasible(ledger.capacity, ledger.device_sets, bundle.request())
        if reason is not None:
            return f"for bundle {index}, {bundle}, {reason}"
    if Layout(Plan(ledger, is_idle=True), gang, {}, None).find() is None:
        return "its bundles do not all fit at once"
    return None


def _told(part: Part) -> str:
    """What a bundle holds, and on which devices."""
    told = [str(part.bundle)]
    for kind, mask in part.masks.items():
        devices = part.device_sets[kind].devices
        names = [
            f"{kind} {device.id}{f' of type {device.type}' if device.type else ''}"
            for at, device in enumerate(devices)
            if mask >> at & 1
        ]
        told.append(" and ".join(names))
    return " on ".join(told)


def room_for(ledger: Ledger, request: Request, are_lent: bool) -> int | None:
    """How many members with a request an empty gang has room for at once.

    None where there is no end to them; for a gang itself, and for members of one that
    is not granted yet, 1.
    """
    gang = request.gang
    parts = parts_for(ledger, gang) if isinstance(gang, Within) else ()
    if not parts:
        return 1
    held = [name for name, _ in request.scalars if not (are_lent and name == CPU)]
    if not held and not request.devices:
        return None
    count = 0
    for part in parts:
        empty = part.emptied()
        while count < COUNTED and (lease := Ledger.take(empty, request)):
            if are_lent:
                empty.lend(lease)
            count += 1
    return count
