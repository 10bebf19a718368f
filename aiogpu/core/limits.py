"""What one program may have of a node that several share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiogpu.core.ledger import Ledger
from aiogpu.core.resources import GPU_MEMORY, UNIT, quantity
from aiogpu.errors import OptionError


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may have at once; nothing is limited by default.

    Attributes:
        max_waiting: tasks of it that have not ended, running ones included; one more
            is refused. None for no limit.
        max_amount: what it may hold of a resource, `{"GPU": 2}`; its tasks beyond
            that wait. GPU memory in bytes, as far as it was asked for by name.
        max_share: the same as a part of all that the node has, above 0 and up to 1:
            `{"CPU": 0.5}`.

    Raises:
        OptionError: one of these is not such a number.
    """

    max_waiting: int | None = None
    max_amount: Mapping[str, float] = field(default_factory=dict)
    max_share: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = self.max_waiting
        is_count = isinstance(most, int) and not isinstance(most, bool)
        if most is not None and not (is_count and 0 < most < 1 << 31):
            raise OptionError(
                f"max_waiting={most!r} is no number of tasks; give an int from 1 to "
                f"{(1 << 31) - 1:_}, or None for no limit."
            )
        for name, amount in self.max_amount.items():
            quantity(f"max_amount[{name!r}]", amount)
        for name, share in self.max_share.items():
            option = f"max_share[{name!r}]"
            if not 0 < quantity(option, share) <= UNIT:
                raise OptionError(
                    f"{option}={share!r} is no part of what there is; give a number "
                    f"above 0 and up to 1."
                )

    def on(self, ledger: Ledger) -> dict[str, int]:
        """The most that may be held of each limited resource of a node, in parts.

        Raises:
            OptionError: the node has no such resource.
        """
        capacity = capacity_of(ledger)
        for name in (*self.max_amount, *self.max_share):
            if name not in capacity:
                known = ", ".join(sorted(capacity))
                raise OptionError(
                    f"a limit for {name!r} means nothing here: this node has {known}."
                )
        most = {name: quantity(name, value) for name, value in self.max_amount.items()}
        for name, share in self.max_share.items():
            part = capacity[name] * quantity(name, share) // UNIT
            most[name] = min(part, most.get(name, part))
        return most


def capacity_of(ledger: Ledger) -> dict[str, int]:
    """All that a node has, in parts, by name; devices of a kind are summed."""
    capacity = dict(ledger.capacity)
    for kind, devices in ledger.device_sets.items():
        capacity[kind] = len(devices.devices) * UNIT
        if memory := sum(devices.filling.capacity):
            capacity[GPU_MEMORY] = memory * UNIT
    return capacity
