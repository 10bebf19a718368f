"""Gangs: several requests that are granted together or not at all, as bundles.

What is asked of the ledger for a gang, and what its members ask, who take from its
bundles. Plain values all through: they travel, and a process's hashes do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from aiogpu.core.filling import named_bytes
from aiogpu.core.resources import GPU, TYPE_PREFIX, Request

PACK: Final = "PACK"
SPREAD: Final = "SPREAD"
STRICT_PACK: Final = "STRICT_PACK"
STRICT_SPREAD: Final = "STRICT_SPREAD"
STRATEGIES: Final = (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD)

ANY: Final = -1
"""As the index of a bundle: whichever has room."""

MOST_BUNDLES: Final = 256
"""Of one gang."""

Amounts = tuple[tuple[str, int], ...]


class Bundle(NamedTuple):
    """What one bundle holds; see `Request`."""

    scalars: Amounts
    devices: Amounts
    accelerator_type: str | None
    gpu_memory: int = 0

    @classmethod
    def of(cls, request: Request) -> Bundle:
        """The bundle that holds what a request asks for."""
        return cls(
            request.scalars,
            request.devices,
            request.accelerator_type,
            request.gpu_memory,
        )

    def request(self, *, spread: bool = False) -> Request:
        """What is asked of the ledger for it."""
        return Request(
            self.scalars,
            self.devices,
            self.accelerator_type,
            spread,
            gpu_memory=self.gpu_memory,
        )

    @property
    def named_bytes(self) -> int:
        """The bytes of its one GPU that it has by name; 0 where its share says it."""
        return named_bytes(dict(self.devices).get(GPU, 0), self.gpu_memory)

    def could_hold(self, request: Request) -> bool:
        """Whether a request is no more than this by its amounts."""
        scalars, devices = dict(self.scalars), dict(self.devices)
        if self.named_bytes and request.gpu_memory > self.named_bytes:
            return False
        # Which type its devices have is known once they are.
        of_type = TYPE_PREFIX + (request.accelerator_type or "")
        return all(
            amount <= scalars.get(name, 0)
            for name, amount in request.scalars
            if name != of_type
        ) and all(
            name in devices and amount <= devices[name]
            for name, amount in request.devices
        )

    def __str__(self) -> str:
        return str(self.request())


class Gang(NamedTuple):
    """All bundles of one reservation.

    Attributes:
        key: tells it from all others, in whichever process they were made.
        name: for people.
        strategy: how its bundles are laid out, one of `STRATEGIES`.
    """

    key: str
    name: str
    strategy: str
    bundles: tuple[Bundle, ...]

    def request(self) -> Request:
        """What all bundles together ask for."""
        scalars: Counter[str] = Counter()
        devices: Counter[str] = Counter()
        for bundle in self.bundles:
            scalars.update(dict(bundle.scalars))
            devices.update(dict(bundle.devices))
        return Request(
            tuple(sorted(scalars.items())), tuple(sorted(devices.items())), gang=self
        )

    def holding(self, index: int, request: Request) -> list[int]:
        """The bundles that could hold a request, of all or of the one that is named."""
        candidates: Sequence[int] = (
            range(len(self.bundles)) if index == ANY else (index,)
        )
        return [one for one in candidates if self.bundles[one].could_hold(request)]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.bundles))}]"


class Within(NamedTuple):
    """Where a member of a gang takes what it asks for.

    Attributes:
        key, name: those of the gang.
        bundle: index of the bundle, or `ANY`.
    """

    key: str
    name: str
    bundle: int = ANY

    def __str__(self) -> str:
        which = "any bundle" if self.bundle == ANY else f"bundle {self.bundle}"
        return f"{which} of {self.name}"
