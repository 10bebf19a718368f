"""Mappings: one for each segment, kept by its views alone; and where views are."""

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
from aiogpu.memory.segment import Segment, map_readonly
from tests.unit.memory.conftest import mapped


class Reader:
    """Mappings of this process, and what was told of them."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.still_there: list[bool] = []
        self.mappings = Mappings(self.note)

    def note(self, segment: int) -> None:
        self.told.append(segment)
        self.still_there.append(any("rw-p" in line for line in mapped()))

    def views(
        self, segment: Segment, *spans: tuple[int, int], number: int = 0
    ) -> list[memoryview]:
        fd = segment.share()
        try:
            return self.mappings.views(
                number or segment.id, fd, segment.size, spans or ((0, 5),)
            )
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


def test_all_views_share_one_mapping_whose_end_is_reported(
    reader: Reader, segment: Segment
) -> None:
    """After the kernel has unmapped it; it may be mapped again."""
    for count in range(1, 3):
        views = [reader.views(segment, (n, 5))[0] for n in range(10)]
        # Its descriptor is not needed while it is mapped.
        views += reader.mappings.views(7, -1, segment.size, [(64, 6)])
        assert bytes(views[-1]) == b"second"
        assert len([line for line in mapped() if "rw-p" in line]) == 1
        assert (reader.mappings.is_mapped(7), reader.mappings.is_mapped(8)) == (
            True,
            False,
        )
        segment.write([memoryview(b"again"), memoryview(b"second")])
        assert bytes(views[0]) == b"again", "its writer may write while it is read"
        del views[1:]
        assert reader.told == [7] * (count - 1)
        views.clear()
        assert (reader.told, reader.still_there) == ([7] * count, [False] * count)
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
def test_whatever_is_derived_keeps_it(
    reader: Reader, segment: Segment, derive: Callable[[memoryview], object]
) -> None:
    kept = derive(reader.views(segment)[0])
    gc.collect()
    assert reader.told == []
    assert segment.is_read
    assert reader.mappings.is_mapped(7)
    del kept
    assert (reader.told, reader.still_there) == ([7], [False])


def test_a_mapping_that_fails_leaves_nothing(reader: Reader, segment: Segment) -> None:
    with pytest.raises((OSError, ValueError)):
        reader.mappings.views(7, -7, segment.size, [(0, 5)])
    with pytest.raises(ValueError, match="greater"):
        reader.mappings.views(7, segment.fd, 2 * segment.size, [(0, 5)])
    assert not reader.mappings.is_mapped(7)
    # Whoever counts on being told is told, though it never was there.
    assert reader.told == [7, 7]


@pytest.mark.parametrize("span", [(-1, 5), (0, -1), (4000, 97), (1 << 62, 1)])
def test_a_span_outside_is_refused(
    reader: Reader, segment: Segment, span: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"outside of segment 7, which has 4096"):
        reader.views(segment, (0, 5), span)
    assert reader.told == []


class Saver:
    """Part of a cycle, with a finalizer that may save what it holds."""

    def __init__(self, view: memoryview, saved: list[memoryview] | None) -> None:
        self.view = view
        self.saved = saved
        self.itself = self

    def __del__(self) -> None:
        if self.saved is not None:
            self.saved.append(self.view)


def test_a_view_saved_by_a_finalizer_is_known_to_the_kernel(
    reader: Reader, segment: Segment
) -> None:
    saved: list[memoryview] = []
    cycle = Saver(reader.views(segment)[0], saved)
    del cycle
    gc.collect()
    assert reader.told == [7]
    assert bytes(saved[0]) == b"first"
    assert segment.is_read
    views = reader.views(segment)
    saved.clear()
    assert segment.is_read
    views.clear()
    assert not segment.is_read
    assert reader.told == [7, 7]


# Where views are


PAGES = 4


SIZE = PAGES * mmap.PAGESIZE


def change(view: memoryview, offset: int = 0) -> None:
    """Write where only reading is allowed, as torch does in place."""
    ctypes.memset(address_of(view) + offset, 1, 1)


@pytest.fixture
def large() -> Iterator[Segment]:
    made = Segment.create(7, SIZE)
    made.write([memoryview(bytes(SIZE))])
    yield made
    made.close()


def test_an_address_is_where_the_bytes_are() -> None:
    data = b"0123456789"
    assert ctypes.string_at(address_of(data), len(data)) == data
    assert address_of(memoryview(data)[3:]) == address_of(data) + 3
    with pytest.raises(BufferError):
        address_of(memoryview(data)[::2])


@pytest.mark.parametrize("touch", [False, True])
def test_a_page_that_was_written_differs_from_those_that_were_read(
    touch: bool, large: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with map_readonly(large.fd, SIZE) as mapping:
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
    with map_readonly(large.fd, SIZE) as mapping:
        assert not is_as_mapped(address_of(mapping), SIZE)


def test_the_spans_of_views_are_found_unless_they_were_changed(
    reader: Reader, large: Segment
) -> None:
    shown, half = reader.mappings.shown, SIZE // 2
    assert shown([memoryview(bytes(SIZE))]) is None
    (view,) = reader.views(large, (0, SIZE))
    assert shown([view]) == SegmentSpans(7, SIZE, [(0, SIZE)])
    assert shown([view[half:]]) == SegmentSpans(7, SIZE, [(half, half)])
    two = [view[:half], view[5 : half + 5]]
    assert shown(two) == SegmentSpans(7, SIZE, [(0, half), (5, half)])
    assert shown([memoryview(bytes(SIZE))]) is None
    assert shown([view, memoryview(bytes(SIZE))]) is None
    assert shown([view[: half - 1]]) is None, "it is small"
    writable = (ctypes.c_char * SIZE).from_address(address_of(view))
    assert shown([memoryview(writable).cast("B")]) is not None
    change(view)
    assert shown([view]) is None
    del two, view
    assert shown([memoryview(bytes(SIZE))]) is None
