"""The segments of this process, in use or kept warm for reuse.

A new page costs several times as much as a write to an existing page. So segments
without readers are kept, up to a limit, and written again.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

from aiogpu.errors import ObjectMemoryError
from aiogpu.memory.segment import Segment, whole_pages

_LARGEST_FIT: Final = 2
"""A warm segment may have up to this many times the requested size."""

MOST_WARM: Final = 256
"""Number of warm segments at most: each uses two descriptors, or one from Python 3.13
on, and the limit of many processes is 1024."""

_SHORT_OF_OTHERS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_DISK_IS_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


class SegmentPool:
    """The segments of one process as a writer, in use and warm.

    Used by one thread at a time.

    Attributes:
        limit: bytes of warm segments at most.
        bytes_warm: bytes of warm segments.
        bytes_in_use: bytes of segments in memory that were taken and not given back.
        bytes_on_disk: bytes of segments on disk that were taken and not given back.
    """

    def __init__(
        self, first_id: int, limit: int, disk: Callable[[], str | None]
    ) -> None:
        """Begin without segments.

        Args:
            first_id: number of the first segment; later segments count up from it.
            limit: bytes of warm segments to keep.
            disk: returns the directory for segments past the memory limit, None for
                none; called when one is needed.
        """
        self.limit = limit
        self.bytes_warm = 0
        self.bytes_in_use = 0
        self.bytes_on_disk = 0
        self._next_id = first_id
        self._disk = disk
        self._in_use: dict[int, Segment] = {}
        # The longest unused first; `_by_size` has the same segments by size.
        self._warm: dict[int, Segment] = {}
        self._by_size: list[tuple[int, int]] = []

    def take(self, size: int, is_scarce: bool = False) -> Segment:
        """Return a segment of at least `size` bytes to write to.

        This is the smallest warm segment of `size` to twice `size` bytes, else a new
        one.

        Args:
            size: bytes.
            is_scarce: no more memory may be used than now. If closing warm segments
                does not free enough, the new segment is on disk.

        Raises:
            ObjectMemoryError: `is_scarce`, and there is no directory, or it is full.
            OSError: this process has too many descriptors (EMFILE, ENFILE), or too
                little memory (ENOMEM), for a new one.
        """
        segment = self._take_warm(size) or self._new(size, is_scarce)
        self._in_use[segment.id] = segment
        self._count(segment, segment.size)
        return segment

    def give_back(self, segment_id: int) -> bool:
        """Take back a segment without readers: keep it warm, or close it.

        It is closed if it is on disk, larger than the limit, or still read according to
        the kernel (`Segment.is_read`); its readers keep their mappings. The segments
        unused for longest are closed to make room. Before the call, close every
        descriptor from `share`, since an open one counts as a reader.

        Returns:
            True if the segment is kept.

        Raises:
            KeyError: no segment of this number is in use.
        """
        segment = self._in_use.pop(segment_id)
        self._count(segment, -segment.size)
        if segment.is_on_disk or segment.size > self.limit or segment.is_read:
            segment.close()
            return False
        self._shrink(self.limit - segment.size, MOST_WARM - 1)
        self._warm[segment_id] = segment
        insort(self._by_size, (segment.size, segment_id))
        self.bytes_warm += segment.size
        return True

    def find(self, segment_id: int) -> Segment | None:
        """Return the segment of a number that is in use, None if there is none."""
        return self._in_use.get(segment_id)

    def discard(self, segment_id: int) -> None:
        """Close a segment, in use or warm, if it exists."""
        if segment_id in self._warm:
            self._pop_warm(segment_id).close()
        segment = self._in_use.pop(segment_id, None)
        if segment is not None:
            self._count(segment, -segment.size)
            segment.close()

    def close(self) -> None:
        """Close all segments; readers keep their mappings."""
        for segment_id in [*self._warm, *self._in_use]:
            self.discard(segment_id)

    def _take_warm(self, size: int) -> Segment | None:
        least = whole_pages(size)
        place = bisect_left(self._by_size, (least, -1))
        if place == len(self._by_size):
            return None
        fitting, segment_id = self._by_size[place]
        return self._pop_warm(segment_id) if fitting <= least * _LARGEST_FIT else None

    def _pop_warm(self, segment_id: int) -> Segment:
        segment = self._warm.pop(segment_id)
        del self._by_size[bisect_left(self._by_size, (segment.size, segment_id))]
        self.bytes_warm -= segment.size
        return segment

    def _shrink(self, most_bytes: int, most: int = MOST_WARM) -> None:
        """Close warm segments until at most these bytes and this number are left."""
        while self.bytes_warm > most_bytes or len(self._warm) > most:
            self._pop_warm(next(iter(self._warm))).close()

    def _new(self, size: int, is_scarce: bool) -> Segment:
        least = whole_pages(size)
        if not is_scarce:
            segment = Segment.create(self._next_id, size)
        elif self.bytes_warm >= least:
            self._shrink(self.bytes_warm - least)
            segment = Segment.create(self._next_id, size)
        else:
            segment = self._spilled(size)
        self._next_id += 1
        return segment

    def _spilled(self, size: int) -> Segment:
        directory = self._disk()
        if directory is None:
            raise ObjectMemoryError(
                self._no_room(size, "nothing may be spilled to disk")
            )
        try:
            return Segment.create(self._next_id, size, directory)
        except OSError as error:
            if error.errno in _SHORT_OF_OTHERS:
                raise
            why = "is full" if error.errno in _DISK_IS_FULL else "cannot be written"
            message = self._no_room(size, f"{directory} {why} ({error.strerror})")
            raise ObjectMemoryError(message) from error

    def _no_room(self, size: int, why: str) -> str:
        return (
            f"there is no room for a value of {size} bytes ({size / 2**20:.1f} MiB): "
            f"the object memory is used up, {self.bytes_in_use} bytes by this process, "
            f"which may keep {self.limit} more for reuse, and {why}. Raise "
            f"object_memory= of init(), drop handles that are no longer needed, or "
            f"give init() a spill_directory= with free space."
        )

    def _count(self, segment: Segment, change: int) -> None:
        if segment.is_on_disk:
            self.bytes_on_disk += change
        else:
            self.bytes_in_use += change
