"""The watch of a vendor whose driver nobody asks while a node runs.

Light on purpose, for a vendor's file comes into workers when a task asks for its kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from aiogpu.core.devices import Device

    from .health import Health
    from .sample import Sample


@final
class Unwatched:
    """Knows of no device: a share is free when its processes have ended."""

    def knows(self, device: Device) -> bool:
        """False, of any; see `DeviceWatch`."""
        del device
        return False

    def open(self) -> None:
        """There is no library."""

    def look(self, device: Device) -> Sample:
        """Nothing can be learnt."""
        from .sample import Sample

        return Sample(problem=f"the driver of {device.id} is not asked")

    def check(self, device: Device) -> Health:
        """Nothing can be learnt."""
        from .health import Health

        del device
        return Health()

    def close(self) -> None:
        """There is no library."""
