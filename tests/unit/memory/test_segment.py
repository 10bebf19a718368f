"""Segments and their pool: writing, reading, reuse, limits, and the control page."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import AiogpuError, ObjectMemoryError
from aiogpu.memory import segment as segments
from aiogpu.memory.control_page import PAGE_SIZE, SLOTS, ControlPage
from aiogpu.memory.segment import (
    ALIGNMENT,
    NAMED_BY,
    USUAL,
    Segment,
    map_privately,
    spill_directory,
)
from aiogpu.memory.segment_pool import SegmentPool
from tests.support.sampling import examples

PAGE = mmap.PAGESIZE


@contextmanager
def at_most(kind: int, most: int) -> Iterator[None]:
    """Set a limit of this process for a while."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.fixture(params=["memory", "disk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return str(tmp_path) if request.param == "disk" else None


def contents(segment: Segment, spans: tuple[tuple[int, int], ...]) -> list[bytes]:
    """Return the bytes that a reader finds."""
    fd = segment.share()
    with map_privately(fd, segment.size) as mapping:
        os.close(fd)
        return [mapping[start : start + length] for start, length in spans]


def test_any_contiguous_buffer_can_be_written(directory: str | None) -> None:
    pair = np.dtype([("a", "<i4"), ("b", ">f8")])
    arrays = [
        np.arange(12, dtype=">f4").reshape(3, 4),
        np.arange(24, dtype="<i8").reshape((2, 3, 4), order="F"),
        np.array(3 + 4j),
        np.ones((2, 2), dtype=pair),
        np.zeros((0, 5), dtype=np.float16),
    ]
    buffers = [memoryview(array) for array in arrays]
    lengths = [array.nbytes for array in arrays]
    segment = Segment.create(1, Segment.room_for(lengths), directory)
    for _ in range(1 if directory else 3):
        spans = segment.write(buffers)
        assert [length for _, length in spans] == lengths
        assert all(start % ALIGNMENT == 0 for start, _ in spans)
        assert contents(segment, spans) == [array.tobytes("A") for array in arrays]
    segment.close()


def test_partial_write_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(fd: int, pieces: list[bytes], offset: int) -> int:
        return os.pwrite(fd, b"".join(pieces)[:7], offset)

    monkeypatch.setattr(segments.os, "pwritev", cut)
    segment = Segment.create(1, 1000)
    buffers = [b"", b"a" * 65, b"", b"b" * 3, b"c" * 64, b""]
    spans = segment.write([memoryview(buffer) for buffer in buffers])
    assert contents(segment, spans) == buffers
    segment.close()


def test_buffers_that_do_not_fit_are_refused_before_the_write() -> None:
    segment = Segment.create(3, PAGE)
    buffers = [memoryview(b"x" * PAGE), memoryview(b"y")]
    with pytest.raises(ValueError, match=rf"2 buffers need {PAGE + 1} .* 3 has {PAGE}"):
        segment.write(buffers)
    with pytest.raises(BufferError):
        segment.write([memoryview(b"123456")[::2]])
    assert contents(segment, ((0, PAGE),)) == [bytes(PAGE)]
    segment.close()


def test_only_the_writer_can_write_a_segment_again() -> None:
    segment = Segment.create(1, PAGE)
    segment.write([memoryview(b"first")])
    assert contents(segment, ((0, 5),)) == [b"first"]
    fd = segment.share()
    for descriptor in (fd, segment.fd):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, PAGE)
        with pytest.raises(OSError, match=r"permitted|descriptor"):
            os.pwrite(descriptor, b"no", 0)
        with pytest.raises(OSError, match=r"permitted|argument"):
            os.ftruncate(descriptor, 0)
        with pytest.raises(OSError, match=r"permitted|argument"):
            os.ftruncate(descriptor, 2 * PAGE)
    mapping = map_privately(fd, PAGE)
    os.close(fd)
    assert mapping[:5] == b"first"
    segment.write([memoryview(b"again")])
    assert mapping[:5] == b"again"
    # torch changes tensors in place like this; no other process sees the change.
    mapping[:2] = b"no"
    assert mapping[:5] == b"noain"
    assert contents(segment, ((0, 5),)) == [b"again"]
    mapping.close()
    segment.close()


def test_segment_on_disk_is_written_once(tmp_path: Path) -> None:
    segment = Segment.create(1, PAGE, str(tmp_path))
    segment.write([memoryview(b"first")])
    with pytest.raises(ValueError, match=r"segment 1 is on disk.*again"):
        segment.write([memoryview(b"again")])
    assert contents(segment, ((0, 5),)) == [b"first"]
    segment.close()


def test_segment_works_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **keywords: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **keywords)

    monkeypatch.setattr(segments.os, "open", refuse)
    segment = Segment.create(1, PAGE, str(tmp_path))
    assert os.listdir(tmp_path) == []
    spans = segment.write([memoryview(b"there")])
    assert contents(segment, spans) == [b"there"]
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_descriptor_is_read_only_and_not_inherited(directory: str | None) -> None:
    """A reader keeps the content after the segment was closed."""
    segment = Segment.create(1, PAGE, directory)
    segment.write([memoryview(b"kept")])
    fd = segment.share()
    assert not os.get_inheritable(segment.fd)
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    segment.close()
    free = os.open("/dev/null", os.O_RDONLY)
    segment.close()
    os.close(free)
    with map_privately(fd, PAGE) as mapping:
        os.close(fd)
        assert mapping[:4] == b"kept"


