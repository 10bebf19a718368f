"""A node without devices: nobody is asked whether they are free, and nothing loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.core.model.ids import WorkerId
    from aiogpu.core.resources.ledger import Lease
    from aiogpu.core.scheduler.scheduler import Feed


class NullDeviceRelease:
    """What such a node has in place of a `DeviceRelease`."""

    def tell(self, feed: Feed) -> None:
        """There will be nothing to tell."""

    def begin(self, worker: WorkerId, lease: Lease) -> None:
        """A worker begins, and is on no device."""

    def end(self, worker: WorkerId, lease: Lease, pids: Collection[int]) -> bool:
        """Return whether anybody is asked: no."""
        del worker, lease, pids
        return False

    def forget(self, worker: WorkerId) -> None:
        """A worker has ended that was on no device."""
