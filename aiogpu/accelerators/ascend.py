"""Huawei Ascend NPUs: detected in `/dev`, assigned by `ASCEND_RT_VISIBLE_DEVICES`.

Their type is not in the files that are read; it may be declared by a custom resource,
`resources={"accelerator_type:Ascend910B": 1}`. No library of Huawei's is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.core.devices import Device
from aiogpu.core.resources import device_quantity

from .listing import Id, choose, is_left_alone, joined, listed_in
from .sysfs import numbered
from .unwatched import Unwatched


class Ascend:
    """Ascend NPUs, the devices behind `resources={"NPU": n}`.

    Args:
        root: the directory under which the kernel's files are looked for.
    """

    kind: Final = "NPU"
    option: Final = "resources['NPU']"
    variable: Final = "ASCEND_RT_VISIBLE_DEVICES"

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def __repr__(self) -> str:
        return "<Ascend NPU>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which NPUs a node may share out.

        Args:
            environ: read for `ASCEND_RT_VISIBLE_DEVICES`.
            wanted: how many the user gave, maybe more than there are unless the
                variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        listed = listed_in(environ, self.variable)
        there = [Device(chip) for chip, _ in numbered("davinci", self._root, "dev")]
        return choose(self.option, wanted, there, listed)

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variable gives a worker these NPUs and no others."""
        if is_left_alone(self.variable, environ):
            return {}
        return {self.variable: joined(ids)}

    def quantity(self, value: object) -> int:
        """Turn a number into parts: below 1 a share, above it whole NPUs.

        Raises:
            OptionError: the value is no such number.
        """
        return device_quantity(self.option, value)

    def type_of(self, name: str | None) -> str | None:
        """The name of the chip is its type: "Ascend910B"."""
        return name or None

    def watch(self) -> Unwatched:
        """Nobody is asked what is on an NPU."""
        return Unwatched()
