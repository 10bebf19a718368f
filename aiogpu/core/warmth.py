"""Which devices idle workers are bound to, so that tasks can be led to them.

A worker that is reused has its devices for life. Where several choices are equally
good, the one for which a worker waits spares a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiogpu.core.records import Binding
from aiogpu.core.specs import Environment

_Key = tuple[Environment, str, int]


class Warmth:
    """Devices with an idle worker, as masks: by environment, kind and memory limit."""

    def __init__(self) -> None:
        self._single: dict[_Key, int] = {}
        self._several: dict[_Key, dict[int, None]] = {}

    def add(self, binding: Binding) -> None:
        """The first idle worker of a binding has come."""
        key, mask = _place(binding)
        if mask & (mask - 1):
            self._several.setdefault(key, {})[mask] = None
        elif mask:
            self._single[key] = self._single.get(key, 0) | mask

    def discard(self, binding: Binding) -> None:
        """The last idle worker of a binding has gone."""
        key, mask = _place(binding)
        if mask & (mask - 1):
            several = self._several[key]
            del several[mask]
            if not several:
                del self._several[key]
        elif mask:
            left = self._single[key] ^ mask
            if left:
                self._single[key] = left
            else:
                del self._single[key]

    def single(self, environment: Environment, kind: str, limit: int = 0) -> int:
        """The devices for each of which a worker waits that has it alone."""
        return self._single.get((environment, kind, limit), 0)

    def several(
        self, environment: Environment, kind: str, limit: int = 0
    ) -> Sequence[int]:
        """The sets of more than one device for which a worker waits."""
        return tuple(self._several.get((environment, kind, limit), ()))

    def check(self, bindings: Iterable[Binding]) -> None:
        """Assert that it holds what these bindings say. Costs O(bindings)."""
        fresh = Warmth()
        for binding in bindings:
            fresh.add(binding)
        assert fresh._single == self._single, (fresh._single, self._single)
        held = {key: set(masks) for key, masks in self._several.items()}
        assert {key: set(masks) for key, masks in fresh._several.items()} == held


def _place(binding: Binding) -> tuple[_Key, int]:
    """Where a binding is filed; 0 for a mask where it is not."""
    environment, devices, limit = binding
    if len(devices) != 1:
        return (environment, "", 0), 0
    kind, indices = devices[0]
    mask = 0
    for index in indices:
        mask |= 1 << index
    return (environment, kind, limit), mask
