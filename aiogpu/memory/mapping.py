"""The segments that one process has mapped, its own included."""

from __future__ import annotations

import _thread
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ref

from aiogpu.memory.segment import map_readonly


class _Sight(ref[mmap.mmap]):
    """A weak reference that knows which segment its mapping shows."""

    __slots__ = ("segment",)
    segment: int


class SegmentSpans(NamedTuple):
    """The positions of buffers in a segment.

    Attributes:
        segment: its number.
        size: its bytes.
        spans: offset and length of each buffer.
    """

    segment: int
    size: int
    spans: list[tuple[int, int]]


class Mappings:
    """The segments that this process reads.

    There is one mapping for each, which all its views share and which they alone keep:
    it goes with the last of them. May be used by any thread.

    That it is gone is told once for each time that it came: after munmap(2), but for
    one case. Where the views are part of a reference cycle, the collector tells it
    just before, and a finalizer may even save a view then. So before a writer writes
    again he asks the kernel (`Segment.is_read`). So too for what a fork inherits, of
    which nothing is told here.
    """

    def __init__(self, on_unmapped: Callable[[int], None]) -> None:
        """Begin without any.

        Args:
            on_unmapped: called with a segment when its mapping is gone: by the
                collector, in any thread and amid anything else; or right in `views`.
                It must be short, take no lock, and call nothing here but `is_mapped`.
        """
        self._on_unmapped = on_unmapped
        self._latest: dict[int, _Sight] = {}
        # Kept until they have been called.
        self._sights: dict[int, _Sight] = {}
        # No lock may be waited for where the collector runs. So what has changed is
        # queued, and whoever gets the lock without waiting counts it for all.
        self._changes: deque[tuple[int, int]] = deque()
        self._counting = _thread.allocate_lock()
        self._counts: dict[int, int] = {}

    def views(
        self, segment: int, fd: int, size: int, spans: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Give read-only views of some spans of a segment.

        Args:
            segment: its number.
            fd: a descriptor of it; may be closed afterwards. Unused if it is mapped.
                Up to Python 3.12 a mapping keeps a copy of the descriptor open.
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
        memory = memoryview(self._mapping(segment, fd, size)).toreadonly()
        return [memory[offset : offset + length] for offset, length in spans]

    def is_mapped(self, segment: int) -> bool:
        """Return whether a view of it is there."""
        sight = self._latest.get(segment)
        return segment in self._counts or (sight is not None and sight() is not None)

    def shown(self, buffers: Sequence[memoryview]) -> SegmentSpans | None:
        """Find buffers that are unchanged views of a segment.

        Args:
            buffers: contiguous.

        Returns:
            None if one is not of it, or may have been changed in this process, or if
            they are less than half of it.
        """
        if not self._latest:
            return None
        # Late: it costs more than all the rest, and is seldom needed.

        from aiogpu.memory.addresses import address_of

        first = address_of(buffers[0])
        for segment, sight in [*self._latest.items()]:
            mapping = sight()
            begin = 0 if mapping is None else address_of(mapping)
            if mapping is not None and begin <= first < begin + len(mapping):
                return self._shown(segment, mapping, begin, buffers)
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

    def _mapping(self, segment: int, fd: int, size: int) -> mmap.mmap:
        sight = self._latest.get(segment)
        mapping = None if sight is None else sight()
        if mapping is not None and len(mapping) >= size:
            return mapping
        # Counted before it is there, lest the end of another one be told meanwhile.
        self._change(segment, 1)
        try:
            mapping = map_readonly(fd, size)
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
        # The holder of the lock looks again after letting go of it.
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
