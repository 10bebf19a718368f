"""What a task asks of a device beside its type: memory, capability, name.

Pure, and compared by value: tasks that ask alike stand in one queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from aiogpu.core.sizes import size

if TYPE_CHECKING:
    from aiogpu.core.devices import Device


@dataclass(frozen=True, slots=True)
class Where:
    """Conditions that a device must fulfil, all of them.

    A device of which the fact in question is not known does not fulfil it.

    Attributes:
        least_memory: bytes of device memory that it must have; 0 for any.
        least_capability: compute capability from which on, such as (8, 0).
        name: pattern of the product's name, in small letters, with `*`, `?`, `[...]`.
    """

    least_memory: int = 0
    least_capability: tuple[int, int] = (0, 0)
    name: str = ""

    def fits(self, device: Device) -> bool:
        """Whether a device fulfils them."""
        if device.memory < self.least_memory:
            return False
        if self.least_capability > (device.compute_capability or (0, 0)):
            return False
        return not self.name or fnmatchcase((device.name or "").lower(), self.name)

    def __str__(self) -> str:
        terms = []
        if self.least_memory:
            terms.append(f"memory of {size(self.least_memory)} or more")
        if self.least_capability > (0, 0):
            major, minor = self.least_capability
            terms.append(f"compute capability {major}.{minor} or more")
        if self.name:
            terms.append(f"a name like {self.name!r}")
        return " and ".join(terms)
