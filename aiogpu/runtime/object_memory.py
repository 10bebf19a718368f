"""How much shared memory the values of a node take, and where they go beyond that."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING, Final

from aiogpu.linux.procfs import MemoryBounds
from aiogpu.memory.segment import spill_directory

if TYPE_CHECKING:
    from aiogpu.memory.control_page import ControlPage

PART: Final = 0.3
"""The part of the memory that may be used here that values take unless told."""


WARM_PART: Final = 4
"""Of the limit, at most one in so many bytes stands ready in workers."""


class ObjectMemory:
    """Counts the segments that somebody reads, whoever has written them.

    Attributes:
        limit: bytes; beyond it values are written to disk.
        used: bytes in memory now.
        warm: bytes of segments that stand ready in workers, to be written again.
    """

    def __init__(self, limit: int | None = None, directory: str | None = None) -> None:
        self.limit = limit
        self._directory = directory
        self.used = 0
        self.warm = 0
        self._page: ControlPage | None = None

    def __repr__(self) -> str:
        return f"<ObjectMemory {self.used} of {self.limit} bytes>"

    def show_on(self, page: ControlPage | None) -> None:
        """Have workers see how much is left, who do not ask before they write.

        None: there are no workers any more.
        """
        self._page = page
        self._show()

    @property
    def directory(self) -> str:
        """Where values are written that have no room in memory."""
        if self._directory is None:
            self._directory = spill_directory()
        return self._directory

    @property
    def total(self) -> int:
        """The limit in bytes, which is found out when it is first needed."""
        if self.limit is None:
            self.limit = int(MemoryBounds().safe_limit() * PART)
        return self.limit

    @property
    def left(self) -> int:
        """Bytes to the limit; below zero beyond it."""
        return self.total - self.used - self.warm

    def keep_warm(self, size: int) -> bool:
        """Count a segment that nobody reads as ready; False if it is too much."""
        if not size or size > min(
            self.left, (self.limit or 0) // WARM_PART - self.warm
        ):
            return False
        self.warm += size
        self._show()
        return True

    def use_warm(self, size: int) -> None:
        """What stood ready is written again, or has gone with its worker."""
        self.warm -= size
        self._show()

    def _show(self) -> None:
        if self._page is not None:
            self._page.note_left(max(0, self.left))

    def take(self, descriptor: int, size: int) -> int:
        """Count a segment; gives the bytes that it takes in memory."""
        if not is_memory(descriptor):
            return 0
        self.used += size
        self._show()
        return size

    def take_copy(self, size: int) -> int:
        """Count a copy of a segment in this process; gives the bytes that it takes."""
        self.used += size
        self._show()
        return size

    def give_back(self, size: int) -> None:
        """Count a segment no more that took so much."""
        self.used -= size
        self._show()


def is_memory(descriptor: int) -> bool:
    """Whether it is of memory, not of a file on disk, which knows no seals."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True
