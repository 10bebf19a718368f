"""Huawei Ascend NPUs: detected in `/dev`, assigned by `ASCEND_RT_VISIBLE_DEVICES`.

The device files do not show the type. A custom resource may declare it:
`resources={"accelerator_type:Ascend910B": 1}`.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiogpu.core.model.request import Device

from .listed_devices import ListedAccelerator, numbered


class Ascend(ListedAccelerator):
    """Ascend NPUs, the devices behind `resources={"NPU": n}`."""

    kind = "NPU"
    option = "resources['NPU']"
    variable = "ASCEND_RT_VISIBLE_DEVICES"

    def detect(self, environ: Mapping[str, str]) -> list[Device]:
        """Return the NPUs that have a device file."""
        del environ
        return [Device(chip) for chip, _ in numbered("davinci", self.root, "dev")]
