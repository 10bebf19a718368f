"""Where a buffer lies, and whether its pages are as they were mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import pytest

from aiogpu.memory import addresses as whereabouts
from aiogpu.memory.addresses import address_of, is_as_mapped
from aiogpu.memory.mapping import Mappings, SegmentSpans
from aiogpu.memory.segment import Segment, map_readonly

PAGES = 4
SIZE = PAGES * mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(7, SIZE)
    made.write([memoryview(bytes(SIZE))])
    yield made
    made.close()


@pytest.fixture
def mapping(segment: Segment) -> Iterator[mmap.mmap]:
    made = map_readonly(segment.fd, SIZE)
    yield made
    made.close()  # refused if a buffer of it were still held


def view_of(segment: Segment, mappings: Mappings) -> memoryview:
    descriptor = segment.share()
    (view,) = mappings.views(segment.id, descriptor, SIZE, [(0, SIZE)])
    os.close(descriptor)
    return view


def change(view: memoryview, offset: int = 0) -> None:
    """Write where only reading is allowed, as torch does in place."""
    ctypes.memset(address_of(view) + offset, 1, 1)


def test_an_address_is_where_the_bytes_are() -> None:
    data = b"0123456789"
    assert ctypes.string_at(address_of(data), len(data)) == data
    assert address_of(memoryview(data)[3:]) == address_of(data) + 3


def test_a_buffer_with_gaps_has_none() -> None:
    with pytest.raises(BufferError):
        address_of(memoryview(b"0123456789")[::2])


@pytest.mark.parametrize("touch", [False, True])
def test_pages_that_were_at_most_read(touch: bool, mapping: mmap.mmap) -> None:
    if touch:
        bytes(mapping)
    assert is_as_mapped(address_of(mapping), SIZE)


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize("page", range(PAGES))
def test_a_page_that_was_written(touch: bool, page: int, mapping: mmap.mmap) -> None:
    if touch:
        bytes(mapping)
    mapping[page * mmap.PAGESIZE] = 1
    assert not is_as_mapped(address_of(mapping), SIZE)
    for other in range(PAGES):
        begin = address_of(mapping) + other * mmap.PAGESIZE
        assert is_as_mapped(begin, mmap.PAGESIZE) == (other != page)
        assert is_as_mapped(begin + 1, 1) == (other != page)


def test_a_kernel_that_does_not_tell(
    mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(whereabouts, "open", refuse, raising=False)
    assert not is_as_mapped(address_of(mapping), SIZE)


def test_views_are_found(segment: Segment) -> None:
    mappings = Mappings(lambda _: None)
    view = view_of(segment, mappings)
    assert mappings.shown([view]) == SegmentSpans(7, SIZE, [(0, SIZE)])
    half = SIZE // 2
    assert mappings.shown([view[half:]]) == SegmentSpans(7, SIZE, [(half, half)])
    assert mappings.shown([view[:half], view[5 : half + 5]]) == SegmentSpans(
        7, SIZE, [(0, half), (5, half)]
    )


def test_what_is_no_view_of_one_or_changed_or_small_is_not(segment: Segment) -> None:
    mappings = Mappings(lambda _: None)
    assert mappings.shown([memoryview(bytes(SIZE))]) is None
    view = view_of(segment, mappings)
    assert mappings.shown([memoryview(bytes(SIZE))]) is None
    assert mappings.shown([view, memoryview(bytes(SIZE))]) is None
    assert mappings.shown([view[: SIZE // 2 - 1]]) is None
    writable = (ctypes.c_char * SIZE).from_address(address_of(view))
    assert mappings.shown([memoryview(writable).cast("B")]) is not None
    change(view)
    assert mappings.shown([view]) is None


def test_after_it_is_unmapped_nothing_is_found(segment: Segment) -> None:
    mappings = Mappings(lambda _: None)
    view = view_of(segment, mappings)
    del view
    assert mappings.shown([memoryview(bytes(SIZE))]) is None