# Limits


def test_segment_that_cannot_be_made_raises_the_system_error(tmp_path: Path) -> None:
    with (
        at_most(resource.RLIMIT_FSIZE, PAGE),
        pytest.raises(OSError, match="too large") as caught,
    ):
        Segment.create(1, 2 * PAGE, str(tmp_path))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        Segment.create(1, PAGE, str(tmp_path / "missing"))
    with pytest.raises((OSError, OverflowError)):
        Segment.create(1, 1 << 60)


# Readers


def test_segment_is_read_while_descriptors_exist(directory: str | None) -> None:
    segment = Segment.create(1, PAGE, directory)
    assert not segment.is_read
    first, second = segment.share(), segment.share()
    os.close(second)
    assert segment.is_read
    copy = os.dup(first)
    os.close(first)
    assert segment.is_read
    mapping = map_privately(copy, PAGE)
    os.close(copy)
    assert segment.is_read
    mapping.close()
    assert not segment.is_read
    segment.close()


def test_segment_is_read_if_kernel_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: bytes | int = 0) -> bytes | int:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    segment = Segment.create(1, PAGE)
    monkeypatch.setattr(segments.fcntl, "fcntl", refuse)
    os.close(segment.share())
    assert segment.is_read
    segment.close()


def test_segment_works_on_older_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel refuses these numbers of seals and advice with EINVAL.
    monkeypatch.setattr(segments, "_F_SEAL_FUTURE_WRITE", 0x8000)
    monkeypatch.setattr(segments, "_MADV_POPULATE_WRITE", 9999)
    segment = Segment.create(1, PAGE)
    for text in (b"one", b"two"):
        spans = segment.write([memoryview(text)])
        assert contents(segment, spans) == [text]
    segment.close()


# The spill directory


def test_the_spill_directory_is_the_first_usable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMED_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert spill_directory() == tempfile.gettempdir()
    for name in NAMED_BY:
        monkeypatch.setenv(name, str(tmp_path))
        assert spill_directory() == str(tmp_path)
        assert os.listdir(tmp_path) == [], "no test file is written"
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, _: path not in USUAL)
    assert spill_directory() == str(tmp_path), "the working directory comes last"


# The control page


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = ControlPage.create()
    yield descriptor
    os.close(descriptor)


def test_control_page_shares_the_words_of_each_slot(descriptor: int) -> None:
    driver, worker = ControlPage.open(descriptor), ControlPage.open(descriptor)
    assert os.fstat(descriptor).st_size == PAGE_SIZE
    assert not os.get_inheritable(descriptor)
    words = [word for page in (driver, worker) for word in readers(page)]
    assert {read(slot) for read in words for slot in range(SLOTS)} == {0}
    writers = (driver.cancel, driver.acknowledge, driver.begin, driver.revoke)
    for number, write in enumerate(writers, start=1):
        write(0, number)
        write(SLOTS - 1, 2**64 - 1)
        with pytest.raises(IndexError):
            write(SLOTS, 1)
    for slot, expected in (0, [1, 2, 3, 4]), (1, [0] * 4), (SLOTS - 1, [2**64 - 1] * 4):
        assert [read(slot) for read in readers(worker)] == expected
    assert worker.left() > 1 << 60, "unlimited until the driver sets it"
    for left in (0, 5, 1 << 40):
        driver.note_left(left)
        assert worker.left() == left
    pid = os.fork()
    if pid == 0:
        worker.acknowledge(5, 42)
        os._exit(0)
    os.waitpid(pid, 0)
    worker.close()
    assert driver.acknowledged(5) == 42
    driver.close()


def readers(page: ControlPage) -> tuple[Callable[[int], int], ...]:
    return page.cancelled, page.acknowledged, page.begun, page.revoked


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(1000, 20 * PAGE, lambda: None)
    yield pool
    pool.close()


def sums(pool: SegmentPool) -> tuple[int, int, int]:
    """Return the numbers of pages that are warm, in use and on disk."""
    counts = (pool.bytes_warm, pool.bytes_in_use, pool.bytes_on_disk)
    assert not any(count % PAGE for count in counts)
    return counts[0] // PAGE, counts[1] // PAGE, counts[2] // PAGE


