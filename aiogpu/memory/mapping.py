"""The segments that a process has mapped, its own segments included."""

from __future__ import annotations

import _thread
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ref

from aiogpu.memory.segment import map_privately


class _Sight(ref[mmap.mmap]):
    """A weak reference to a mapping, with the number of its segment."""

    __slots__ = ("segment",)
    segment: int


class SegmentSpans(NamedTuple):
    """The positions of buffers in a segment.

    Attributes:
        segment: number of the segment.
        size: bytes of the segment.
        spans: offset and length of each buffer.
    """

    segment: int
    size: int
    spans: list[tuple[int, int]]


class Mappings:
    """The segments that this process reads.

    Each load has a mapping of its own, which its views keep: it ends with the last
    view. So the views can be written: the kernel copies a page when it is written
    (`map_privately`), and no other load sees the change. May be used by any thread.

    The end of each mapping is reported once, after munmap(2), with one exception. If
    the views are part of a reference cycle, the collector reports it just before, and a
    finalizer may even revive a view. So a writer asks the kernel before it writes again
    (`Segment.is_read`). This also covers mappings inherited by forks, which are not
    reported here.
    """

    def __init__(self, on_unmapped: Callable[[int], None]) -> None:
        """Begin without mappings.

        Args:
            on_unmapped: called with a segment when its mapping has ended: by the
                collector, in any thread at any time, or inside `views`. It must be
                short, take no lock, and call only `is_mapped` of this object.
        """
        self._on_unmapped = on_unmapped
        self._latest: dict[int, _Sight] = {}
        # Kept until their callback has run.
        self._sights: dict[int, _Sight] = {}
        # Code that the collector runs must not wait for a lock. So changes are queued,
        # and the thread that gets the lock without waiting counts all of them.
        self._changes: deque[tuple[int, int]] = deque()
        self._counting = _thread.allocate_lock()
        self._counts: dict[int, int] = {}

    def views(
        self, segment: int, fd: int, size: int, spans: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Map a segment; return views of its spans, which nobody else can see.

        Args:
            segment: number of the segment.
            fd: descriptor of the segment. May be closed afterwards. Up to Python 3.12 a
                mapping keeps a copy of it open.
            size: bytes of the whole segment.
            spans: offset and length of each view, in bytes.

        Raises:
            ValueError: the segment is shorter than `size`, or a span is outside of it.
            OSError: there are too many descriptors or mappings.
        """
        for offset, length in spans:
            if offset < 0 or length < 0 or offset + length > size:
                raise ValueError(
                    f"span {(offset, length)} is outside of segment {segment}, which "
                    f"has {size} bytes"
                )
        memory = memoryview(self._map(segment, fd, size))
        return [memory[offset : offset + length] for offset, length in spans]

    def is_mapped(self, segment: int) -> bool:
        """Return whether a view of the segment exists."""
        sight = self._latest.get(segment)
        return segment in self._counts or (sight is not None and sight() is not None)

    def shown(self, buffers: Sequence[memoryview]) -> SegmentSpans | None:
        """Return the spans of buffers that are unchanged views of a segment.

        Args:
            buffers: contiguous buffers.

        Returns:
            None if a buffer is not in the segment or may have been changed in this
            process, or if the buffers are less than half of the segment.
        """
        if not self._sights:
            return None
        # Imported late: slow to import, and rarely needed.

        from aiogpu.memory.addresses import address_of

        first = address_of(buffers[0])
        for sight in [*self._sights.values()]:
            mapping = sight()
            begin = 0 if mapping is None else address_of(mapping)
            if mapping is not None and begin <= first < begin + len(mapping):
                return self._shown(sight.segment, mapping, begin, buffers)
        return None

    def _shown(
        self,
        segment: int,
        mapping: mmap.mmap,
        begin: int,
        buffers: Sequence[memoryview],
    ) -> SegmentSpans | None:

        from aiogpu.memory.addresses import address_of, is_as_mapped

        spans = [(address_of(buffer) - begin, buffer.nbytes) for buffer in buffers]
        is_within = all(
            offset >= 0 and offset + length <= len(mapping) for offset, length in spans
        )
        size = sum(length for _, length in spans)
        if not is_within or 2 * size < len(mapping):
            return None
        is_same = all(is_as_mapped(begin + offset, length) for offset, length in spans)
        return SegmentSpans(segment, len(mapping), spans) if is_same else None

    def _map(self, segment: int, fd: int, size: int) -> mmap.mmap:
        # Counted before it exists, so that the end of an older mapping is not reported.
        self._change(segment, 1)
        try:
            mapping = map_privately(fd, size)
            sight = _Sight(mapping, self._note_gone)
        except BaseException:
            self._change(segment, -1)
            raise
        sight.segment = segment
        self._sights[id(sight)] = sight
        self._latest[segment] = sight
        return mapping

    def _note_gone(self, gone: ref[mmap.mmap]) -> None:
        sight = self._sights.pop(id(gone))
        self._change(sight.segment, -1)

    def _change(self, segment: int, by: int) -> None:
        self._changes.append((segment, by))
        # The holder of the lock checks the queue again after releasing it.
        while self._changes and self._counting.acquire(blocking=False):
            try:
                while self._changes:
                    self._count(*self._changes.popleft())
            finally:
                self._counting.release()

    def _count(self, segment: int, by: int) -> None:
        count = self._counts.get(segment, 0) + by
        if count:
            self._counts[segment] = count
            return
        del self._counts[segment]
        sight = self._latest.get(segment)
        if sight is not None and sight() is None:
            del self._latest[segment]
        self._on_unmapped(segment)
