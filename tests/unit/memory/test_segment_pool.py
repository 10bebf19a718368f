"""A pool of segments: kept when nobody reads them, and written again."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiogpu.errors import AiogpuError, ObjectMemoryError
from aiogpu.memory import segment as segments
from aiogpu.memory.segment import Segment, map_readonly
from aiogpu.memory.segment_pool import SegmentPool
from tests.support.sampling import examples

PAGE = mmap.PAGESIZE


def nowhere() -> None:
    return None


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(1000, 20 * PAGE, nowhere)
    yield pool
    pool.close()


def sums(pool: SegmentPool) -> tuple[int, int, int]:
    """Pages that are warm, in use and on disk."""
    counts = (pool.bytes_warm, pool.bytes_in_use, pool.bytes_on_disk)
    assert not any(count % PAGE for count in counts)
    return counts[0] // PAGE, counts[1] // PAGE, counts[2] // PAGE


def test_what_is_given_back_is_taken_again_and_written_in_place(
    pool: SegmentPool,
) -> None:
    segment = pool.take(3 * PAGE)
    assert [pool.take(PAGE).id for _ in range(2)] == [1001, 1002]
    segment.write([memoryview(b"first")])
    place = os.fstat(segment.fd).st_ino
    assert pool.give_back(segment.id)
    assert sums(pool) == (3, 2, 0)
    for number in (segment.id, 5):
        with pytest.raises(KeyError):
            pool.give_back(number)
    again = pool.take(2 * PAGE + 1)
    assert again is segment
    assert sums(pool) == (0, 5, 0)
    again.write([memoryview(b"again")])
    assert os.fstat(again.fd).st_ino == place
    fd = again.share()
    with map_readonly(fd, PAGE) as mapping:
        os.close(fd)
        assert mapping[:5] == b"again"
    pool.close()
    assert (segment.fd, sums(pool)) == (-1, (0, 0, 0))


@pytest.mark.parametrize(
    ("asked", "fits"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 9), (8, 9), (9, 9), (10, None)],
)
def test_the_smallest_that_fits(
    pool: SegmentPool, asked: int, fits: int | None
) -> None:
    for taken in [pool.take(pages * PAGE) for pages in (9, 1, 2, 4)]:
        pool.give_back(taken.id)
    segment = pool.take(asked * PAGE)
    assert segment.size == (fits or asked) * PAGE
    assert sums(pool) == ((16 - fits, fits, 0) if fits else (16, asked, 0))


def test_those_unused_the_longest_are_closed_first(pool: SegmentPool) -> None:
    taken = [pool.take(pages * PAGE) for pages in (6, 7, 5, 4)]
    for segment in taken[:3]:
        assert pool.give_back(segment.id)
    assert sums(pool) == (18, 4, 0)
    assert pool.give_back(taken[3].id)
    assert sums(pool) == (16, 0, 0)
    assert [segment.fd >= 0 for segment in taken] == [False, True, True, True]


def test_what_is_still_read_is_closed_and_stays_as_it_is(pool: SegmentPool) -> None:
    segment = pool.take(PAGE)
    segment.write([memoryview(b"value")])
    fd = segment.share()
    with map_readonly(fd, PAGE) as mapping:
        os.close(fd)
        assert not pool.give_back(segment.id)
        assert pool.take(PAGE) is not segment
        assert mapping[:5] == b"value"


def test_where_memory_is_scarce_warm_ones_are_closed(pool: SegmentPool) -> None:
    for taken in [pool.take(2 * PAGE) for _ in range(4)]:
        pool.give_back(taken.id)
    segment = pool.take(5 * PAGE, is_scarce=True)
    assert not segment.is_on_disk
    assert sums(pool) == (2, 5, 0)
    with pytest.raises(ObjectMemoryError):
        pool.take(5 * PAGE, is_scarce=True)
    assert sums(pool) == (2, 5, 0)


def test_where_memory_is_scarce_it_is_on_disk(tmp_path: Path) -> None:
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


def test_the_error_says_what_was_asked_what_there_is_and_what_to_do(
    pool: SegmentPool,
) -> None:
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


SMALL_DISK = """
import sys
from aiogpu.errors import ObjectMemoryError
from aiogpu.memory.segment import map_readonly
from aiogpu.memory.segment_pool import SegmentPool

place = sys.argv[1]
pool = SegmentPool(1, 0, lambda: place)
first = pool.take(40_000, is_scarce=True)
try:
    pool.take(40_000, is_scarce=True)
except ObjectMemoryError as error:
    assert f"{place} is full (No space left on device)" in str(error), error
    assert isinstance(error.__cause__, OSError)
else:
    raise AssertionError("there was room")
first.write([memoryview(bytes(40_000))])
assert pool.bytes_on_disk == first.size
pool.discard(first.id)
pool.take(40_000, is_scarce=True).write([memoryview(b"there is room again")])
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one, of 64 KiB; seen by the program alone, and gone with it."""
    mount = 'mount -t tmpfs -o size=64k none "$0" || exit 99; exec "$@"'
    program = [sys.executable, "-c", SMALL_DISK, str(tmp_path)]
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, str(tmp_path), *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == 99 or "unshare" in ran.stderr:
        pytest.skip(f"only root can mount: {ran.stderr}")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    pool = SegmentPool(1, 0, lambda: str(tmp_path))
    with pytest.raises(
        ObjectMemoryError, match=rf"{tmp_path} is full \({os.strerror(number)}"
    ):
        pool.take(PAGE, is_scarce=True)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    pool = SegmentPool(1, 0, lambda: str(missing))
    with pytest.raises(ObjectMemoryError, match=rf"{missing} cannot be written"):
        pool.take(PAGE, is_scarce=True)


@pytest.mark.parametrize("is_scarce", [False, True])
def test_too_many_descriptors_is_what_the_system_says(
    tmp_path: Path, is_scarce: bool
) -> None:
    pool = SegmentPool(1, 0, lambda: str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="open files") as caught:
            pool.take(PAGE, is_scarce)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.errno == errno.EMFILE
    assert sums(pool) == (0, 0, 0)
    assert pool.take(PAGE).id == 1
    pool.close()


@settings(max_examples=examples(60), deadline=None)
@given(
    limit=st.integers(0, 12),
    steps=st.lists(st.tuples(st.sampled_from("tsgdr"), st.integers(1, 9)), max_size=40),
)
def test_the_sums_are_those_of_the_segments(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    pool = SegmentPool(1, limit * PAGE, nowhere)
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
        there = {each.id: each.size for each in seen.values() if each.fd >= 0}
        in_use = sum(each.size for each in used)
        assert pool.bytes_in_use == in_use
        assert pool.bytes_warm == sum(there.values()) - in_use
        assert pool.bytes_warm <= pool.limit
    pool.close()
    assert all(each.fd == -1 for each in seen.values())
    for fd in reading:
        os.close(fd)
