"""Leases by the devices of which they hold something.

So whoever asks when a device will be free looks at its own leases, not at all of the
node's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.core.ids import LeaseId
    from aiogpu.core.lease import Lease


class ByDevice:
    """The leases of a ledger that have shares."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._on: dict[str, dict[int, dict[LeaseId, Lease]]] = {k: {} for k in kinds}

    def on(self, kind: str, index: int) -> Collection[Lease]:
        """Those that hold something of a device."""
        return self._on[kind].get(index, {}).values()

    def add(self, lease: Lease) -> None:
        """A lease was taken."""
        for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True):
            on = self._on[kind]
            for index, _ in shares:
                if index in on:
                    on[index][lease.id] = lease
                else:
                    on[index] = {lease.id: lease}

    def discard(self, lease: Lease) -> None:
        """A lease has ended."""
        for (kind, _), shares in zip(lease.request.devices, lease.shares, strict=True):
            on = self._on[kind]
            for index, _ in shares:
                # Two bundles of a gang may be on one device.
                on[index].pop(lease.id, None)

    def check(self, leases: Iterable[Lease]) -> None:
        """Assert that it knows these leases and no others. Costs O(leases)."""
        fresh = ByDevice(self._on)
        for lease in leases:
            fresh.add(lease)
        for kind, on in self._on.items():
            held = {index: some for index, some in on.items() if some}
            assert held == fresh._on[kind], (kind, held)