def test_returned_segment_is_reused_in_place(pool: SegmentPool) -> None:
    segment = pool.take(3 * PAGE)
    assert [pool.take(PAGE).id for _ in range(2)] == [1001, 1002]
    segment.write([memoryview(b"first")])
    inode = os.fstat(segment.fd).st_ino
    assert pool.give_back(segment.id)
    assert sums(pool) == (3, 2, 0)
    for number in (segment.id, 5):
        with pytest.raises(KeyError):
            pool.give_back(number)
    again = pool.take(2 * PAGE + 1)
    assert again is segment
    assert sums(pool) == (0, 5, 0)
    again.write([memoryview(b"again")])
    assert os.fstat(again.fd).st_ino == inode
    fd = again.share()
    with map_privately(fd, PAGE) as mapping:
        os.close(fd)
        assert mapping[:5] == b"again"
    pool.close()
    assert (segment.fd, sums(pool)) == (-1, (0, 0, 0))


@pytest.mark.parametrize(
    ("pages", "fits"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 9), (8, 9), (9, 9), (10, None)],
)
def test_pool_takes_the_smallest_segment_that_fits(
    pool: SegmentPool, pages: int, fits: int | None
) -> None:
    for segment in [pool.take(size * PAGE) for size in (9, 1, 2, 4)]:
        pool.give_back(segment.id)
    segment = pool.take(pages * PAGE)
    assert segment.size == (fits or pages) * PAGE
    assert sums(pool) == ((16 - fits, fits, 0) if fits else (16, pages, 0))


def test_pool_closes_warm_segments_when_memory_is_scarce(pool: SegmentPool) -> None:
    for taken in [pool.take(2 * PAGE) for _ in range(4)]:
        pool.give_back(taken.id)
    segment = pool.take(5 * PAGE, is_scarce=True)
    assert not segment.is_on_disk
    assert sums(pool) == (2, 5, 0)
    with pytest.raises(ObjectMemoryError):
        pool.take(5 * PAGE, is_scarce=True)
    assert sums(pool) == (2, 5, 0)


def test_pool_puts_segments_on_disk_when_memory_is_scarce(tmp_path: Path) -> None:
    pool = SegmentPool(1, 20 * PAGE, lambda: str(tmp_path))
    segment = pool.take(3 * PAGE, is_scarce=True)
    assert segment.is_on_disk
    assert segment.id == 1
    assert sums(pool) == (0, 0, 3)
    assert not pool.give_back(1)
    assert sums(pool) == (0, 0, 0)
    assert pool.take(PAGE, is_scarce=True).id == 2
    pool.close()
    assert sums(pool) == (0, 0, 0)


def test_memory_error_names_the_request_and_advice(pool: SegmentPool) -> None:
    pool.take(2 * PAGE)
    with pytest.raises(ObjectMemoryError) as caught:
        pool.take(3 << 20, is_scarce=True)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, AiogpuError)
    text = str(caught.value)
    assert "3145728 bytes (3.0 MiB)" in text
    assert f"{2 * PAGE} bytes by this process" in text
    assert str(20 * PAGE) in text
    for advice in ("object_memory=", "drop handles", "spill_directory="):
        assert advice in text
    assert pool.take(PAGE).id == 1001


def test_missing_spill_directory_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    pool = SegmentPool(1, 0, lambda: str(missing))
    with pytest.raises(ObjectMemoryError, match=rf"{missing} cannot be written"):
        pool.take(PAGE, is_scarce=True)


@pytest.mark.parametrize("is_scarce", [False, True])
def test_too_many_descriptors_are_an_error(tmp_path: Path, is_scarce: bool) -> None:
    pool = SegmentPool(1, 0, lambda: str(tmp_path))
    with (
        at_most(resource.RLIMIT_NOFILE, 0),
        pytest.raises(OSError, match="open files") as caught,
    ):
        pool.take(PAGE, is_scarce)
    assert caught.value.errno == errno.EMFILE
    assert sums(pool) == (0, 0, 0)
    assert pool.take(PAGE).id == 1
    pool.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    limit=st.integers(0, 12),
    steps=st.lists(st.tuples(st.sampled_from("tsgdr"), st.integers(1, 9)), max_size=40),
)
def test_sums_agree_with_segments(limit: int, steps: list[tuple[str, int]]) -> None:
    pool = SegmentPool(1, limit * PAGE, lambda: None)
    used: list[Segment] = []
    seen: dict[int, Segment] = {}
    reading: list[int] = []
    for act, number in steps:
        if act in "ts":
            try:
                used.append(pool.take(number * PAGE, is_scarce=act == "s"))
            except ObjectMemoryError:
                assert pool.bytes_warm < number * PAGE
                continue
            assert number <= used[-1].size // PAGE <= 2 * number
            assert not used[-1].is_read
            seen[used[-1].id] = used[-1]
        elif used and act == "r":
            reading.append(used[number % len(used)].share())
        elif used:
            segment = used.pop(number % len(used))
            was_read = segment.is_read
            if act == "d":
                pool.discard(segment.id)
            elif pool.give_back(segment.id):
                assert not was_read
        in_use = sum(segment.size for segment in used)
        assert pool.bytes_in_use == in_use
        total = sum(segment.size for segment in seen.values() if segment.fd >= 0)
        assert pool.bytes_warm == total - in_use
        assert pool.bytes_warm <= pool.limit
    pool.close()
    assert all(segment.fd == -1 for segment in seen.values())
    for fd in reading:
        os.close(fd)
