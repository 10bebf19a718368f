"""Which modules the next generation of zygotes is to have. A pure rule.

Workers say what they have imported and what it cost. A module joins if it was dear
once, or not cheap in two workers; one that was found unfit never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

DEAR: Final = 50_000
"""Microseconds of an import that is learnt when it is seen once."""
NOT_CHEAP: Final = 5_000
"""Microseconds of an import that is learnt when a second worker pays them too."""
MOST: Final = 64
"""Modules that are learnt for one environment."""
REMEMBERED: Final = 1024
"""Modules that were seen once and are remembered."""

DEVICE_MODULES: Final = frozenset(
    {
        "bitsandbytes",
        "cupy",
        "deepspeed",
        "flash_attn",
        "numba.cuda",
        "pycuda",
        "tensorrt",
        "triton",
        "vllm",
        "xformers",
    }
)
"""What looks for devices when it is imported, and remembers what it has found: in a
zygote, which has none, it would find none."""


class Learning:
    """What is known of the modules that workers of one environment import.

    Attributes:
        modules: those that a zygote is to import, in the order to import them.
        proven: those of them that a zygote has imported and stayed fit.
        left_out: those that are unfit, and why.
    """

    def __init__(self, explicit: Iterable[str], learnt: Sequence[str] = ()) -> None:
        self.modules: list[str] = list(learnt)
        self.proven: set[str] = set(learnt)
        self.left_out: dict[str, str] = {}
        self._explicit = frozenset(explicit)
        self._seen: set[str] = set()

    def hear(self, names: Sequence[str], microseconds: Sequence[int]) -> bool:
        """Note what one worker has imported; True if a module is newly learnt.

        A worker imports a module once, so each report is another worker's.
        """
        count = len(self.modules)
        for name, cost in zip(names, microseconds, strict=False):
            if cost < NOT_CHEAP or not self._may_learn(name):
                continue
            if cost >= DEAR or name in self._seen:
                self._seen.discard(name)
                self.modules.append(name)
            elif len(self._seen) < REMEMBERED:
                self._seen.add(name)
        return len(self.modules) > count

    def _may_learn(self, name: str) -> bool:
        return (
            len(self.modules) < MOST
            and name not in self._explicit
            and name not in self.modules
            and name not in self.left_out
            and not sees_devices(name)
        )

    def prove(self, modules: Iterable[str]) -> None:
        """A zygote has these, but for those left out, and may be forked."""
        self.proven.update(set(modules) & set(self.modules))

    def leave_out(self, module: str, reason: str) -> None:
        """It is unfit: no zygote imports it any more."""
        self.left_out[module] = reason
        self.proven.discard(module)
        if module in self.modules:
            self.modules.remove(module)


def sees_devices(module: str) -> bool:
    """Whether importing this module would look for devices."""
    parts = module.split(".")
    return any(
        ".".join(parts[:count]) in DEVICE_MODULES for count in range(1, len(parts) + 1)
    )
