"""A segment of shared memory that somebody reads or will read."""

from __future__ import annotations

import os
from collections.abc import Callable


class SharedSegment:
    """Kept alive by whoever reads it; with the last of these it can be written again.

    Attributes:
        id: by which payloads name it.
        fd: a descriptor for readers; it is closed with this.
        size: in bytes.
    """

    __slots__ = ("__weakref__", "_on_free", "fd", "id", "size")

    def __init__(
        self, identity: int, fd: int, size: int, on_free: Callable[[int], object]
    ) -> None:
        self.id = identity
        self.fd = fd
        self.size = size
        self._on_free = on_free

    def __repr__(self) -> str:
        return f"<SharedSegment {self.id}, {self.size} bytes>"

    def __del__(self) -> None:
        # Wherever the collector runs: in another thread, or amid the loop's own work.
        os.close(self.fd)
        self._on_free(self.id)
