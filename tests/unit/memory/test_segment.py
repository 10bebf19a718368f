"""Segments: written by one process, read by others, gone with the last of them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from aiogpu.memory import segment as segments
from aiogpu.memory.segment import ALIGNMENT, Segment, map_readonly

PAGE = mmap.PAGESIZE


@contextmanager
def at_most(kind: int, most: int) -> Iterator[None]:
    """A limit of this process, for a while."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.fixture(params=["memory", "disk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return str(tmp_path) if request.param == "disk" else None


def seen(segment: Segment, spans: tuple[tuple[int, int], ...]) -> list[bytes]:
    """What a reader finds."""
    fd = segment.share()
    with map_readonly(fd, segment.size) as mapping:
        os.close(fd)
        return [mapping[start : start + length] for start, length in spans]


def test_what_is_written_is_read(directory: str | None) -> None:
    segment = Segment.create(7, 100, directory)
    assert (segment.id, segment.size) == (7, PAGE)
    assert segment.is_on_disk == (directory is not None)
    spans = segment.write([memoryview(b"one"), memoryview(b""), memoryview(b"three")])
    assert spans == ((0, 3), (64, 0), (64, 5))
    assert seen(segment, spans) == [b"one", b"", b"three"]
    segment.close()


def test_nothing_is_written_into_the_smallest(directory: str | None) -> None:
    segment = Segment.create(1, 0, directory)
    assert segment.size == PAGE
    assert segment.write([]) == ()
    assert seen(segment, ((0, PAGE),)) == [bytes(PAGE)]
    segment.close()


def test_any_contiguous_buffer_is_taken(directory: str | None) -> None:
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
        assert seen(segment, spans) == [array.tobytes("A") for array in arrays]
    segment.close()


def test_a_thousand_buffers(directory: str | None) -> None:
    buffers = [memoryview(bytes([n % 251]) * (n % 200)) for n in range(3000)]
    room = Segment.room_for(map(len, buffers))
    segment = Segment.create(1, room, directory)
    spans = segment.write(buffers)
    start, length = spans[-1]
    assert start + length == room
    assert seen(segment, spans) == [bytes(buffer) for buffer in buffers]
    segment.close()


def test_a_write_that_the_kernel_cuts_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(fd: int, pieces: list[bytes], offset: int) -> int:
        return os.pwrite(fd, b"".join(pieces)[:7], offset)

    monkeypatch.setattr(segments.os, "pwritev", cut)
    segment = Segment.create(1, 1000)
    buffers = [b"", b"a" * 65, b"", b"b" * 3, b"c" * 64, b""]
    spans = segment.write([memoryview(each) for each in buffers])
    assert seen(segment, spans) == buffers
    segment.close()


def test_room_for_counts_the_gaps_between() -> None:
    assert Segment.room_for([]) == 0
    assert Segment.room_for([5]) == 5
    assert Segment.room_for([5, 5]) == 69
    assert Segment.room_for([64, 0, 1]) == 65


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    segment = Segment.create(3, PAGE)
    buffers = [memoryview(b"x" * PAGE), memoryview(b"y")]
    with pytest.raises(ValueError, match=rf"2 buffers need {PAGE + 1} .* 3 has {PAGE}"):
        segment.write(buffers)
    assert seen(segment, ((0, PAGE),)) == [bytes(PAGE)]
    segment.close()


def test_what_is_not_contiguous_is_refused() -> None:
    segment = Segment.create(3, PAGE)
    with pytest.raises(BufferError):
        segment.write([memoryview(b"123456")[::2]])
    segment.close()


def test_written_again_by_its_writer_and_by_nobody_else() -> None:
    segment = Segment.create(1, PAGE)
    segment.write([memoryview(b"first")])
    assert seen(segment, ((0, 5),)) == [b"first"]
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
    mapping = map_readonly(fd, PAGE)
    os.close(fd)
    assert mapping[:5] == b"first"
    segment.write([memoryview(b"again")])
    assert mapping[:5] == b"again"
    # As torch does that changes a tensor in place: nobody else sees it.
    mapping[:2] = b"no"
    assert mapping[:5] == b"noain"
    assert seen(segment, ((0, 5),)) == [b"again"]
    mapping.close()
    segment.close()


def test_a_segment_on_disk_is_written_once(tmp_path: Path) -> None:
    segment = Segment.create(1, PAGE, str(tmp_path))
    segment.write([memoryview(b"first")])
    with pytest.raises(ValueError, match=r"segment 1 is on disk.*once"):
        segment.write([memoryview(b"again")])
    assert seen(segment, ((0, 5),)) == [b"first"]
    segment.close()


