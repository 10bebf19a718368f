"""What values are measured by is what it is said to be."""

import os
from mmap import PAGESIZE

import pytest

from benchmarks import tasks
from benchmarks.census import forget_peak, memory_now, peak_memory, shared_memory
from benchmarks.environments import ENVIRONMENTS
from benchmarks.method import QUICK
from benchmarks.workloads import values

pytestmark = pytest.mark.either_loop

LARGE = 64 << 20


@pytest.fixture
def memfd():
    descriptor = os.memfd_create("benchmark")
    yield descriptor
    os.close(descriptor)


def test_memory_without_a_name_counts_once(memfd):
    before = shared_memory()
    os.write(memfd, bytes(3 * PAGESIZE))
    copy = os.dup(memfd)
    try:
        assert shared_memory() - before == 3 * PAGESIZE
    finally:
        os.close(copy)


def test_a_peak_that_has_passed_is_seen():
    forget_peak()
    before = memory_now()
    bytearray(LARGE)[:] = b"x" * LARGE
    assert peak_memory() - before >= LARGE
    forget_peak()
    assert peak_memory() - memory_now() < LARGE / 2


def test_the_floor_copies():
    pytest.importorskip("numpy")
    copying = values.Copying(1000)
    assert copying.array.nbytes == 1000
    assert tasks.first_of(copying.array) == 1


def test_an_array_is_made_once_in_a_process():
    pytest.importorskip("numpy")
    assert tasks.give_kept(100) is tasks.give_kept(100)
    assert tasks.give_kept(100).nbytes == 100


async def test_what_is_kept_is_there_once_and_never_in_the_driver():
    pytest.importorskip("numpy")
    rows = await values.measure(ENVIRONMENTS["aiogpu"](), QUICK)
    found = {row.name.removeprefix("values: "): row for row in rows}
    assert len(found) == len(rows) == 11
    in_all = found["1 MB by handle, in all"]
    assert in_all.p50 * values.MB == pytest.approx(QUICK.large, abs=4 * PAGESIZE)
    assert found["1 MB task to task, driver"].p50 < 5
    assert found["50 handles of results"].samples
