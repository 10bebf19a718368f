"""What one task holds of a ledger, and of which devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.core.devices import Share
from aiogpu.core.ids import LeaseId
from aiogpu.core.resources import Request

if TYPE_CHECKING:
    from aiogpu.core.bundles import Part
    from aiogpu.core.records import WorkerRecord
    from aiogpu.core.stake import Stake


@dataclass(slots=True, eq=False)
class Lease:
    """What one task holds: the request, and which devices serve it.

    Attributes:
        id: counts up from 1.
        request: what was asked for.
        shares: device shares by kind, in the order of `request.devices`.
        is_lent: whether its CPUs are given back for as long as its task waits.
        stake: on whose account it is, None where nobody counts.
        home: the bundle of a gang from which it was taken, None for the node itself.
        parts: of a gang's lease, its bundles.
        memories: of a gang's, as `shares`: the `gpu_memory` that each was taken for;
            empty where none of its bundles names any.
        holder: who has it, None before somebody has.
    """

    id: LeaseId
    request: Request
    shares: tuple[tuple[Share, ...], ...] = ()
    is_lent: bool = False
    stake: Stake | None = None
    home: Part | None = None
    parts: tuple[Part, ...] = ()
    memories: tuple[tuple[int, ...], ...] = ()
    holder: WorkerRecord | None = None

    def held(self) -> Iterator[tuple[str, Share, int]]:
        """Its shares, each with its kind and the `gpu_memory` it was taken for."""
        for at, (kind, _) in enumerate(self.request.devices):
            shares = self.shares[at]
            each = (self.request.gpu_memory,) * len(shares)
            memories = self.memories[at] if self.memories else each
            for share, memory in zip(shares, memories, strict=True):
                yield kind, share, memory

    def part_of(self, kind: str, index: int) -> int:
        """What it holds of a device."""
        return sum(
            part
            for (name, _), shares in zip(self.request.devices, self.shares, strict=True)
            if name == kind
            for at, part in shares
            if at == index
        )
