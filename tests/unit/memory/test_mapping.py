"""Mappings: one per segment, alive while it has views; and the spans of views."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from aiogpu.memory import addresses
from aiogpu.memory.addresses import address_of, is_as_mapped
from aiogpu.memory.mapping import Mappings, SegmentSpans
from aiogpu.memory.segment import Segment, map_privately
from tests.unit.memory.conftest import mapped


class Reader:
    """Mappings of this process, and the reports of their ends."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self.still_there: list[bool] = []
        self.mappings = Mappings(self.note)

    def note(self, segment: int) -> None:
        self.reported.append(segment)
        self.still_there.append(any("rw-p" in line for line in mapped()))

    def views(self, segment: Segment, *spans: tuple[int, int]) -> list[memoryview]:
        fd = segment.share()
        try:
            return self.mappings.views(segment.id, fd, segment.size, spans or ((0, 5),))
        finally:
            os.close(fd)


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(7, 100)
    segment.write([memoryview(b"first"), memoryview(b"second")])
    yield segment
    segment.close()


def test_each_load_has_a_mapping_and_the_last_end_is_reported(
    reader: Reader, segment: Segment
) -> None:
    """The report comes after the unmapping, and the segment can be mapped again."""
    for count in range(1, 3):
        views = [reader.views(segment, (0, 5))[0] for _ in range(10)]
        views += reader.views(segment, (64, 6))
        assert bytes(views[-1]) == b"second"
        assert len([line for line in mapped() if "rw-p" in line]) == 11
        assert reader.mappings.is_mapped(7)
        assert not reader.mappings.is_mapped(8)
        segment.write([memoryview(b"again"), memoryview(b"second")])
        assert bytes(views[0]) == b"again", "the writer can write while a view exists"
        views[1][:] = b"other"
        assert [bytes(view) for view in views[:3]] == [b"again", b"other", b"again"]
        assert bytes(reader.views(segment)[0]) == b"again"
        segment.write([memoryview(b"first"), memoryview(b"second")])
        assert bytes(views[1]) == b"other"
        del views[1:]
        assert reader.reported == [7] * (count - 1)
        views.clear()
        assert (reader.reported, reader.still_there) == ([7] * count, [False] * count)
        assert not reader.mappings.is_mapped(7)
        assert not segment.is_read


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view.cast("b"),
        lambda view: memoryview(view).toreadonly(),
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.frombuffer(view, np.uint8).reshape(5, 1).T,
        pickle.PickleBuffer,
        lambda view: pickle.PickleBuffer(np.frombuffer(view, np.uint8)).raw(),
        lambda view: iter(view),
    ],
)
def test_objects_derived_from_a_view_keep_the_mapping(
    reader: Reader, segment: Segment, derive: Callable[[memoryview], object]
) -> None:
    kept = derive(reader.views(segment)[0])
    gc.collect()
    assert reader.reported == []
    assert segment.is_read
    assert reader.mappings.is_mapped(7)
    del kept
    assert (reader.reported, reader.still_there) == ([7], [False])


def test_mapping_that_fails_leaves_nothing(reader: Reader, segment: Segment) -> None:
    with pytest.raises((OSError, ValueError)):
        reader.mappings.views(7, -7, segment.size, [(0, 5)])
    with pytest.raises(ValueError, match="greater"):
        reader.mappings.views(7, segment.fd, 2 * segment.size, [(0, 5)])
    assert not reader.mappings.is_mapped(7)
    # The end is reported although the mapping never existed.
    assert reader.reported == [7, 7]


@pytest.mark.parametrize("span", [(-1, 5), (0, -1), (4000, 97), (1 << 62, 1)])
def test_span_outside_of_the_segment_is_refused(
    reader: Reader, segment: Segment, span: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"outside of segment 7, which has 4096"):
        reader.views(segment, (0, 5), span)
    assert reader.reported == []


class Saver:
    """An object in a cycle with a finalizer that saves its view."""

    def __init__(self, view: memoryview, saved: list[memoryview]) -> None:
        self.view = view
        self.saved = saved
        self.itself = self

    def __del__(self) -> None:
        self.saved.append(self.view)


def test_segment_counts_as_read_while_a_finalizer_keeps_a_view(
    reader: Reader, segment: Segment
) -> None:
    saved: list[memoryview] = []
    cycle = Saver(reader.views(segment)[0], saved)
    del cycle
    gc.collect()
    assert reader.reported == [7]
    assert bytes(saved[0]) == b"first"
    assert segment.is_read
    views = reader.views(segment)
    saved.clear()
    assert segment.is_read
    views.clear()
    assert not segment.is_read
    assert reader.reported == [7, 7]


# Spans of views

PAGES = 4
SIZE = PAGES * mmap.PAGESIZE


@pytest.fixture
def large() -> Iterator[Segment]:
    segment = Segment.create(7, SIZE)
    segment.write([memoryview(bytes(SIZE))])
    yield segment
    segment.close()


def test_address_is_that_of_the_bytes() -> None:
    data = b"0123456789"
    assert ctypes.string_at(address_of(data), len(data)) == data
    assert address_of(memoryview(data)[3:]) == address_of(data) + 3
    with pytest.raises(BufferError):
        address_of(memoryview(data)[::2])


@pytest.mark.parametrize("touch", [False, True])
def test_written_page_differs_from_read_pages(
    touch: bool, large: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with map_privately(large.fd, SIZE) as mapping:
        start = address_of(mapping)
        if touch:
            bytes(mapping)
        for page in range(PAGES):
            begin = start + page * mmap.PAGESIZE
            assert is_as_mapped(begin, SIZE - page * mmap.PAGESIZE)
            mapping[page * mmap.PAGESIZE] = 1
            assert not is_as_mapped(start, SIZE)
            assert not is_as_mapped(begin + 1, 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(addresses, "open", refuse, raising=False)
    with map_privately(large.fd, SIZE) as mapping:
        assert not is_as_mapped(address_of(mapping), SIZE)


def test_spans_of_unchanged_views_are_found(reader: Reader, large: Segment) -> None:
    shown, half = reader.mappings.shown, SIZE // 2
    assert shown([memoryview(bytes(SIZE))]) is None
    (view,) = reader.views(large, (0, SIZE))
    assert shown([view]) == SegmentSpans(7, SIZE, [(0, SIZE)])
    assert shown([view[half:]]) == SegmentSpans(7, SIZE, [(half, half)])
    two = [view[:half], view[5 : half + 5]]
    assert shown(two) == SegmentSpans(7, SIZE, [(0, half), (5, half)])
    assert shown([memoryview(bytes(SIZE))]) is None
    assert shown([view, memoryview(bytes(SIZE))]) is None
    assert shown([view[: half - 1]]) is None, "the part is small"
    writable = (ctypes.c_char * SIZE).from_address(address_of(view))
    assert shown([memoryview(writable).cast("B")]) is not None
    ctypes.memset(address_of(view), 1, 1)  # torch writes in place like this
    assert shown([view]) is None
    del two, view
    assert shown([memoryview(bytes(SIZE))]) is None
