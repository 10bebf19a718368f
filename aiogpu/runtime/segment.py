"""A segment of shared memory that somebody reads or will read.

Each takes up a descriptor of this process. Where few are left, a private copy of the
content is kept instead, which takes up none.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Final

from aiogpu.memory.segment import Segment
from aiogpu.runtime.descriptors import values_limit

LARGEST_COPY: Final = 1 << 26
"""Bytes of the largest segment that is copied: the loop stands still meanwhile."""


class SharedSegment:
    """Kept alive by whoever reads it; with the last of these it can be written again.

    Attributes:
        id: by which payloads name it.
        fd: a descriptor for readers, which is closed with this; -1 if there is a copy.
        copy: a copy of its content, None if there is a descriptor.
        size: in bytes.
    """

    __slots__ = ("__weakref__", "_on_free", "copy", "fd", "id", "size")

    def __init__(
        self,
        identity: int,
        content: int | mmap.mmap,
        size: int,
        on_free: Callable[[int], object],
    ) -> None:
        self.id = identity
        self.fd = -1
        self.copy: mmap.mmap | None = None
        if isinstance(content, mmap.mmap):
            self.copy = content
        else:
            self.fd = content
        self.size = size
        self._on_free = on_free

    def __repr__(self) -> str:
        return f"<SharedSegment {self.id}, {self.size} bytes>"

    def share(self) -> int:
        """A new descriptor with the content, for a reader; the caller closes it.

        Raises:
            OSError: there are too many descriptors, or there is too little memory.
        """
        if self.copy is None:
            return os.dup(self.fd)
        segment = Segment.create(self.id, self.size)
        try:
            segment.write([memoryview(self.copy)[: self.size]])
            return segment.share()
        finally:
            segment.close()

    def keep_copy(self, copy: mmap.mmap, on_free: Callable[[int], object]) -> None:
        """Keep this copy in place of the descriptor.

        Args:
            copy: of the whole segment.
            on_free: called in place of what was given before.
        """
        os.close(self.fd)
        self.fd, self.copy, self._on_free = -1, copy, on_free

    def __del__(self) -> None:
        # Wherever the collector runs: in another thread, or amid the loop's own work.
        if self.fd >= 0:
            os.close(self.fd)
        self._on_free(self.id)


def kept(descriptor: int) -> int | mmap.mmap:
    """Keep a descriptor that has come; or, where few are left, a copy of its content.

    The descriptor is closed then, so the next one gets the same number.
    """
    if descriptor < values_limit():
        return descriptor
    try:
        copy = copy_of(descriptor)
    except OSError:  # there is no memory
        return descriptor
    if copy is None:
        return descriptor
    os.close(descriptor)
    return copy


def copy_of(descriptor: int) -> mmap.mmap | None:
    """A copy of a segment's content; None if it is too large for that.

    Raises:
        OSError: there is too little memory.
    """
    size = os.fstat(descriptor).st_size
    if not 0 < size <= LARGEST_COPY:
        return None
    copy = mmap.mmap(-1, size)
    with memoryview(copy) as whole:
        done = 0
        while done < size:
            count = os.preadv(descriptor, [whole[done:]], done)
            if not count:
                raise OSError("the segment is shorter than it was")
            done += count
    return copy


def is_short() -> bool:
    """Whether few descriptors of this process are left.

    The kernel gives the lowest number that is free, so all below are in use.
    """
    try:
        lowest = os.dup(0)
    except OSError:
        return True
    os.close(lowest)
    return lowest >= values_limit()


def discard(content: int | mmap.mmap) -> None:
    """Give up what `kept` has given."""
    if isinstance(content, mmap.mmap):
        content.close()
    else:
        os.close(content)