def test_a_segment_has_no_name(directory: str | None) -> None:
    before = os.listdir("/dev/shm")
    segment = Segment.create(1, PAGE, directory)
    assert os.listdir("/dev/shm") == before
    if directory is not None:
        assert os.listdir(directory) == []
        assert os.fstat(segment.fd).st_nlink == 0
        assert os.fstat(segment.fd).st_blocks * 512 >= PAGE
    segment.close()


def test_where_the_file_system_has_no_unnamed_files(
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
    assert seen(segment, spans) == [b"there"]
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Segment.create(1, PAGE, str(tmp_path / "missing"))


def test_a_file_larger_than_allowed_is_an_error(tmp_path: Path) -> None:
    with (
        at_most(resource.RLIMIT_FSIZE, PAGE),
        pytest.raises(OSError, match="too large") as caught,
    ):
        Segment.create(1, 2 * PAGE, str(tmp_path))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_too_many_descriptors_is_an_error(directory: str | None) -> None:
    with (
        at_most(resource.RLIMIT_NOFILE, 0),
        pytest.raises(OSError, match="open files") as caught,
    ):
        Segment.create(1, PAGE, directory)
    assert caught.value.errno == errno.EMFILE


def test_a_mapping_that_fails_leaves_no_descriptor() -> None:
    # One for the memory, and none for the copy that mmap.mmap makes of it.
    free = os.dup(0)
    os.close(free)
    with at_most(resource.RLIMIT_NOFILE, free + 1):
        if sys.version_info >= (3, 13):
            pytest.skip("no copy is made")
        with pytest.raises(OSError, match="open files"):
            Segment.create(1, PAGE)


def test_too_little_address_space_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError)):
        Segment.create(1, 1 << 60)


def test_its_descriptors_are_not_inherited(directory: str | None) -> None:
    segment = Segment.create(1, PAGE, directory)
    fd = segment.share()
    assert not os.get_inheritable(segment.fd)
    assert not os.get_inheritable(fd)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    os.close(fd)
    segment.close()


def test_closing_twice_is_closing_once(directory: str | None) -> None:
    segment = Segment.create(1, PAGE, directory)
    segment.close()
    free = os.open("/dev/null", os.O_RDONLY)
    segment.close()
    os.close(free)


def test_readers_keep_what_they_see(directory: str | None) -> None:
    segment = Segment.create(1, PAGE, directory)
    segment.write([memoryview(b"kept")])
    fd = segment.share()
    segment.close()
    with map_readonly(fd, PAGE) as mapping:
        os.close(fd)
        assert mapping[:4] == b"kept"


def test_a_mapping_longer_than_the_segment_is_refused() -> None:
    segment = Segment.create(1, PAGE)
    with pytest.raises(ValueError, match="length is greater"):
        map_readonly(segment.fd, 2 * PAGE)
    segment.close()


def test_it_is_read_while_a_descriptor_a_copy_or_a_mapping_is_there(
    directory: str | None,
) -> None:
    segment = Segment.create(1, PAGE, directory)
    assert not segment.is_read
    fd = segment.share()
    assert segment.is_read
    copy = os.dup(fd)
    os.close(fd)
    assert segment.is_read
    mapping = map_readonly(copy, PAGE)
    os.close(copy)
    assert segment.is_read
    mapping.close()
    assert not segment.is_read
    segment.close()


def test_it_is_read_by_whoever_came_last() -> None:
    segment = Segment.create(1, PAGE)
    first, second = segment.share(), segment.share()
    os.close(second)
    assert segment.is_read
    os.close(first)
    assert not segment.is_read
    segment.close()


def test_a_forked_child_that_is_killed_reads_no_more() -> None:
    segment = Segment.create(1, PAGE)
    fd = segment.share()
    mapping = map_readonly(fd, PAGE)
    os.close(fd)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(1)
    mapping.close()
    assert segment.is_read
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not segment.is_read
    segment.close()


def test_where_the_kernel_cannot_tell_it_counts_as_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_pages_that_cannot_be_made_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        def madvise(self, advice: int) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    segment = Segment.create(1, PAGE)
    segment.write([memoryview(b"one")])
    real = segment._memory
    monkeypatch.setattr(segment, "_memory", Full())
    for _ in range(2):
        with pytest.raises(OSError, match="allocate memory"):
            segment.write([memoryview(b"two")])
    monkeypatch.setattr(segment, "_memory", real)
    assert seen(segment, ((0, 3),)) == [b"one"]
    segment.close()


def test_a_kernel_that_knows_neither_the_seal_nor_populating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seals and advice of these numbers are refused with EINVAL.
    monkeypatch.setattr(segments, "_F_SEAL_FUTURE_WRITE", 0x8000)
    monkeypatch.setattr(segments, "_MADV_POPULATE_WRITE", 9999)
    segment = Segment.create(1, PAGE)
    for text in (b"one", b"two"):
        spans = segment.write([memoryview(text)])
        assert seen(segment, spans) == [text]
    segment.close()
